"""The probe's shapes and arithmetic, and its process, which outlives no shape that it must not."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_dist.config import TargetConfig, load_config
from dflash_dist.errors import UserError
from dflash_dist.probe import active_parameters
from dflash_dist.probe_fit import fit_costs, largest_budget, mix, mixed_lengths, shapes_for
from dflash_dist.probe_process import Job, Loaded, Shape, TargetProcess, Timing
from dflash_dist.train.memory import GIB
from tests import tiny

SCHEDULE = load_config("configs/qwen3.6-27b.yaml").schedule
NAMES = ("cost_fixed_us", "cost_token_us", "cost_token_squared_us")


def test_shapes_of_the_great_budget() -> None:
    names = [shape.name for shape in shapes_for([65536], 8192)]
    assert names[:4] == ["8x8192", "16x4096", "32x2048", "64x1024"] and names[-1] == "1x8192"
    tokens = [shape.tokens for shape in shapes_for([65536], 8192)]
    assert tokens == [65536] * 5 + [32768, 16384, 8192] + [8192]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 100_000), min_size=1, max_size=3), st.integers(2, 40_000))
def test_shapes_keep_to_budget_and_longest_document(budgets: list[int], longest: int) -> None:
    shapes = shapes_for(budgets, longest)
    for shape in shapes:
        assert 0 < shape.tokens <= max(budgets) and min(shape.lengths) >= 1 and max(shape.lengths) <= longest, shape
    for budget in budgets:
        assert sum(mixed_lengths(budget, longest)) == budget, "a mix is full"
        assert any(shape.tokens == budget for shape in shapes)


def test_mixes_have_the_lengths_of_chats() -> None:
    lengths = np.array(mixed_lengths(20_000_000, 8192))
    assert np.median(lengths) == pytest.approx(1500, rel=0.05)
    assert (lengths < 4200).mean() == pytest.approx(0.9, abs=0.01) and lengths.max() == 8192
    short = np.array(mixed_lengths(2_000_000, 1024))
    assert np.median(short) == pytest.approx(1500 / 8, rel=0.05) and short.max() == 1024


@pytest.mark.parametrize("costs", [(5000, 100, 0.0015), (0, 100, 0), (0, 90, 0.02), (30000, 50, 0), (0, 0, 0.1)])
def test_the_fit_recovers_the_costs_behind_the_times(costs: tuple[float, float, float]) -> None:
    def time_us(lengths: tuple[int, ...]) -> float:
        return costs[0] + costs[1] * sum(lengths) + costs[2] * sum(length**2 for length in lengths)

    fitted, error = fit_costs([(shape.lengths, time_us(shape.lengths)) for shape in shapes_for([65536], 8192)])
    assert tuple(fitted) == NAMES
    for value, expected in zip(fitted.values(), costs, strict=True):
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert error < 1e-6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1, 1e8), min_size=1, max_size=9))
def test_costs_are_never_negative_and_the_error_is_that_of_the_costs(times_us: list[float]) -> None:
    batches = [(shape.lengths, t) for shape, t in zip(shapes_for([4096], 1024), times_us, strict=False)]
    costs, error = fit_costs(batches)
    assert min(costs.values()) >= 0 and max(costs.values()) > 0
    fixed, token, squared = costs.values()
    wrong = [abs((fixed + token * sum(n) + squared * sum(x * x for x in n)) / time_us - 1) for n, time_us in batches]
    assert error == pytest.approx(max(wrong), rel=1e-6, abs=1e-9)


def test_one_time_alone_is_taken_for_a_cost_a_token() -> None:
    assert fit_costs([((100, 200), 900.0)])[0] == pytest.approx(dict(zip(NAMES, (0, 3, 0), strict=True)))


@dataclasses.dataclass
class SimulatedGpu:
    """A target of known memory: `weights`, and so much for each token of a batch, and for each token squared."""

    token_bytes: float = 700_000
    squared_bytes: float = 0.0
    crashes_above: int = 1 << 62
    loaded: Loaded = dataclasses.field(
        default_factory=lambda: Loaded("a GPU", "bfloat16", "packed", "", 50 * GIB, 51_200, 140 * GIB, GIB)
    )
    ran: list[int] = dataclasses.field(default_factory=list)

    def run(self, shape: Shape) -> Timing | str:
        self.ran.append(shape.tokens)
        peak_bytes = self.peak_bytes(shape.tokens, shape.slots)
        if shape.tokens > self.crashes_above:
            return "crashed (killed by SIGSEGV)"
        return Timing(1.0, peak_bytes) if peak_bytes + GIB <= 140 * GIB else "out of memory"

    def peak_bytes(self, tokens: int, slots: int) -> int:
        return int(50 * GIB + tokens * (self.token_bytes + slots * 51_200) + tokens**2 * self.squared_bytes)

    def largest(self, **schedule: Any) -> tuple[int | None, str]:
        timings = {shape: self.run(shape) for shape in shapes_for([65536], 8192)}
        measured = {shape: timing for shape, timing in timings.items() if isinstance(timing, Timing)}
        asked = dataclasses.replace(SCHEDULE, **schedule)
        return largest_budget(self, self.loaded, measured, asked, 8192)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 2, 6])
@pytest.mark.parametrize("squared_bytes", [0.0, 0.5, 10.0])
def test_the_largest_budget_was_run_and_leaves_a_tenth(slots: int, squared_bytes: float) -> None:
    gpu = SimulatedGpu(squared_bytes=squared_bytes)
    budget, why = gpu.largest(ring_slots=slots)
    assert budget is not None and gpu.ran[-1] == budget and "is left" in why
    limit_bytes = 0.9 * 140 * GIB - GIB
    assert gpu.peak_bytes(budget, slots) <= limit_bytes < gpu.peak_bytes(int(1.1 * budget), slots)


def test_a_budget_at_which_a_kernel_crashes_is_not_taken() -> None:
    gpu = SimulatedGpu(token_bytes=200_000, crashes_above=123_000)
    budget, _ = gpu.largest()
    assert budget is not None and 65536 < budget <= 123_000 and budget == gpu.ran[-1]
    assert SimulatedGpu(crashes_above=70_000, token_bytes=200_000).largest()[0] is not None


def test_where_no_budget_can_be_told_the_reason_is() -> None:
    cpu = dataclasses.replace(SimulatedGpu().loaded, memory_bytes=None)
    assert SimulatedGpu(loaded=cpu).largest() == (
        None,
        "left out, as a CPU's memory is shared with all else that runs here",
    )
    budget, why = SimulatedGpu(token_bytes=20_000_000).largest()
    assert budget is None and "fewer than three" in why
    full = dataclasses.replace(SimulatedGpu().loaded, memory_bytes=56 * GIB)
    budget, why = SimulatedGpu(loaded=full, token_bytes=7_000).largest()
    assert budget is None and "none found in 0 tries, beside weights of 50.0 GiB" in why
    budget, why = SimulatedGpu(token_bytes=1).largest(max_documents=100)
    assert budget is not None and budget < 100 * 8192 and "schedule.max_documents=100 hold no more" in why


def test_active_parameters_leave_out_embedding_and_sleeping_experts() -> None:
    from transformers import Qwen3MoeConfig

    hidden, layers = tiny.HIDDEN, 6
    attention = hidden * 8 * (4 + 2 + 2 + 4) + 2 * 8
    dense = layers * (attention + 3 * hidden * 64 + 2 * hidden) + hidden
    assert active_parameters(tiny.target_config("qwen3"), layers) == dense
    config = Qwen3MoeConfig(
        vocab_size=99, hidden_size=hidden, moe_intermediate_size=24, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=16, num_experts_per_tok=3,
    )  # fmt: skip
    experts = 3 * 3 * hidden * 24 + 16 * hidden
    assert active_parameters(config, layers) == layers * (attention + experts + 2 * hidden) + hidden


SMALL = Shape("small", (20, 30))
SAYS = {signal.SIGKILL: "out of memory (killed by SIGKILL)", signal.SIGSEGV: "crashed (killed by SIGSEGV)"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tiny.make_target("qwen3", tmp_path_factory.mktemp("target"))
    settings = TargetConfig(model=str(folder), dtype="float32")
    return Job(folder, settings, (1, 3, 5), False, "full", "cpu", False, tiny.VOCAB)


@pytest.fixture(scope="module")
def process(job: Job) -> Iterator[TargetProcess]:
    with TargetProcess(job) as process:
        yield process


def test_a_shape_out_of_memory_is_survived(process: TargetProcess) -> None:
    first = process.run(SMALL)
    assert isinstance(first, Timing) and first.seconds > 0 and first.peak_bytes > 0
    pid = process.pid
    assert pid is not None
    limit_bytes = psutil.Process(pid).memory_info().vms + (64 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    assert process.run(Shape("large", (4096,) * 64)) == "out of memory"
    assert isinstance(process.run(SMALL), Timing) and process.pid == pid


@pytest.mark.parametrize(
    ("number", "within"),
    [
        pytest.param(signal.SIGKILL, False, id="SIGKILL between shapes"),
        pytest.param(signal.SIGSEGV, True, id="SIGSEGV within a shape"),
        pytest.param(signal.SIGKILL, True, id="SIGKILL within a shape", marks=pytest.mark.full),
        pytest.param(signal.SIGSEGV, False, id="SIGSEGV between shapes", marks=pytest.mark.full),
    ],
)
def test_a_shape_that_kills_the_process_is_named_and_the_next_one_runs(
    process: TargetProcess, number: signal.Signals, within: bool
) -> None:
    assert isinstance(process.run(SMALL), Timing)
    pid = process.pid
    assert pid is not None
    answers: list[Timing | str] = []
    asking = threading.Thread(target=lambda: answers.append(process.run(SMALL)))
    if within:
        os.kill(pid, signal.SIGSTOP)  # so that it cannot have answered
        asking.start()
        os.kill(pid, number)
        if number != signal.SIGKILL:  # which a stopped process obeys
            os.kill(pid, signal.SIGCONT)
    else:
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        asking.start()
    asking.join()
    assert answers == [SAYS[number]] and process.pid is None
    assert isinstance(process.run(SMALL), Timing) and process.pid not in (None, pid)


def test_an_exception_is_named_and_the_process_made_anew(job: Job) -> None:
    with TargetProcess(dataclasses.replace(job, vocabulary=10**6)) as process:  # ids that the table does not have
        process.load()
        answer = process.run(SMALL)
        assert isinstance(answer, str) and answer.startswith("crashed (IndexError: ") and process.pid is None


def test_matrix_products_are_measured_before_the_target_is_loaded(job: Job) -> None:
    with TargetProcess(job) as process:
        assert 1e-4 < process.matrix_tflops((64, 32, 64)) < 1e3
        assert process.load().gpu == "cpu"
        pid = process.pid
    assert pid is not None and not psutil.pid_exists(pid)


@pytest.mark.parametrize(("name", "content"), [("config.json", "{}"), ("model.safetensors", "nothing")])
def test_a_target_that_cannot_be_loaded_is_refused(job: Job, tmp_path: Path, name: str, content: str) -> None:
    for path in job.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(content)
    with TargetProcess(dataclasses.replace(job, folder=tmp_path)) as process, pytest.raises(UserError) as error:
        process.load()
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value) and process.pid is None


def test_random_weights_need_the_config_alone(job: Job, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((job.folder / "config.json").read_bytes())
    with TargetProcess(dataclasses.replace(job, folder=tmp_path, random_weights=True)) as process:
        assert process.load().dtype == "float32"
        assert isinstance(process.run(mix(300, 160)), Timing)
    assert not torch.cuda.is_initialized(), "the parent holds no GPU"
