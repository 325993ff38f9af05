"""Shares of the GIL by the real py-spy, what they cost, and what is said where there can be none."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_profiling import gil
from dflash_profiling.gil import GilSampler, shares


def read_until_told(sampler: GilSampler) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not (told := sampler.read()):
        assert time.monotonic() < deadline, "nothing was told"
        time.sleep(0.02)
    return told


def test_the_thread_that_holds_the_gil_is_named_and_sampling_costs_little() -> None:
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            sum(range(2000))

    threads = [threading.Thread(target=burn, name="burner"), threading.Thread(target=ended.wait, name="sleeper")]
    for thread in threads:
        thread.start()
    sampler = GilSampler()
    try:
        told = read_until_told(sampler)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if "gil_unknown" in told:
        pytest.skip(told["gil_unknown"])
    share = told["gil_share"]
    assert share["burner"] > 0.5 and "sleeper" not in share and sum(share.values()) <= 1
    assert 0 < sampler.cpu_s <= 0.002 * gil.PERIOD_S  # the rest of half a per cent is the stream's own
    assert sampler.read() == {} and sampler._process is None  # until the next minute


def test_shares_are_of_all_samples() -> None:
    raw = (
        "thread (11): loader;run (a.py:1);load (b.py:2) 50\nthread (0x7F2a): MainThread;<module> (c.py:3) 20\n"
        "thread (12): loader;run (a.py:1) 10\nthread (13);f (d.py) 2\n2 s behind in sampling\n\n"
    )
    assert shares(raw) == {"loader": 0.3, "MainThread": 0.1, "unnamed": 0.01}
    assert shares("") == {}


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_reason_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = program(tmp_path / "refusing", "echo 'Permission Denied: Try again' >&2; exit 1")
    not_a_program = tmp_path / "none"
    reasons = {
        None: "py-spy is not installed",
        refusing: "py-spy ended with 1: Permission Denied: Try again",
        str(not_a_program): "py-spy cannot be run: ",
    }
    for path, reason in reasons.items():
        monkeypatch.setattr(gil, "_program", lambda path=path: path)
        sampler = GilSampler()
        told = read_until_told(sampler)
        assert told.keys() == {"gil_unknown"} and told["gil_unknown"].startswith(reason)
        assert sampler.read() == {}


def test_a_sampler_ends_with_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil, "_program", lambda: program(tmp_path / "endless", "exec sleep 1000"))
    sampler = GilSampler()
    assert sampler.read() == {}
    process = sampler._process
    assert process is not None and process.poll() is None
    assert os.getpgid(process.pid) != os.getpgrp(), "a Ctrl-C would reach it"
    sampler.close()
    assert process.returncode is not None and sampler._process is None
