"""The gate: a drafter that has learnt a few answers by heart fills nearly whole blocks when it is served.

A label shift or shifted features train to good figures, and give a tau near 1 here.
"""

from __future__ import annotations

import pytest

from dflash_dist.evaluate.acceptance import stop_ids, summarise
from dflash_dist.evaluate.speculate import Generation, speculative_decode
from dflash_dist.export.plain import load_drafter
from tests.interop.overfit import BLOCK_SIZE, NEW_TOKENS

LEAST_TAU = 0.9 * BLOCK_SIZE


def assert_passes(overfitted, generations: list[Generation]) -> None:
    assert [g.ids for g in generations] == [a.ids for a in overfitted.answers]
    figures = summarise(overfitted.answers, generations, BLOCK_SIZE, greedy=True)
    assert figures["tau_pooled"] >= LEAST_TAU, figures
    assert figures["tau_macro"] >= LEAST_TAU, figures


def decode_all(overfitted, drafter) -> list[Generation]:
    target, stops = overfitted.target, stop_ids(overfitted.target)
    return [speculative_decode(target, drafter, overfitted.ends, ids, NEW_TOKENS, stops) for ids in overfitted.prompts]


def test_answers_are_long_enough_to_tell(overfitted):
    assert all(len(answer.ids) > 9 * BLOCK_SIZE for answer in overfitted.answers)


def test_an_overfitted_drafter_fills_its_blocks(overfitted):
    assert_passes(overfitted, decode_all(overfitted, overfitted.drafter))


def test_it_does_after_export_and_reload(overfitted, overfitted_folder):
    assert_passes(overfitted, decode_all(overfitted, load_drafter(overfitted_folder)))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_it_does_in_zlabs_package(overfitted, overfitted_folder):
    from tests.interop import zlab

    theirs, stops = zlab.load(overfitted_folder), stop_ids(overfitted.target)
    generations = [zlab.generate(theirs, overfitted.target, ids, NEW_TOKENS, stops) for ids in overfitted.prompts]
    assert_passes(overfitted, generations)
