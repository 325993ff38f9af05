"""Bad input at the real command line: one line on stderr that names the thing and the mend, exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dflash_dist.config import DrafterSettings, config_text, load_config
from dflash_dist.drafter.config import resolve
from dflash_dist.export.plain import export_plain
from tests.command import run_here
from tests.random_models import random_drafter
from tests.tiny import TAPS, make_chats, make_config, make_target, target_config

SETTINGS = DrafterSettings(num_layers=2, block_size=4, target_layer_ids=tuple(TAPS), mask_token_id=270)
NOBODY, LONG = "~nosuchuser/model", "n" * 256


def refused(*arguments: str) -> str:
    """The line with which `dflash-dist ARGUMENTS` refuses."""
    code, out, err = run_here(*arguments)
    assert code == 2 and out == "", (code, out, err)
    *before, last = err.splitlines()
    assert last.startswith("error: ") and not [line for line in before if "rror" in line or "Traceback" in line], err
    return last


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "drafter"
    export_plain(random_drafter(resolve(SETTINGS, target_config("qwen3"), 0)), folder)
    return folder


@pytest.fixture
def drafter(exported: Path, tmp_path: Path) -> Path:
    """A drafter folder to be spoilt."""
    return Path(shutil.copytree(exported, tmp_path / "drafter"))


@pytest.fixture
def spoilt(target: Path, tmp_path: Path) -> Path:
    """A target folder to be spoilt."""
    return Path(shutil.copytree(target, tmp_path / "spoilt"))


def config_for(folder: Path, target: Path | str) -> str:
    return str(make_config(folder, Path(target), make_chats(folder / "chats.jsonl")))


def change_json(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def evaluated(drafter: Path, target: Path | str, *arguments: str) -> str:
    return refused("eval", "--drafter", str(drafter), "--target", str(target), "--max-new-tokens", "4", *arguments)


def test_a_target_without_a_chat_template(spoilt: Path, exported: Path, tmp_path: Path) -> None:
    (spoilt / "chat_template.jinja").unlink()
    for line in (evaluated(exported, spoilt), refused("prepare", "--config", config_for(tmp_path, spoilt))):
        assert str(spoilt) in line and "no chat template; add chat_template.jinja" in line


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "lacks 1: norm.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(3)}), "adds 1: lm_head.weight"),
        (lambda tensors: tensors.update({"fc.weight": torch.ones(32, 64)}), "fc.weight has shape [32, 64]"),
    ],
)
def test_a_drafter_with_other_tensors(drafter: Path, target: Path, change: Callable, part: str) -> None:
    tensors = load_file(drafter / "model.safetensors")
    change(tensors)
    save_file(tensors, drafter / "model.safetensors")
    line = evaluated(drafter, target)
    assert str(drafter) in line and part in line and line.endswith(("export it again", "export the drafter again"))


def test_a_drafter_whose_config_is_nonsense(drafter: Path, target: Path) -> None:
    change_json(drafter / "config.json", layer_types=5)
    assert "the drafter's config.json: layer_types is 5, but must be a list" in evaluated(drafter, target)
    (drafter / "config.json").write_text("[" * 100_000)
    assert f"{drafter}/config.json cannot be read" in evaluated(drafter, target)


def test_a_prompt_longer_than_the_context(exported: Path, target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n" + "long " * 400 + "\n")
    line = evaluated(exported, target, "--prompts", str(prompts))
    assert "prompt 2 of 2" in line and "1024" in line


@pytest.mark.parametrize(
    ("change", "part"), [({"hidden_size": 64}, "hidden size 32,"), ({"num_hidden_layers": 7}, "8 layers, but")]
)
def test_a_drafter_for_another_target(exported: Path, target: Path, tmp_path: Path, change: dict, part: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = json.loads((target / "config.json").read_text()) | {"layer_types": None} | change
    other = Path(shutil.copytree(target, tmp_path / "other"))
    AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32).save_pretrained(other)
    config = config_for(tmp_path, other)
    row = ("inspect", "--config", config, "--row", "0")
    anchor = json.loads(run_here(*row, "--json")[1])["supervised"].index(True)
    for line in (
        evaluated(exported, other),
        refused(*row, "--drafter", str(exported), "--anchors", str(anchor)),
    ):
        assert f"drafter {exported} is for a target of" in line and part in line
        assert line.endswith("take the target it was made for")
    line = refused("train", "--config", config, "--topo", "x1", f"train.init_from={exported}")
    assert next(iter(change)).removeprefix("num_hidden_") in line and "start from another folder" in line


@pytest.mark.parametrize(
    "keys", [{"hidden_size": "x"}, {"num_hidden_layers": 7}, {"num_attention_heads": 0}, {"dtype": "x"}], ids=repr
)
def test_a_target_whose_config_is_nonsense(spoilt: Path, exported: Path, tmp_path: Path, keys: dict) -> None:
    change_json(spoilt / "config.json", **keys)
    for line in (evaluated(exported, spoilt), refused("train", "--config", config_for(tmp_path, spoilt), "--topo=x1")):
        assert next(iter(keys)) in line or "'x'" in line or f"target {spoilt} cannot be loaded" in line


def test_a_target_of_an_unknown_architecture(spoilt: Path, tmp_path: Path) -> None:
    change_json(spoilt / "config.json", model_type="frobnicator")
    line = refused("train", "--config", config_for(tmp_path, spoilt), "--topo", "x1")
    assert f"{spoilt} is of model type frobnicator, which transformers {transformers.__version__} does not know" in line
    assert "pip install --upgrade" in line


@pytest.mark.parametrize("attention", ["nonsense", "flash_attention_3"])
def test_an_attention_that_the_target_cannot_run(target: Path, exported: Path, tmp_path: Path, attention: str) -> None:
    config = config_for(tmp_path, target)
    line = refused("probe", "--config", config, "--budget", "16", f"target.attention={attention}")
    assert f"does not support target.attention={attention} (" in line and line.endswith(
        "target.attention=sdpa or eager"
    )


def test_a_target_cut_short_is_refused_before_the_data_are_prepared(spoilt: Path, tmp_path: Path) -> None:
    weights = spoilt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    line = refused("train", "--config", config_for(tmp_path, spoilt), "--topo", "1-1", "--device", "cpu")
    assert f"{weights} has 20,000 bytes" in line and "get it again" in line and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "keys", [{"num_key_value_heads": 0}, {"head_dim": 0}, {"hidden_act": "zork"}, {"intermediate_size": -5}], ids=repr
)
def test_a_target_of_which_no_model_can_be_made(spoilt: Path, tmp_path: Path, keys: dict) -> None:
    """The file is well formed, and transformers takes it until it makes the layers."""
    change_json(spoilt / "config.json", **keys)
    config = config_for(tmp_path, spoilt)
    for command in (["train", "--topo", "1-1"], ["probe", "--budget", "16"]):
        assert "can be made of the target's config.json (" in refused(*command, "--config", config, "--device", "cpu")
    code, out, err = run_here("check", "--config", config)
    assert code == 1 and err == "" and "error    drafter " in out and "mend it, or get it again" in out


def test_a_target_with_code_of_its_own_names_the_option(spoilt: Path, tmp_path: Path) -> None:
    change_json(spoilt / "config.json", model_type="zork", auto_map={"AutoConfig": "conf.Conf"})
    assert refused("probe", "--config", config_for(tmp_path, spoilt)).endswith("set target.trust_remote_code=true")


def test_a_target_that_is_no_language_model(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path / "vit")
    line = refused("train", "--config", config_for(tmp_path, tmp_path / "vit"), "--topo", "x1")
    assert "ViTConfig without vocab_size" in line


@pytest.mark.parametrize("name", [NOBODY, LONG], ids=["nobody", "long"])
def test_names_that_no_file_has(exported: Path, target: Path, tmp_path: Path, name: str) -> None:
    assert name in evaluated(exported, f"./{name}")
    assert name in evaluated(exported, name)
    assert name in evaluated(Path(name), target)
    assert name in evaluated(exported, target, "--prompts", name)
    assert name in refused("export", "--run", name, "--out", str(tmp_path / "out"))
    assert name in refused("eval", "--run", name)
    assert name in refused("prepare", "--config", name)
    config = config_for(tmp_path, target)
    assert name in refused("train", "--config", config, "--topo", "x1", "--run", name)
    for key in ("target.model", "train.init_from", "data.sources", "runs_dir", "cache_dir"):
        assert name in refused("train", "--config", config, "--topo", "x1", f"{key}={name}"), key


@pytest.mark.parametrize("topo", ["1" * 5000, "x" + "1" * 5000, "1" * 5000 + "-1"], ids=["bare", "shared", "pair"])
def test_topologies_of_many_digits(target: Path, tmp_path: Path, topo: str) -> None:
    assert "topology" in refused("train", "--config", config_for(tmp_path, target), "--topo", topo)


@pytest.mark.parametrize("digits", [30, 5000])
def test_steps_and_places_of_many_digits(exported: Path, target: Path, tmp_path: Path, digits: int) -> None:
    """Python itself reads no number of more than 4300."""
    number, config = "1" * digits, config_for(tmp_path, target)
    settings = load_config(Path(config))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_text(settings))
    run_option = ("--run", str(tmp_path / "run"))
    inspected = ("inspect", "--config", config, "--row", "0", "--drafter", str(exported))
    for line in (
        refused("export", *run_option, "--out", str(tmp_path / "out"), "--checkpoint", number),
        refused("eval", *run_option, "--checkpoint", number),
        refused(*inspected, "--anchors", f"35,{number}"),
        refused(*inspected, f"--anchors=-{number}"),
    ):
        assert number in line and ("a step such as 100" in line or "token places such as 35,40" in line)


@pytest.mark.parametrize("option", ["--batch", "--max-rows", "--row", "--steps", "--max-restarts"])
def test_counts_past_64_bits(target: Path, tmp_path: Path, option: str) -> None:
    config = ["--config", config_for(tmp_path, target)]
    commands = {
        "--row": ["inspect", *config],
        "--steps": ["profile", "run", *config, "--topo", "x1"],
        "--max-restarts": ["train", *config, "--topo", "x1@2"],
    }
    command = commands.get(option, ["regenerate", *config, "--out", str(tmp_path / "out.jsonl")])
    for digits in (30, 5000):
        code, out, err = run_here(*command, option, "1" * digits)
        assert (code, out) == (2, "") and err.splitlines()[-1].lower().startswith("error: "), err


@pytest.mark.parametrize("text", ["{", "[1]", "enable_thinking=false"])
def test_chat_template_arguments_that_are_no_object(exported: Path, target: Path, text: str) -> None:
    line = evaluated(exported, target, "--chat-template-kwargs", text)
    assert f"--chat-template-kwargs is {text!r}, but must be a JSON object such as" in line


def test_overrides_of_no_config() -> None:
    assert "'train.epochs=2' has nothing to change; give --config too" in refused("check", "train.epochs=2")


@pytest.mark.parametrize("url", ["localhost:8000/v1", "server/v1", "file:///etc"])
def test_a_server_without_an_address(target: Path, tmp_path: Path, url: str) -> None:
    out = str(tmp_path / "out.jsonl")
    line = refused("regenerate", "--config", config_for(tmp_path, target), "--out", out, "--url", url)
    assert f"--url is '{url}', but must be a server's address such as http://" in line


def test_an_error_that_nobody_expected_is_one_line_and_debug_shows_where(tmp_path: Path) -> None:
    class Unforeseen(Exception):
        pass

    with mock.patch("dflash_dist.config.load_config", side_effect=Unforeseen("first\nsecond")):
        code, out, err = run_here("prepare", "--config", str(tmp_path))
        assert (code, out) == (1, "")
        line = "error: Unforeseen: first second (a bug, or input that we do not know; --debug shows where)\n"
        assert err == line
        code, out, err = run_here("--debug", "prepare", "--config", str(tmp_path))
        assert code == 1 and err.startswith("Traceback") and err.endswith(line)
