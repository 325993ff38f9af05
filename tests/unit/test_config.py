import dataclasses
import re
from pathlib import Path

import pytest

from dflash_dist.config import Config, config_difference, config_text, load_config
from dflash_dist.errors import UserError

SHIPPED = sorted(Path("configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configs_survive_saving(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    saved = tmp_path / "config.yaml"
    saved.write_text(config_text(config), encoding="utf-8")
    assert load_config(saved) == config


def test_overrides_are_typed() -> None:
    config = load_config(SHIPPED[0], ["train.learning_rate=6e-4", "train.max_steps=7", "data.sources=[a.jsonl]"])
    assert (config.train.learning_rate, config.train.max_steps, config.data.sources) == (6e-4, 7, ("a.jsonl",))
    assert config_difference(
        load_config(SHIPPED[0], ["train.max_steps=6"]), load_config(SHIPPED[0], ["train.max_steps=7"])
    ) == ["train.max_steps: 6 -> 7"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rat=1", "unknown key train.learning_rat; did you mean train.learning_rate"),
        ("trian.seed=1", "unknown key trian; did you mean train"),
        ("train.max_steps=many", "train.max_steps is 'many', but must be of type int"),
        ("train.max_steps=1.5", "train.max_steps is 1.5, but must be of type int"),
        ("train.max_steps=true", "train.max_steps is True"),
        ("train.learning_rate=fast", "train.learning_rate is 'fast'"),
        ("train.not_finite=ignore", "must be one of stop, skip"),
        ("target=5", "target is 5, but must be a section"),
        ("drafter.target_layer_ids=[1,x]", re.escape("drafter.target_layer_ids[1] is 'x'")),
        ("schedule.token_budget=1", "schedule.token_budget is 1, but must be at least 2"),
        ("data.held_out_share=1.5", "data.held_out_share is 1.5"),
        ("data.sources=[]", "data.sources is empty"),
        ("train.betas=[0.9]", "train.betas"),
        ("nonsense", "not of the form section.key=value"),
        ("train.seed=[", "a value that is not YAML"),
        ("target.model.name=x", "'model' is a value, not a section"),
    ],
)
def test_bad_keys_and_values_are_named(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(SHIPPED[-1], [override])


@pytest.mark.parametrize("text", ["", "- a\n", "target: [\n"])
def test_files_that_are_no_configs_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.yaml"):
        load_config(path)


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("target: {}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"target\.model is missing|data is missing"):
        load_config(path)


def test_every_key_is_read_somewhere() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in Path("dflash_dist").rglob("*.py")
        if path != Path("dflash_dist/config.py")
    )
    for section in dataclasses.fields(Config):
        kind = Config.__dataclass_fields__[section.name].type
        fields = getattr(__import__("dflash_dist.config", fromlist=["x"]), str(kind), None)
        for key in dataclasses.fields(fields) if dataclasses.is_dataclass(fields) else [section]:
            assert re.search(rf"\.{key.name}\b", source), f"{section.name}.{key.name} is read by no code"
