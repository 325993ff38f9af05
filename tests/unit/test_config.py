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
        ("train.seed=[", "line 1: this is not YAML that can be used"),
        ("train.seed=2026-99-99", "train.seed is '2026-99-99', but must be of type int"),
        ("train.seed=" + "1" * 5000, "override 'train.seed=1111.*this is not YAML that can be used"),
        ("train.seed=0x" + "f" * 5000, "past 64 bits"),
        ("train.learning_rate=1" + "0" * 400, "past 64 bits"),
        ("train.learning_rate=1e400", "must be finite"),
        ("train.seed=!!int abc", "this is not YAML that can be used"),
        ("train.seed=!!int", "this is not YAML that can be used"),
        ("train.seed=!!bool abc", "this is not YAML that can be used"),
        ("train.seed=!!timestamp abc", "this is not YAML that can be used"),
        ("train.seed=!!python/name:os.system", "this is not YAML that can be used"),
        ("data.chat_template_kwargs=" + "[" * 3000, "this is not YAML that can be used"),
        ("data.chat_template_kwargs={a: 1, a: 2}", "the key 'a' is given a second time"),
        ("data.chat_template_kwargs={1: a, b: c}", "a key is not text; quote it"),
        ("data.chat_template_kwargs={a: {[1]: 2}}", "a key is not text; quote it"),
        ("data.chat_template_kwargs=&a {b: *a}", "recursive"),
        ("data.chat_template_kwargs=&a {b: [*a]}", "recursive"),
        ('cache_dir="a\\0b"', "cache_dir is .*no file can have that name"),
        ('runs_dir="\\ud800"', "runs_dir is .*no file can have that name"),
        ("data.sources=[" + "n" * 256 + "]", r"data.sources\[0\] is .*no file can have that name"),
        ("train.learning_rate=0", "train.learning_rate is 0.0, but must be at least 1e-07"),
        ("train.seed=9223372036854775808", "past 64 bits|train.seed is 9223372036854775808, but must be at most"),
        ("schedule.batches_per_step=1000000000000", "batches_per_step is 1000000000000, but must be at most 1000000"),
        ("train.epochs=1000000000", "train.epochs is 1000000000, but must be at most 10000"),
        ("drafter.block_size=3000", "drafter.block_size is 3000, but must be at most 256"),
        ("drafter.num_layers=1000000", "drafter.num_layers is 1000000, but must be at most 1024"),
        ("data.workers=100000", "data.workers is 100000, but must be at most 1024"),
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


def test_a_section_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(
        "target: {model: a}\ntrain: {seed: 1}\ndata: {sources: [b]}\ntrain: {epochs: 2}\n", encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"twice\.yaml, line 4: .*the key 'train' is given a second time"):
        load_config(path)


def test_dates_are_text_and_merged_sections_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    extra = "\nnoise: &noise {kind: uniform, scale: 0.5}\n"
    path.write_text(SHIPPED[-1].read_text(encoding="utf-8") + extra, encoding="utf-8")
    config = load_config(path, ["data.chat_template_kwargs={date_string: 2026-01-31, b: &b {c: 1}, d: {<<: *b, c: 2}}"])
    assert config.data.chat_template_kwargs == {"date_string": "2026-01-31", "b": {"c": 1}, "d": {"c": 2}}
    path.write_text(config_text(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("target: {}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"target\.model is missing|data is missing"):
        load_config(path)


def test_a_home_folder_is_no_folder_named_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(SHIPPED[0], ["cache_dir=~/cache", "runs_dir=~/runs"])
    assert (config.cache_dir, config.runs_dir) == ("/home/somebody/cache", "/home/somebody/runs")
    for key in ("cache_dir", "runs_dir"):
        with pytest.raises(UserError, match=f"{key} is ~nobody-has-this-name/x, but ~nobody-has-this-name is no home"):
            load_config(SHIPPED[0], [f"{key}=~nobody-has-this-name/x"])


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
