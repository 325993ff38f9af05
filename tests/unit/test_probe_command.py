"""`dflash-dist probe` as a command, and what `train` makes of what it leaves."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dflash_dist.config import Config, config_text, load_config
from dflash_dist.data.prepare import prepare
from dflash_dist.data.schedule import Schedule
from dflash_dist.drafter.config import resolve
from dflash_dist.errors import UserError
from dflash_dist.probe import as_text, probe
from dflash_dist.probe_process import Shape, TargetProcess, Timing
from dflash_dist.target.load import text_config
from dflash_dist.topology import parse_topology
from dflash_dist.train import inputs
from dflash_dist.train.inputs import COSTS, probe_file, resolve_inputs
from dflash_dist.train.run_folder import check_name_is_free
from tests import tiny
from tests.command import run_here
from tests.ranks.cli import BASE, ENVIRONMENT, dflash, metrics, train

PROBED = {"cost_fixed_us": 900.0, "cost_token_us": 0.5, "cost_token_squared_us": 3.25}
ROW = {"shape", "tokens", "us_per_token", "ktok_s", "tflops", "mfu", "peak_gib", "error"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture
def path(target: Path, tmp_path: Path) -> Path:
    return tiny.make_config(tmp_path, target, tiny.make_chats(tmp_path / "chats.jsonl", rows=30))


def leave_probe(config: Config, costs: Any = PROBED, gpu: str = "cpu") -> Path:
    """What `probe` writes, of which `train` reads the costs."""
    folder = Path(config.target.model)
    file = probe_file(config, folder, resolve(config.drafter, text_config(folder), 0), gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"costs": costs}), encoding="utf-8")
    return file


def test_the_figures_are_printed_as_json_and_kept(path: Path) -> None:
    config = load_config(path)
    prepare(config, Path(config.target.model))
    done = dflash("probe", "--config", str(path), "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    kept = json.loads(Path(figures.pop("file")).read_text(encoding="utf-8"))
    assert kept == figures
    rows = {row["shape"]: row for row in figures["shapes"]}
    own = next(name for name in rows if name.startswith("own mix of"))
    assert [*rows][:4] == ["2x160", "4x80", "8x40", "16x20"] and "1x160" in rows and rows[own]["tokens"] <= 320
    for name, row in rows.items():
        assert set(row) == ROW and row["error"] is None, name
        assert row["ktok_s"] == pytest.approx(1000 / row["us_per_token"])
        assert row["tflops"] == pytest.approx(2 * figures["active_parameters"] * row["ktok_s"] / 1e9)
        assert row["mfu"] == pytest.approx(row["tflops"] / figures["matrix_tflops"])
        assert row["peak_gib"] > 0 and f"{name}, {row['tokens']}" in done.stderr
    assert figures["largest_budget"] is None and "CPU" in figures["largest_budget_note"]
    assert set(figures["costs"]) == set(COSTS) and figures["versions"]["torch"]
    schedule = resolve_inputs(config, parse_topology("3-1")).schedule.fingerprint()
    assert schedule == fingerprint(config, figures["costs"])


def test_a_table_of_random_weights_needs_no_weights_no_data_and_no_tokenizer(path: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(load_config(path).target.model) / "config.json").read_bytes())
    changes = [f"target.model={bare}", "data.sources=[nowhere.jsonl]", "drafter.mask_token_id=null"]
    budgets = ["--budget", "64", "--budget", "128"]
    code, out, err = run_here("probe", "--config", str(path), "--random-weights", *budgets, "--device", "cpu", *changes)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[3].split() == ["shape", "tokens", "us/token", "Ktok/s", "TFLOP/s", "MFU", "peak", "GiB"]
    table = lines[4 : lines.index("", 4)]
    assert [line.split()[:2] for line in table if line[0] in "12"][:3] == [
        ["1x64", "64"],
        ["2x32", "64"],
        ["1x128", "128"],
    ]
    assert len({len(line) for line in table}) == 1, "columns are even"
    assert any(line.startswith("largest token budget: left out") for line in lines)
    assert any(line.startswith("costs of a batch: cost_fixed_us=") for line in lines)


def test_the_shape_that_kills_the_process_stands_in_the_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And shapes run in the order of their risk."""
    ran: list[Shape] = []
    run = TargetProcess.run

    def run_or_die(self: TargetProcess, shape: Shape) -> Timing | str:
        ran.append(shape)
        if shape.name == "1x160":
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)
        return run(self, shape)

    monkeypatch.setattr(TargetProcess, "run", run_or_die)
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):  # which it would leave behind
        monkeypatch.setenv(variable, str(path.parent))
    figures = probe(load_config(path), [320], "cpu", random_weights=False)
    errors = {row["shape"]: row["error"] for row in figures["shapes"]}
    assert errors.pop("1x160") == "out of memory (killed by SIGKILL)" and len(errors) == 8 and not any(errors.values())
    line = next(line for line in as_text(figures).splitlines() if line.startswith("1x160"))
    assert line.split(maxsplit=2) == ["1x160", "160", "out of memory (killed by SIGKILL)"]
    assert [shape.tokens for shape in ran] == sorted(shape.tokens for shape in ran) and ran[-1].name == "2x160"
    monkeypatch.setattr(TargetProcess, "run", lambda self, shape: "out of memory")
    with pytest.raises(UserError, match=r"not even mix of 1 .2 tokens.: out of memory; give a smaller"):
        probe(load_config(path), [16], "cpu", random_weights=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["target.model=/nowhere"], "/nowhere does not exist"),
        (["--budget", "16", "--budget", "99999999999"], "--budget is 99,999,999,999, but a batch to probe has 2 to"),
        (["--budget", "1"], "--budget is 1, but a batch to probe has 2 to 67,108,864 tokens; give one in between"),
        (["--budget", "0", "--budget", "16"], "--budget is 0, but"),
        (["--budget=-5"], "--budget is -5, but"),
        (["--random-weights", "target.model=package:other"], "package:other is unknown"),
        (["cache_dir=/dev/null/cache"], "/dev/null/cache/probes"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_a_line(path: Path, arguments: list[str], says: str) -> None:
    code, out, err = run_here("probe", "--config", str(path), "--device", "cpu", *arguments)
    assert code == 2 and not out
    assert says in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_found_before_the_work(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(dir: Path) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    monkeypatch.setattr("dflash_dist.probe.TargetProcess", lambda job: pytest.fail("the work has begun"))
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):  # which it would leave behind
        monkeypatch.setenv(variable, str(path.parent))
    config = load_config(path)
    with pytest.raises(UserError, match=r"cache/probes cannot be written: Read-only file system; set cache_dir to"):
        probe(config, [16], "cpu", random_weights=True)


@pytest.fixture
def running(path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A probe that has begun to load its target, and its process."""
    command = [*BASE, "probe", "--config", str(path), "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in the background
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, preexec_fn=heed, **pipes) as probe:
        assert probe.stderr is not None
        for line in probe.stderr:
            if "loading" in line:
                break
        children = psutil.Process(probe.pid).children()
        yield probe, next(child for child in children if "resource_tracker" not in " ".join(child.cmdline()))


def test_ctrl_c_ends_it_and_its_process(running: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    probe, child = running
    os.killpg(probe.pid, signal.SIGINT)  # as a terminal sends it
    out, err = probe.communicate()
    assert probe.returncode == 130 and not out and "Traceback" not in err
    assert not psutil.wait_procs([child], timeout=30)[1]


def test_its_process_does_not_outlive_it(running: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    probe, child = running
    probe.kill()
    assert not psutil.wait_procs([child], timeout=30)[1]


OTHER_CACHE = """
import os
if os.environ.get("RANK", "0") != "0":  # as on a node with another GPU, or another cache
    from pathlib import Path
    from dflash_dist.train import inputs
    inputs.probe_file = lambda *_: Path(os.environ["OTHER_PROBE"])
"""


def test_a_world_takes_the_costs_of_rank_0_and_goes_on_when_they_change(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    file = leave_probe(config)
    (tmp_path / "sitecustomize.py").write_text(OTHER_CACHE)
    (tmp_path / "other.json").write_text(json.dumps({"costs": dict.fromkeys(COSTS, 9.0)}))
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OTHER_PROBE": str(tmp_path / "other.json"),
    }
    short = ["train.max_steps=2", "evaluate.prompts=1", "evaluate.max_new_tokens=2", "--device", "cpu"]
    done = train(path, "2-1", "run", *short, **environment)
    assert [line for line in done.stderr.splitlines() if line.startswith("costs of the schedule: ")] == [
        f"costs of the schedule: cost_fixed_us=900, cost_token_us=0.5, cost_token_squared_us=3.25, as probed: {file}"
    ]
    saved = load_config(Path(config.runs_dir) / "run" / "config.yaml")
    assert saved.schedule.cost_token_us is None
    (Path(config.runs_dir) / "run" / "summary.json").unlink()  # as if it had been stopped before its end
    leave_probe(config, PROBED | {"cost_token_squared_us": 0.0})
    train(path, "2-1", "run", *short)
    assert [row["step"] for row in metrics(path, "run")] == [1, 2]


def test_a_run_on_the_cpu_takes_what_was_probed_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU too, of which there may be a probe as well."""
    config = load_config(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    leave_probe(config, PROBED | {"cost_token_us": 77.0})
    of_gpu = leave_probe(config, PROBED | {"cost_token_squared_us": 0.0}, "a GPU")
    assert of_gpu.name.endswith("_a-GPU.json")
    topology = parse_topology("3-1")
    for device, costs in (("cpu", PROBED | {"cost_token_us": 77.0}), ("cuda", PROBED | {"cost_token_squared_us": 0.0})):
        assert resolve_inputs(config, topology, device).schedule.fingerprint() == fingerprint(config, costs)


def fingerprint(config: Config, costs: dict[str, float] | None = None) -> str:
    """Of the schedule on three target ranks; with costs as if the config gave them."""
    changed = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, **(costs or {})))
    store = resolve_inputs(config, parse_topology("3-1")).store
    return Schedule(store, changed, parse_topology("3-1")).fingerprint()


def test_the_schedule_has_the_probed_costs_where_the_config_gives_none(path: Path) -> None:
    config, topology = load_config(path), parse_topology("3-1")
    plain = {"cost_fixed_us": 0.0, "cost_token_us": 1.0, "cost_token_squared_us": 0.0}
    assert resolve_inputs(config, topology).schedule.fingerprint() == fingerprint(config, plain)
    leave_probe(config)
    probed = resolve_inputs(config, topology).schedule.fingerprint()
    assert probed == fingerprint(config, PROBED) != fingerprint(config, plain)
    given = load_config(path, ["schedule.cost_token_squared_us=0"])
    assert resolve_inputs(given, topology).schedule.fingerprint() == fingerprint(config, PROBED | {COSTS[2]: 0.0})
    given = load_config(path, [f"schedule.{name}={value}" for name, value in plain.items()])
    assert resolve_inputs(given, topology).schedule.fingerprint() == fingerprint(config, plain)


@pytest.mark.parametrize(
    "override",
    ["drafter.target_layer_ids=[1,3]", "target.dtype=bfloat16", "objective.kind=kl", "target.attention=eager"],
)
def test_the_costs_are_those_of_what_runs(path: Path, override: str) -> None:
    file = leave_probe(load_config(path))
    assert leave_probe(load_config(path, ["train.seed=3", "data.max_length=100"])) == file
    assert leave_probe(load_config(path, [override])) != file


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"costs": 3}', '{"costs": {"cost_fixed_us": 1}}', "\0", '{"costs": null}']
)
def test_a_damaged_probe_is_named(path: Path, text: str) -> None:
    config = load_config(path)
    file = leave_probe(config)
    file.write_text(text)
    with pytest.raises(UserError, match=f"probe .*{file.name} cannot be read .*remove it"):
        resolve_inputs(config, parse_topology("1-1"))


