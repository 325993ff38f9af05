from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_dist.data.store import FORMAT_VERSION, StoreWriter, TokenStore, document_key, opening_key, write_once
from dflash_dist.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [3, 1, 7, 2, 5]


def tokens_of(document: int, length: int) -> np.ndarray:
    return np.arange(length, dtype=np.uint32) + 100_000 * (document + 1)


def opening(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_store(folder: Path, share: float = 0.0, ids: list[str] | None = None) -> TokenStore:
    folder.mkdir(parents=True)
    ids = ids or [f"chat {i}" for i in range(len(LENGTHS))]
    with StoreWriter(folder, share) as writer:
        for i, (chat_id, length) in enumerate(zip(ids, LENGTHS, strict=False)):
            writer.add(
                chat_id,
                [("", tokens_of(i, length), np.arange(length) % 2 == 1)],
                opening(chat_id),
            )
        writer.finish("f00d", {})
    return TokenStore.open(folder)


def test_read_packs_the_documents_in_the_order_asked_for(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s")
    assert store.lengths.tolist() == LENGTHS
    assert store.supervised_counts.tolist() == [1, 0, 3, 1, 2]
    assert store.fingerprint == "f00d"
    order = [4, 0, 2, 0]
    documents = store.read(np.array(order))
    assert documents.tokens_T.dtype == np.int64
    assert documents.supervised_T.dtype == bool
    assert documents.tokens_T.tolist() == np.concatenate([tokens_of(i, LENGTHS[i]) for i in order]).tolist()
    assert documents.supervised_T.tolist() == np.concatenate([np.arange(LENGTHS[i]) % 2 == 1 for i in order]).tolist()
    assert documents.lengths_N.tolist() == [LENGTHS[i] for i in order]
    assert documents.keys_N.tolist() == [document_key(f"chat {i}") for i in order]


def test_read_of_nothing_is_empty(tmp_path: Path) -> None:
    documents = write_store(tmp_path / "s").read(np.array([], dtype=np.int64))
    assert documents.tokens_T.shape == documents.supervised_T.shape == documents.lengths_N.shape == (0,)


def test_repeated_ids_get_distinct_keys(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", ids=["a", "a", "a#2", "a", "b"])
    assert store.keys.tolist() == [document_key(i) for i in ("a", "a#2", "a#2#2", "a#3", "b")]


def test_an_id_that_all_rows_have_takes_no_longer_for_many(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, 0.0) as writer:
        names = [writer._unused_id("same") for _ in range(100_000)]
    assert names[:2] + names[-1:] == ["same", "same#2", "same#100000"]


def written(folder: Path, share: float, openings: list[str], rows: int = 1) -> TokenStore:
    """A store of chats with ids of their own and `rows` documents each, which open with these texts."""
    folder.mkdir(exist_ok=True)
    with StoreWriter(folder, share) as writer:
        for i, text in enumerate(openings):
            documents = [(f"/turn{k}", tokens_of(i, 4), np.ones(4, dtype=bool)) for k in range(1, rows + 1)]
            writer.add(f"chat {i}", documents, opening(text))
        writer.finish("", {})
    return TokenStore.open(folder)


def test_the_rows_of_one_chat_are_held_out_together(tmp_path: Path) -> None:
    store = written(tmp_path, 0.5, [str(i) for i in range(40)], rows=3)
    held_out = store.held_out.reshape(40, 3)
    assert (held_out == held_out[:, :1]).all()
    keys = [opening_key(opening(str(i))) for i in range(40)]
    assert held_out[:, 0].tolist() == [key < sorted(keys)[20] for key in keys]
    assert len(np.unique(store.keys)) == 120
    expected = sorted((i for i in range(40) if held_out[i, 0]), key=lambda i: keys[i])
    assert store.prompts(100) == [opening(str(i)) for i in expected]
    assert len(store.prompts(3)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*store.meta["sizes_bytes"], "meta.json"])


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_chats_that_open_alike_are_never_on_both_sides(tmp_path: Path, copies: int, share: float) -> None:
    openings = [str(i) for i in range(150)] * copies
    store = written(tmp_path, share, openings)
    held_out = {text for text, out in zip(openings, store.held_out, strict=True) if out}
    training = {text for text, out in zip(openings, store.held_out, strict=True) if not out}
    assert not held_out & training
    assert len(held_out) == max(1, share * 150)
    assert len(store.prompts(1000)) == len(held_out), "each is asked once"


def test_an_opening_of_more_chats_than_may_be_held_out_is_trained_on(tmp_path: Path) -> None:
    texts = sorted((str(i) for i in range(60)), key=lambda text: opening_key(opening(text)))
    often, seldom = texts[:2], texts[2:]
    store = written(tmp_path, 0.3, [*often * 50, *seldom])
    assert not store.held_out[:100].any()
    assert store.held_out[100:].any()
    # Nor where there is room for none.
    store = written(tmp_path / "few", 1e-12, [*often * 50, *seldom])
    assert np.flatnonzero(store.held_out).tolist() == [100]


@pytest.mark.parametrize("share", [1e-12, 1 - 1e-12])
def test_both_sides_of_the_split_get_a_document(tmp_path: Path, share: float) -> None:
    store = write_store(tmp_path / "s", share=share)
    keys = [opening_key(opening(f"chat {i}")) for i in range(len(LENGTHS))]
    assert 0 < store.held_out.sum() < len(LENGTHS)
    assert store.held_out[int(np.argmin(keys))]
    assert len(store.prompts(10)) == store.held_out.sum()
    assert store.prompts(1) == [opening(f"chat {int(np.argmin(keys))}")]


def test_nothing_is_held_out_of_one_document_or_for_a_share_of_zero(tmp_path: Path) -> None:
    assert not write_store(tmp_path / "one", share=0.9, ids=["only"]).held_out.any()
    assert not write_store(tmp_path / "zero", share=0.0).held_out.any()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["tokens.bin", "checksums.npy", "keys.npy", "offsets.npy", "prompts.jsonl"])
def test_a_cut_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    write_store(tmp_path / "s", share=0.5)
    cut(tmp_path / "s" / name)
    with pytest.raises(UserError, match=rf"damaged: {name} holds \d+ bytes, but \d+ were written"):
        TokenStore.open(tmp_path / "s")
    (tmp_path / "s" / name).unlink()
    with pytest.raises(UserError, match=f"damaged: {name} is missing"):
        TokenStore.open(tmp_path / "s")


def test_a_store_without_or_with_a_cut_meta_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; run `dflash-dist prepare`"):
        TokenStore.open(tmp_path / "none")
    write_store(tmp_path / "s")
    cut(tmp_path / "s" / "meta.json")
    with pytest.raises(UserError, match=r"meta\.json cannot be read"):
        TokenStore.open(tmp_path / "s")
    (tmp_path / "s" / "meta.json").unlink()
    with pytest.raises(UserError, match=r"meta\.json is missing"):
        TokenStore.open(tmp_path / "s")


def flip_bit(path: Path, offset: int) -> None:
    """Changes one bit of the byte at `offset`, as a bad disk does: the size stays."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["offsets.npy", "supervised_counts.npy", "keys.npy", "held_out.npy", "checksums.npy", "prompts.jsonl"]
)
def test_a_small_file_with_another_content_is_refused(tmp_path: Path, name: str) -> None:
    write_store(tmp_path / "s", share=0.5)
    flip_bit(tmp_path / "s" / name, -1)
    with pytest.raises(UserError, match=rf"damaged: {name} is not what was written; remove .*/s and run"):
        TokenStore.open(tmp_path / "s")


def test_every_flipped_bit_of_a_document_is_found_when_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    intact = write_store(folder).read(np.arange(len(LENGTHS)))
    document_of_byte = np.repeat(np.arange(len(LENGTHS)), 4 * np.array(LENGTHS))
    assert len(document_of_byte) == (folder / "tokens.bin").stat().st_size
    for offset, damaged in enumerate(document_of_byte.tolist()):
        flip_bit(folder / "tokens.bin", offset)
        store = TokenStore.open(folder)
        others = [i for i in range(len(LENGTHS)) if i != damaged]
        assert store.read(np.array(others)).lengths_N.tolist() == [LENGTHS[i] for i in others]
        mend = rf"remove {folder} and run `dflash-dist prepare` again"
        with pytest.raises(UserError, match=rf"{folder} is damaged: document {damaged} in tokens\.bin .*; {mend}"):
            store.read(np.arange(len(LENGTHS)))
        flip_bit(folder / "tokens.bin", offset)
    assert (TokenStore.open(folder).read(np.arange(len(LENGTHS))).tokens_T == intact.tokens_T).all()


def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s")
    cut(tmp_path / "s" / "tokens.bin")
    assert len(store.read(np.array([0, 3])).tokens_T) == LENGTHS[0] + LENGTHS[3]
    with pytest.raises(UserError, match=r"document 4 in tokens\.bin is not what was written"):
        store.read(np.array([0, 4]))


def test_an_open_store_outlives_its_folder(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    assert store.read(np.array([2])).tokens_T.tolist() == tokens_of(2, LENGTHS[2]).tolist()


def test_the_largest_token_is_known_without_reading_the_documents(tmp_path: Path) -> None:
    assert write_store(tmp_path / "s").largest_token() == 100_000 * len(LENGTHS) + LENGTHS[-1] - 1
    with StoreWriter(tmp_path, 0.0) as writer:
        writer.add("a", [("", np.array([2**31 - 1, 5]), np.array([False, True]))], opening("a"))
        writer.finish("", {})
    store = TokenStore.open(tmp_path)
    documents = store.read(np.array([0]))
    assert documents.tokens_T.tolist() == [2**31 - 1, 5] and documents.supervised_T.tolist() == [False, True]
    assert store.largest_token() == 2**31 - 1


@pytest.mark.parametrize(
    "key", ["format_version", "sizes_bytes", "checksums", "largest_token", "fingerprint", "report"]
)
def test_a_meta_file_without_a_key_is_refused(tmp_path: Path, key: str) -> None:
    write_store(tmp_path / "s")
    meta = tmp_path / "s" / "meta.json"
    meta.write_text(meta.read_text().replace(f'"{key}"', '"other"'))
    with pytest.raises(UserError, match=rf"meta\.json cannot be read .*{key}"):
        TokenStore.open(tmp_path / "s")


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s")
    meta = tmp_path / "s" / "meta.json"
    meta.write_text(meta.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'))
    with pytest.raises(UserError, match="has format 99"):
        TokenStore.open(tmp_path / "s")


def is_whole(folder: Path) -> bool:
    return (folder / "done").is_file()


def write_done(folder: Path) -> None:
    (folder / "done").write_text("")


def test_write_once_writes_once_and_replaces_what_is_not_whole(tmp_path: Path) -> None:
    destination = tmp_path / "cache" / "thing"
    destination.mkdir(parents=True)
    (destination / "half").write_text("")
    leftover = destination.parent / ".thing.killed.tmp"
    leftover.mkdir()
    assert write_once(destination, is_whole, write_done)
    assert [path.name for path in destination.iterdir()] == ["done"]
    assert not leftover.exists()
    assert not write_once(destination, is_whole, lambda folder: pytest.fail("written again"))


def test_write_once_leaves_nothing_when_writing_fails(tmp_path: Path) -> None:
    def fill_the_disk(folder: Path) -> None:
        write_done(folder)
        with open("/dev/full", "w") as full:
            full.write("x")

    with pytest.raises(UserError, match="thing cannot be written: the disk is full; free some space"):
        write_once(tmp_path / "thing", is_whole, fill_the_disk)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]


def test_write_once_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/thing cannot be written"):
        write_once(tmp_path / "file" / "thing", is_whole, write_done)


def test_a_second_process_waits_for_the_first_and_finds_the_folder_made(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from dflash_dist.data.store import write_once
destination = Path(sys.argv[1])
print(write_once(destination, lambda folder: (folder / "done").is_file(), lambda folder: sys.exit("written twice")))
"""
    second: list[subprocess.Popen[str]] = []

    def write(folder: Path) -> None:
        command = [sys.executable, "-c", code, str(tmp_path / "thing")]
        pipe = subprocess.PIPE
        second.append(subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True))
        assert second[0].stderr is not None
        assert second[0].stderr.readline() == f"waiting for another process that writes {tmp_path}/thing\n"
        write_done(folder)

    assert write_once(tmp_path / "thing", is_whole, write)
    assert second[0].communicate(timeout=60) == ("False\n", "")
