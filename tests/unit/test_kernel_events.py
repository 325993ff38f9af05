"""What is said of compiling and tuning: by the real torch.compile, by Triton where it is, and by one in its place."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_profiling.kernel_events import KernelEvents


def told(events: KernelEvents) -> list[dict[str, Any]]:
    return events.read().get("compiles", [])


def test_each_compilation_of_torch_is_an_entry() -> None:
    events = KernelEvents()
    events.read()  # whatever was compiled before

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    torch._dynamo.reset()
    compiled = torch.compile(doubled, backend="eager")
    for shape in ((3,), (3,), (3, 3)):
        compiled(torch.ones(shape))
    entries = told(events)
    assert [(entry["kind"], entry["kernel"]) for entry in entries] == [("compile", "doubled")] * 2
    assert len({entry["key"] for entry in entries}) == 2 and all(entry["ms"] > 0 for entry in entries)
    assert events.read() == {}


class Tuner:
    """What is used of Triton's autotuner."""

    keys = ("N", "bias")
    base_fn = SimpleNamespace(__name__="matmul")

    def __init__(self) -> None:
        self.nargs = {"N": 64, "x": None}

    def _bench(self, *args: Any, config: int, **meta: Any) -> int:
        return config


def place_triton(monkeypatch: pytest.MonkeyPatch, listener: Any = None) -> SimpleNamespace:
    """Puts modules in place of Triton's, with a compiler and a tuner that call their hooks as Triton's do."""
    compilation, tuner = SimpleNamespace(listener=listener), type("Autotuner", (Tuner,), {"_bench": Tuner._bench})
    knobs, tuning = ModuleType("triton.knobs"), ModuleType("triton.runtime.autotuner")
    knobs.compilation, tuning.Autotuner = compilation, tuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", tuning)
    return SimpleNamespace(compilation=compilation, tuner=tuner, theirs=tuner._bench)


def compile_kernel(triton: SimpleNamespace, name: str, cache_hit: bool = False, **source: Any) -> None:
    src = SimpleNamespace(name=name, **source)
    times = SimpleNamespace(total=2500)
    triton.compilation.listener(src=src, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_triton_says_what_it_compiles_and_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    events, heard = KernelEvents(), list[str]()
    for name in ("triton.knobs", "triton.runtime.autotuner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    events.read()  # whatever torch compiled before; and another thread has begun to load Triton
    triton = place_triton(monkeypatch, lambda *, src, **_: heard.append(src.name))
    assert told(events) == []
    signature = {"x": "*fp32", "n": "i32", "B": "constexpr"}
    compile_kernel(triton, "add", signature=signature, constants={(2,): 64})
    compile_kernel(triton, "loaded", cache_hit=True)
    compile_kernel(triton, "plain")
    bias = SimpleNamespace(data_ptr=None)  # a tensor's text would be a wait for its device
    assert [triton.tuner()._bench(config=config, bias=bias) for config in (1, 2, 3)] == [1, 2, 3]
    add, plain, matmul = told(events)
    assert add == {"kind": "compile", "kernel": "add", "key": "x=*fp32, n=i32, B=64", "ms": 2.5}
    assert (plain["kernel"], plain["key"]) == ("plain", "")
    assert matmul.pop("ms") >= 0
    assert matmul == {"kind": "autotune", "kernel": "matmul", "key": "N=64, bias=SimpleNamespace", "configs": 3}
    assert heard == ["add", "loaded", "plain"]  # who listened before still does
    events.close()
    compile_kernel(triton, "late")
    assert told(events) == [] and heard[-1] == "late" and triton.tuner._bench is triton.theirs


def test_another_version_of_triton_is_not_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    events, triton = KernelEvents(), place_triton(monkeypatch)
    events.read()  # whatever torch compiled before
    triton.compilation.listener(src=None, times=None, cache_hit=False)
    tuner = triton.tuner()
    del tuner.nargs
    assert tuner._bench(config=1) == 1 and told(events) == []
    place_triton(monkeypatch).tuner._bench = None
    KernelEvents().read()


def test_real_triton_compiles_and_tunes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For a GPU that need not be there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash_dist.train.adamw_kernel import _adamw_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    events = KernelEvents()
    events.read()
    types = {"correction": "*fp64", "size": "i32", "BLOCK": "constexpr"}
    types |= dict.fromkeys(("rate", "beta_1", "beta_2", "eps", "decay"), "fp32")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    for _ in range(2):
        source = ASTSource(fn=kernel, signature=signature, constexprs={"BLOCK": 64})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    configs = [triton.Config({"BLOCK": size}) for size in (32, 64)]
    tuned = triton.autotune(configs, key=["size"], do_bench=lambda call, quantiles: [1.0, 1.0, 1.0])(kernel)
    tuned.nargs = {"size": 64}
    for config in configs:
        tuned._bench(config=config)
    compiled, timed = told(events)
    events.close()
    assert (compiled["kind"], compiled["kernel"]) == ("compile", "_adamw_kernel") and compiled["ms"] > 1
    assert compiled["key"].startswith("parameters=*fp32, ") and compiled["key"].endswith("BLOCK=64")
    assert (timed["kind"], timed["kernel"], timed["key"]) == ("autotune", "_adamw_kernel", "size=64")
    assert timed["configs"] == 2
