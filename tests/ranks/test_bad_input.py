"""What a user gets wrong: one line on stderr that names the thing and the mend, exit code 2, nothing left behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import yaml

from dflash_dist.config import load_config
from dflash_dist.drafter.config import resolve
from dflash_dist.export.plain import export_plain
from dflash_dist.target.load import text_config
from tests.command import run_here
from tests.random_models import random_drafter
from tests.ranks.cli import ENVIRONMENT, Running, dflash, metrics, train, train_from_here
from tests.ranks.conftest import Maker


def refused(config: Path, *arguments: str, topo: str = "x1") -> str:
    """The one line with which `train` refuses."""
    code, out, err = run_here("train", "--config", str(config), "--topo", topo, "--run", "bad", *arguments)
    assert code == 2, err
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in err, lines
    assert out == ""
    return errors[0]


@pytest.mark.parametrize("topo", ["0-1", "3-0", "abc"])
def test_topologies_that_are_none(make: Maker, topo: str) -> None:
    assert f"topology '{topo}'" in refused(make(), topo=topo)


def test_a_refusal_of_the_real_process(make: Maker) -> None:
    done = dflash("train", "--config", str(make()), "--topo", "3-1", "train.learning_rat=1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rat=1", "did you mean train.learning_rate"),
        ("train.max_steps=many", "must be of type int"),
        ("drafter.target_layer_ids=[1,99]", "99"),
        ("drafter.target_layer_ids=[1,7]", "7"),
        ("drafter.mask_token_id=288", "288"),
        ("target.model=does/not-exist-there", "does/not-exist-there"),
        ("data.sources=[missing.jsonl]", "missing.jsonl"),
        ("schedule.token_budget=8", "token_budget=8"),
        ("train.init_from=nowhere", "nowhere"),
    ],
)
def test_config_values_that_cannot_work(make: Maker, override: str, message: str) -> None:
    config = make()
    assert message in refused(config, override)
    assert not (config.parent / "runs/bad/checkpoints").exists() or "init_from" in override


@pytest.mark.parametrize("name", ["../outside", "..", "r\udcff"])
def test_run_names_that_would_lie_elsewhere(make: Maker, name: str) -> None:
    assert "is not the plain name of a folder" in refused(make(), "--run", name)


def test_a_folder_that_is_no_run_is_left_as_it_is(make: Maker) -> None:
    config = make()
    foreign = config.parent / "runs" / "foreign" / "config.yaml"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine: true\n")
    assert "is no run" in refused(config, "--run", "foreign")
    assert foreign.read_text() == "mine: true\n" and len(list(foreign.parent.iterdir())) == 1


def test_a_trace_window_longer_than_the_run(make: Maker) -> None:
    from dflash_dist.commands import profile_command
    from dflash_dist.errors import UserError
    from dflash_dist.topology import parse_topology

    with pytest.raises(UserError, match="needs a run of 206, but the data give"):
        profile_command(make(), parse_topology("x1"), 200, False, None, "cpu", [])


def test_batches_that_drafters_cannot_share(make: Maker) -> None:
    assert "schedule.batches_per_step=4" in refused(make(), "schedule.batches_per_step=3", topo="1-2")


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize("content", [b"", b'[{"messages": [{"role": "user", "cont'])
def test_empty_and_truncated_data(make: Maker, tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(content)
    assert path.name in refused(make(), f"data.sources=[{path}]")


def test_data_in_which_every_row_is_rejected(make: Maker, tmp_path: Path) -> None:
    path = tmp_path / "users.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n' * 3)
    assert "3 no_assistant" in refused(make(), f"data.sources=[{path}]")


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('never') }}", "template_error"), ("{{ messages[0].content }}", "no_supervised_tokens")],
)
def test_chat_templates_that_fail_or_give_no_answer(make: Maker, tmp_path: Path, template: str, reason: str) -> None:
    from tests.tiny import make_target

    target = make_target("qwen3", tmp_path / "broken-template")
    (target / "chat_template.jinja").write_text(template)
    assert reason in refused(make(), f"target.model={target}")


def test_a_broken_row_is_skipped_and_its_line_named(make: Maker) -> None:
    config = make()
    chats = config.parent / "chats.jsonl"
    lines = chats.read_text().splitlines()
    chats.write_text("\n".join([*lines[:4], '{"messages": [', *lines[4:]]) + "\n")
    code, _, err = run_here("prepare", "--config", str(config))
    assert code == 0 and "chats.jsonl:5" in err


def test_a_target_too_large_is_refused_with_the_sum(make: Maker, tmp_path: Path) -> None:
    from tests.tiny import make_target

    target = make_target("llama", tmp_path / "huge")
    shape: dict[str, Any] = json.loads((target / "config.json").read_text())
    shape |= {"hidden_size": 65536, "intermediate_size": 262144, "num_attention_heads": 512, "head_dim": 128}
    (target / "config.json").write_text(json.dumps(shape))
    line = refused(make(), f"target.model={target}")
    assert "GiB" in line and "target layers" in line and "are free" in line


def test_a_hybrid_target_with_half_an_fla_is_refused_unless_allowed(make: Maker, tmp_path: Path) -> None:
    """A folder `fla` without its package is what two installs over each other leave."""
    site = tmp_path / "site"
    (site / "fla").mkdir(parents=True)
    config = make("hybrid")
    done = dflash("train", "--config", str(config), "--topo", "x1", "--run", "bad", PYTHONPATH=str(site))
    assert done.returncode == 2, done.stderr
    assert "fla" in done.stderr.splitlines()[-1] and "--allow-slow" in done.stderr
    arguments = ["train", "--config", str(config), "--topo", "x1", "--run", "bad", "--allow-slow"]
    arguments.append("train.max_steps=1")
    assert dflash(*arguments, PYTHONPATH=str(site)).returncode == 0


def poisoned_target(folder: Path) -> Path:
    """A target that gives NaN for one byte of its vocabulary, and so for the documents that hold it."""
    from safetensors.torch import load_file, save_file

    from tests.tiny import make_target

    target = make_target("qwen3", folder)
    weights = load_file(target / "model.safetensors")
    (letter,) = [
        i for t, i in json.loads((target / "tokenizer.json").read_text())["model"]["vocab"].items() if t == "Z"
    ]
    weights["model.embed_tokens.weight"][letter] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def poisoned_config(make: Maker, tmp_path: Path, row: int) -> Path:
    config = make()
    tree = yaml.safe_load(config.read_text())
    tree["target"]["model"] = str(poisoned_target(tmp_path / "poisoned"))
    config.write_text(yaml.safe_dump(tree))
    chats = config.parent / "chats.jsonl"
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    rows[row]["messages"][0]["content"] += " Z"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def poisoned_held_out_config(make: Maker, tmp_path: Path) -> Path:
    """As above, with the poison in the first answer of every chat that is held out; what precedes it decides that."""
    from dflash_dist.data.prepare import prepare
    from dflash_dist.data.store import TokenStore

    config = poisoned_config(make, tmp_path, row=20)
    chats = config.parent / "chats.jsonl"
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    del rows[20]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = load_config(config)
    held_out = TokenStore.open(prepare(settings, Path(settings.target.model))).prompts(len(rows))
    for row in rows:
        if row["messages"][:1] in held_out:
            row["messages"][1]["content"] = "Z " + row["messages"][1]["content"]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


@pytest.mark.parametrize("topo", [pytest.param("1-1", marks=pytest.mark.full), "1-2"])
def test_a_loss_that_is_not_finite_stops_with_the_documents_named(make: Maker, tmp_path: Path, topo: str) -> None:
    config = poisoned_config(make, tmp_path, row=20)
    done = dflash("train", "--config", str(config), "--topo", topo, "--run", "run", "train.checkpoint_every=1")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "is not finite in batch" in last and "documents" in last and "train.not_finite=skip" in last
    from tests.ranks.cli import weights

    step = len(metrics(config, "run"))
    assert all(tensor.isfinite().all() for tensor in weights(config, "run", step).values())


def test_a_loss_that_is_not_finite_can_be_skipped(make: Maker, tmp_path: Path) -> None:
    config = poisoned_config(make, tmp_path, row=20)
    done = train(config, "x1", "run", "train.not_finite=skip")
    assert "the step was skipped" in done.stderr
    rows = metrics(config, "run")
    assert len(rows) == 8 and sum(row["loss"] is None for row in rows) >= 1
    assert rows[-1]["loss"] is not None


@pytest.mark.parametrize(
    ("topo", "not_finite"), [("1-2", "stop"), ("x1", "skip"), pytest.param("1-2", "skip", marks=pytest.mark.full)]
)
def test_a_validation_loss_that_is_not_finite_is_told(make: Maker, tmp_path: Path, topo: str, not_finite: str) -> None:
    config = poisoned_held_out_config(make, tmp_path)
    settings = ["train.log_every=5", f"train.not_finite={not_finite}"]
    done = dflash("train", "--config", str(config), "--topo", topo, "--run", "run", *settings)
    assert "step 4: the validation loss is not finite over batch 0 (documents" in done.stderr
    steps = [row["step"] for row in metrics(config, "run")]
    if not_finite == "stop":
        assert done.returncode == 1 and "train.not_finite=skip" in done.stderr.splitlines()[-1]
        assert steps == [3]
    else:
        assert done.returncode == 0, done.stderr
        assert steps == [3, 4, 5, 6, 8] and metrics(config, "run")[1]["val_loss"] is None


def test_a_full_disk_at_a_checkpoint(make: Maker) -> None:
    config = make()
    limited = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000));" + (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); sys.argv = ['dflash-dist', *sys.argv[1:]];"
        "runpy.run_module('dflash_dist', run_name='__main__')"
    )
    assert run_here("prepare", "--config", str(config))[0] == 0
    arguments = ["train", "--config", str(config), "--topo", "x1", "--run", "run"]
    done = subprocess.run([sys.executable, "-c", limited, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "checkpoint of step 3 cannot be written" in done.stderr.splitlines()[-1]
    assert list((config.parent / "runs/run/checkpoints").iterdir()) == []
    train_from_here(config, "x1", "run")
    assert [row["step"] for row in metrics(config, "run")] == list(range(1, 9))


@pytest.mark.parametrize("name", ["checkpoints", "tb"])
def test_a_run_folder_that_cannot_be_written_is_refused_before_any_rank(make: Maker, name: str) -> None:
    config = make()
    folder = config.parent / "runs" / "bad"
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    (folder / name).symlink_to("/proc")  # where not even root may make a file
    with mock.patch("dflash_dist.train.launch.launch_world") as launched:
        assert f"{folder / name} cannot be written: " in refused(config)
    assert not launched.called


def test_ranks_do_not_import_from_the_current_folder(make: Maker, tmp_path: Path) -> None:
    """As the command itself does not."""
    folder = tmp_path / "current"
    folder.mkdir()
    for name in ("queue", "torch", "yaml"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    arguments = ["train", "--config", str(make()), "--topo", "x1", "--run", "run", "train.max_steps=1"]
    command = [sys.executable, "-P", "-m", "dflash_dist", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_killed_launcher_leaves_is_gone_at_the_next_start(make: Maker, tmp_path: Path) -> None:
    from dflash_dist.errors import UserError

    config, temporary = make(), tmp_path / "tmp"
    temporary.mkdir()
    overrides = ["train.max_steps=4000", "train.epochs=1000", "train.checkpoint_every=1000"]
    running = Running(config, "x1", "bad", *overrides, TMPDIR=str(temporary))
    running.wait_for_step(2)
    ranks = running.ranks()
    running.send(signal.SIGKILL)
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=30)
    assert not alive and running.end()[0] == -signal.SIGKILL
    assert not list(temporary.glob("dflash_dist_*"))
    (left,) = (config.parent / "runs/bad").glob(".world_*")
    with mock.patch("dflash_dist.train.launch.launch_world", side_effect=UserError("no more is needed")):
        assert "no more is needed" in refused(config, *overrides)
    assert not left.exists()


def test_eval_and_export_of_what_is_not_there(make: Maker, tmp_path: Path) -> None:
    for arguments in (
        ["eval", "--run", "nothing"],
        ["eval"],
        ["eval", "--drafter", str(tmp_path), "--target", "x"],
        ["export", "--run", "nothing", "--out", str(tmp_path / "out")],
        ["export", "--run", "nothing", "--out", "o", "--format", "gguf"],
        ["train", "--config", "none.yaml", "--topo", "1-1"],
        ["train", "--config", str(make()), "--topo", "1-1", "--device", "tpu"],
        ["prepare", "--config", str(tmp_path)],
    ):
        code, out, err = run_here(*arguments)
        assert code == 2 and out == "", (arguments, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err


def test_a_start_that_failed_does_not_block_the_mended_one(make: Maker) -> None:
    """Here of a run without held-out documents, which ends without tau."""
    config = make()
    assert "nowhere" in refused(config, "train.init_from=nowhere")
    done = train(config, "x1", "bad", "data.held_out_share=0", "train.max_steps=2")
    assert "tau          not measured" in done.stderr


def test_a_drafter_of_another_shape_is_no_start(make: Maker, tmp_path: Path) -> None:
    config, drafter = make(), tmp_path / "drafter"
    settings = load_config(config)
    shape = resolve(settings.drafter, text_config(settings.target.model), 0)
    export_plain(random_drafter(shape), drafter)
    line = refused(config, f"train.init_from={drafter}", "drafter.num_layers=3")
    assert "num_hidden_layers 2 instead of 3" in line


@pytest.mark.parametrize("line", ['{"messages": "hello"}', '{"messages": [{"content": "x"}]}', "[1", "\udcff", ""])
def test_broken_prompts_are_refused_with_their_line(make: Maker, tmp_path: Path, line: str) -> None:
    from dflash_dist.errors import UserError
    from dflash_dist.evaluate.run import read_prompts

    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"prompts\.jsonl"):
        read_prompts(path)


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_numbers_that_are_not_finite_are_refused(make: Maker, value: str) -> None:
    assert "must be finite" in refused(make(), f"train.learning_rate={value}")
