"""Weight files that are not whole are told by their headers, whatever cut them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.target.load import load_taps
from dflash_dist.target.weights import INDEX, ONE_FILE, check_weights, has_weights
from tests.tiny import make_target


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {"a": torch.ones(3, 5), "b": torch.ones(2, dtype=torch.bfloat16), "empty": torch.ones(0)}
    save_file(tensors, tmp_path / ONE_FILE, metadata={"format": "pt"})
    return tmp_path / ONE_FILE


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        check_weights(folder)
    text = str(error.value)
    assert str(folder) in text and "; " in text and "\n" not in text
    return text


def test_a_whole_file_is_as_large_as_it_says(file: Path) -> None:
    assert check_weights(file.parent) == file.stat().st_size
    save_file({}, file)
    assert check_weights(file.parent) == file.stat().st_size


def test_a_file_cut_anywhere_is_named_with_both_sizes(file: Path) -> None:
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        text = refused(file.parent)
        assert f"{file} has {size:,} bytes" in text and "get it again" in text
        header = int.from_bytes(whole[:8], "little")
        assert (f" has {len(whole)}, by its header" in text) == (size >= 8 + header), (size, text)
    file.write_bytes(whole + b"more")
    assert f"has {len(whole) + 4:,} bytes, where a whole one has {len(whole):,}" in refused(file.parent)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 99\n", "run `git lfs pull`"),
        (b"<!DOCTYPE html><html>", "no safetensors file, by its first bytes"),
        (b"PK\x03\x04" + bytes(400), "no safetensors file, by its first bytes"),
        ((9).to_bytes(8, "little") + b'{"a": 1}}', "damaged header"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "damaged header"),
        ((2).to_bytes(8, "little") + b"{{", "damaged header"),
        ((22).to_bytes(8, "little") + b'{"a":{"data_offsets":[', "damaged header"),
    ],
)
def test_a_file_of_another_kind(file: Path, content: bytes, says: str) -> None:
    file.write_bytes(content)
    assert says in refused(file.parent)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / ONE_FILE).mkdir()
    assert "cannot be read: Is a directory" in refused(tmp_path)


def test_shards_and_their_index(file: Path) -> None:
    size, folder = file.stat().st_size, file.parent
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name in names:
        (folder / name).write_bytes(file.read_bytes())
    file.unlink()
    assert not has_weights(folder) and f"neither {ONE_FILE} nor {INDEX}" in refused(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"tensor.{i}": names[i % 3] for i in range(9)}}))
    assert has_weights(folder) and check_weights(folder) == 3 * size
    (folder / names[1]).unlink()
    assert f"lacks 1 of 3 weight files: {names[1]}" in refused(folder)
    (folder / names[1]).write_bytes(b"")
    assert names[1] in refused(folder)
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'):
        (folder / INDEX).write_text(text)
        assert f"{INDEX} cannot be read" in refused(folder)


def test_loading_says_which_file_it_is(tmp_path: Path) -> None:
    folder = make_target("qwen3", tmp_path)
    whole = (folder / ONE_FILE).read_bytes()
    (folder / ONE_FILE).write_bytes(whole[:20_000])
    with pytest.raises(UserError, match=rf"{ONE_FILE} has 20,000 bytes, where a whole one has {len(whole):,}.*again"):
        load_taps(folder, TargetConfig(model=str(folder)), 4, torch.device("cpu"))
