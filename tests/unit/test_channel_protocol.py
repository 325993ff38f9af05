"""The loops of target and drafter ranks over a simulated network: no world gets stuck, no batch is lost or doubled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor

from dflash_dist import channel
from dflash_dist.data import schedule
from dflash_dist.data.schedule import Work
from dflash_dist.train import drafter_loop, run, target_loop
from dflash_dist.train.control import Control
from dflash_dist.train.sources import ChannelSource
from tests.simulated_network import Stuck, Violation
from tests.simulated_world import Loader, World


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel's and the drafter loop's doors to the world lead into the simulation."""
    monkeypatch.setattr(channel, "_start", lambda operation, tensor, peer, group: group.start(operation, tensor))
    monkeypatch.setattr(drafter_loop, "all_reduce", lambda tensor, group: group.meet())
    monkeypatch.setattr(drafter_loop, "BatchLoader", Loader)

    def sums(model: Any, ends: Any, features: Tensor, positions: Tensor, work: Any, *_: Any) -> Tensor:
        return model.sums(features, positions, work)

    def sums_and_gradient(*args: Any, **contexts: Any) -> Tensor:
        values = sums(*args)
        values[0].backward()
        return values.detach()

    monkeypatch.setattr(drafter_loop, "block_sums", sums)
    monkeypatch.setattr(drafter_loop, "backward_in_groups", sums_and_gradient)


def failure_of(seed: int) -> Stuck | Violation | None:
    """What goes wrong in a world, if anything does."""
    try:
        World(seed).run()
    except (Stuck, Violation) as error:
        return error
    return None


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 2000), marks=pytest.mark.full)], ids=str)
def test_no_world_gets_stuck_and_no_batch_is_lost_or_doubled(seeds: range) -> None:
    for seed in seeds:
        assert failure_of(seed) is None, f"in world {seed}"


def rounds_of_a_sharded_drafter_mixed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule, "_by_rounds", lambda order, *args: order)


def slot_filled_before_its_message_has_gone(patch: pytest.MonkeyPatch) -> None:
    real = run._ring
    patch.setattr(run, "_ring", lambda *args: real(*args)[:1] * 2)


def slot_given_back_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    def receive(self: ChannelSource, work: Work, batch: Any) -> Tensor:
        rows = real_receive(self, work, batch)
        real_release(self, work)
        return rows

    real_receive, real_release = ChannelSource.receive, ChannelSource.release
    patch.setattr(ChannelSource, "receive", receive)
    patch.setattr(ChannelSource, "release", lambda self, work: None)


def receives_posted_in_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run, "message_sizes", lambda *args: iter(list(target_loop.message_sizes(*args))[::-1]))


def batches_sent_to_one_drafter_after_the_other(patch: pytest.MonkeyPatch) -> None:
    """The order on each channel stays as it was."""
    real = target_loop.prefetch
    patch.setattr(
        target_loop, "prefetch", lambda works, *args, **depth: real(sorted(works, key=by_drafter), *args, **depth)
    )


def by_drafter(work: Work) -> int:
    return work.drafter


def posted_receives_not_filled_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target_loop, "fill_posted", lambda *args: None)


def messages_not_drained_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run, "_drain", lambda *args: None)


def stop_at_a_step_that_others_may_have_passed(patch: pytest.MonkeyPatch) -> None:
    lead_stop = Control.lead_stop
    patch.setattr(Control, "lead_stop", lambda self, step, lag_steps: lead_stop(self, step, -1))


@pytest.mark.parametrize(
    ("defect", "found", "seeds"),
    [
        # Few worlds have rings so small, and so many batches a step, that this one is a fault.
        (rounds_of_a_sharded_drafter_mixed, "waits for the others at a collective", (347, 670, 1835)),
        (slot_filled_before_its_message_has_gone, "message [0-9]+ .*: its slot is still in use", range(40)),
        (slot_given_back_before_it_is_read, "batch 0 holds .*nan", range(40)),
        (receives_posted_in_another_order, "rows for a receive of", range(40)),
        (batches_sent_to_one_drafter_after_the_other, "waits for message [0-9]+ .* to be taken", range(40)),
        (posted_receives_not_filled_after_a_stop, "waits for message [0-9]+ .* to arrive", range(40)),
        (messages_not_drained_after_a_stop, "waits for message [0-9]+ .* to be taken", range(40)),
        (
            stop_at_a_step_that_others_may_have_passed,
            "waits for the others at a collective|batch [0-9]+ holds",
            range(40),
        ),
    ],
)
def test_a_broken_protocol_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], found: str, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    failures = [str(error) for error in map(failure_of, seeds) if error]
    assert any(re.search(found, failure) for failure in failures), failures
