"""The verdict on each fused kernel after a trial of it on this GPU.

Trials run in a process of their own: a kernel built for another torch may kill the process it runs in, or leave a CUDA
device that answers nothing any more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_dist.check.findings import Finding, Level, one_line
from dflash_dist.check.installs import CAUSAL_CONV1D, FLA, FLASH_ATTN, TRITON
from dflash_dist.check.trials import Measured, Shapes, run_trial

TOLERANCE = 0.03
"""Greatest relative difference in bf16. Kernels that work stay below 0.01; a wrong or leaking one is above 0.1."""
TRIAL_TIMEOUT_S = 300.0
MENDS = {
    "packed_attention": "pip install --upgrade --force-reinstall torch",
    "packed_delta_rule": FLA.reinstall,
    "packed_convolution": TRITON.reinstall,
    "heads_apart": TRITON.reinstall,
    "gated_norm": TRITON.reinstall,
    "chunk_gated_delta_rule": FLA.reinstall,
    "causal_conv1d_fn": CAUSAL_CONV1D.rebuild,
    "flash_attn_varlen_func": FLASH_ATTN.rebuild,
    "drafter_attention": "pip uninstall -y flash-attn-4  # or take another version of it",
}


@dataclass(frozen=True)
class Failure:
    """Why a trial gave no figures."""

    reason: str
    untried: bool = False
    """Whether this says nothing about the kernel itself."""


Outcome = Measured | Failure


def verdict(name: str, outcome: Outcome, level: Level = "error") -> Finding:
    """The finding on a kernel; `level` where it is broken: whether the run would use it."""
    finding, mend = f"kernel {name}", MENDS[name]
    who, what = ("drafter", "gradients") if name == "drafter_attention" else ("target", "hidden states")
    if isinstance(outcome, Failure) and outcome.untried:
        mend = "mend what the reason names, or free the GPU, and check again"
        return Finding(finding, "warning", f"could not be tried: {outcome.reason}", mend)
    if isinstance(outcome, Failure):
        return Finding(finding, level, f"fails on this GPU: {outcome.reason}", mend, f"the {who} cannot run it")
    if not outcome.error <= TOLERANCE:
        detail = f"gives other values than torch: {outcome.error:.1%} away, where {TOLERANCE:.0%} is rounding"
        return Finding(finding, level, detail, mend, f"the {what} would be wrong")
    if not outcome.leak <= TOLERANCE:
        detail = f"lets packed documents see each other: {outcome.leak:.1%} away from the same documents alone"
        return Finding(finding, level, detail, mend, f"packed {what} would be wrong")
    times = f"{outcome.fused_us:.0f} us for {outcome.tokens} tokens, where torch takes {outcome.reference_us:.0f} us"
    if outcome.fused_us > outcome.reference_us:
        cost = f"{outcome.fused_us / outcome.reference_us:.1f} times the time of plain torch"
        return Finding(finding, "warning", f"right, but slower than torch: {times}", mend, cost)
    return Finding(finding, "ok", f"{times}; right, and documents stay apart")


def try_kernels(
    names: Sequence[str],
    shapes: Shapes,
    modelling: str | None,
    environment: Mapping[str, str],
    device: str = "cuda:0",
) -> dict[str, Outcome]:
    """The outcome of each kernel. `environment`: variables to set, such as the folders of compiled kernels.

    `modelling`: name of the target's modelling module. A kernel that kills or hangs the process ends the trials.
    """
    with tempfile.TemporaryDirectory(prefix="dflash_dist_") as folder:
        results = Path(folder, "results.jsonl")
        task = json.dumps([list(names), asdict(shapes), modelling, device, str(results)])
        code = "import sys; from dflash_dist.check.kernels import run_trials; run_trials(sys.argv[1])"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, task],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=TRIAL_TIMEOUT_S,
                env={**os.environ, **environment},
                check=False,
            )
            end = _how_it_ended(done.returncode, done.stderr.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            end = f"it had not ended after {TRIAL_TIMEOUT_S:.0f} s"
        return _outcomes(names, results, end)


def run_trials(task: str) -> None:
    """In the process of `try_kernels`: writes a line when a kernel's trial begins, and one with its outcome."""
    import torch

    names, shapes, modelling, device_name, results = json.loads(task)
    device = torch.device(device_name)
    for name in names:
        _write(results, {"name": name, "begun": True})
        try:
            outcome: Outcome = run_trial(name, Shapes(**shapes), modelling, device)
        except Exception as error:
            outcome = Failure(one_line(error), untried=isinstance(error, torch.cuda.OutOfMemoryError))
        _write(results, {"name": name, type(outcome).__name__: asdict(outcome)})
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # sync: a device that answers no more ends the process here
            torch.cuda.empty_cache()


def _write(results: str, row: dict[str, Any]) -> None:
    with Path(results).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _outcomes(names: Sequence[str], results: Path, end: str) -> dict[str, Outcome]:
    """What the process wrote; `end` is the reason of a kernel that began and did not come to an outcome."""
    outcomes: dict[str, Outcome] = {}
    last = ""
    for row in map(json.loads, results.read_text(encoding="utf-8").splitlines() if results.exists() else []):
        last = row["name"]
        if "begun" in row:
            outcomes[last] = Failure(end)
        else:
            outcomes[last] = Measured(**row["Measured"]) if "Measured" in row else Failure(**row["Failure"])
    reason = f"the trial of {last} ended all" if last else end
    return {name: outcomes.get(name, Failure(reason, untried=True)) for name in names}


def _how_it_ended(code: int, stderr: str) -> str:
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {said[-1]}" if said else ""
    return (
        f"its process was killed by {signal.Signals(-code).name}{last}" if code < 0 else f"it ended with {code}{last}"
    )