@pytest.mark.parametrize("cost", ["fast", -1, None, float("nan")])
def test_costs_that_are_none_are_refused(path: Path, cost: Any) -> None:
    leave_probe(load_config(path), PROBED | {"cost_token_us": cost})
    with pytest.raises(UserError, match="cost_token_us is"):
        resolve_inputs(load_config(path), parse_topology("1-1"))


def test_rank_0_says_once_which_costs_are_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(rank: str, *overrides: str) -> str:
        inputs._say_once.cache_clear()
        monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            resolve_inputs(load_config(path, overrides), parse_topology("1-1"))
        return "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("costs of"))

    assert said("0") == (
        "costs of the schedule: not probed: batches are compared by their tokens; `dflash-dist probe` measures them"
    )
    file = leave_probe(load_config(path))
    shown = "cost_fixed_us=900, cost_token_us={}, cost_token_squared_us=3.25"
    assert said("0") == f"costs of the schedule: {shown.format(0.5)}, as probed: {file}"
    assert said("0", "schedule.cost_token_us=7") == f"costs of the schedule: {shown.format(7)}, as probed: {file}"
    assert said("0", *(f"schedule.{name}=1" for name in COSTS)).endswith("cost_token_squared_us=1, given by the config")
    assert said("1") == ""


def test_a_run_may_go_on_with_other_costs(path: Path) -> None:
    config = load_config(path)
    folder = Path(config.runs_dir) / "run"
    folder.mkdir(parents=True)
    for name, text in (("environment.json", "{}"), ("summary.json", "{}"), ("config.yaml", config_text(config))):
        (folder / name).write_text(text)
    costs = [f"schedule.{name}=1" for name in COSTS]
    check_name_is_free(load_config(path, costs), folder)
    with pytest.raises(UserError, match=r"another configuration .*train\.seed: 0 -> 1"):
        check_name_is_free(load_config(path, [*costs, "train.seed=1"]), folder)
