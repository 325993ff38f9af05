"""The token store: documents as token ids with their loss mask, written once and read by document number.

A store is a folder. `tokens.bin` holds a word for each token, document after document; the tables hold a row for each
document, its words' CRC-32 among them. `meta.json` is written last and holds the size and CRC-32 of the other files;
the folder gets its name only when it is whole.

Shapes: T tokens of all documents asked for, N documents asked for, D documents in the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dflash_dist.errors import UserError

FORMAT_VERSION = 2
_WORD = np.dtype("<u4")
_SUPERVISED = np.uint32(1 << 31)
"""The bit of a word that marks a supervised token; the others are its id. In one file, a document is one read."""
_TABLES = ("offsets", "supervised_counts", "keys", "held_out", "checksums")
_SMALL_FILES = (*(f"{name}.npy" for name in _TABLES), "prompts.jsonl")


@dataclass(frozen=True)
class Documents:
    """Several documents packed back to back."""

    tokens_T: np.ndarray
    """int64 token ids."""
    supervised_T: np.ndarray
    """bool: which tokens the target would have generated, and the drafter is trained on."""
    lengths_N: np.ndarray
    """int64 tokens of each document."""
    keys_N: np.ndarray
    """uint64 hash of each document's id: what random choices are keyed by."""


class TokenStore:
    """A store opened for reading; nothing but the table of documents is held in memory."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.meta = meta
        self.fingerprint: str = meta["fingerprint"]
        table = {name: np.load(folder / f"{name}.npy") for name in _TABLES}
        self.offsets: np.ndarray = table["offsets"]  # int64 [D + 1]
        self.lengths: np.ndarray = np.diff(self.offsets)  # int64 [D] tokens
        self.supervised_counts: np.ndarray = table["supervised_counts"]  # int64 [D] tokens
        self.keys: np.ndarray = table["keys"]  # uint64 [D]
        self.held_out: np.ndarray = table["held_out"]  # bool [D]
        self._checksums: np.ndarray = table["checksums"]  # uint32 [D]
        # Not memory-mapped: of a file that is cut or unreadable later, a read tells, but a map kills the process.
        self._words = os.open(folder / "tokens.bin", os.O_RDONLY)
        weakref.finalize(self, os.close, self._words)
        _advise(self._words, "POSIX_FADV_RANDOM", [(0, 0)])

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """The store in `folder`; UserError if it is missing, of another format or damaged."""
        return cls(Path(folder), read_meta(Path(folder)))

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document_ids: np.ndarray) -> Documents:
        """The documents numbered `document_ids` (ints, [N], any order, repeats allowed), packed in that order.

        UserError if one of them is not what was written.
        """
        ids_N = np.asarray(document_ids, dtype=np.int64).reshape(-1)
        assert np.all((ids_N >= 0) & (ids_N < len(self))), f"document numbers outside 0..{len(self) - 1}"
        lengths_N = self.lengths[ids_N]
        words_T = self._read_words(ids_N, lengths_N)
        return Documents(
            tokens_T=(words_T & ~_SUPERVISED).astype(np.int64),
            supervised_T=words_T >= _SUPERVISED,
            lengths_N=lengths_N,
            keys_N=self.keys[ids_N],
        )

    def _read_words(self, ids_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """The words of the documents, [T]."""
        sizes_bytes = (lengths_N * _WORD.itemsize).tolist()
        spans = list(zip((self.offsets[ids_N] * _WORD.itemsize).tolist(), sizes_bytes, strict=True))
        _advise(self._words, "POSIX_FADV_WILLNEED", spans)  # a disk reads many places at once sooner than in turn
        pieces = []
        for document, (offset, size) in zip(ids_N.tolist(), spans, strict=True):
            try:
                pieces.append(os.pread(self._words, size, offset))
            except OSError as error:
                raise _damage(self.folder, f"document {document} in tokens.bin cannot be read ({error})") from error
        for document, piece, checksum in zip(ids_N.tolist(), pieces, self._checksums[ids_N].tolist(), strict=True):
            if zlib.crc32(piece) != checksum:
                raise _damage(self.folder, f"document {document} in tokens.bin is not what was written")
        return np.frombuffer(b"".join(pieces), _WORD)

    def largest_token(self) -> int:
        """The largest token id of all documents."""
        return int(self.meta["largest_token"])

    def prompts(self, count: int) -> list[list[dict[str, Any]]]:
        """At most `count` openings of held-out chats, in the order of their keys: the messages before the answer."""
        with open(self.folder / "prompts.jsonl", encoding="utf-8") as lines:
            return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def _advise(file: int, advice: str, spans: list[tuple[int, int]]) -> None:
    """Tells the system how the (offset, size) spans of an open file will be read, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        for offset, size in spans:
            os.posix_fadvise(file, offset, size, getattr(os, advice))


def read_meta(folder: Path) -> dict[str, Any]:
    """The `meta.json` of the store in `folder`; UserError if the store is missing, damaged or of another format.

    Of `tokens.bin` only the size is compared: its content is when a document is read.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        version = meta["format_version"]
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise UserError(f"token store {folder} does not exist; run `dflash-dist prepare` first") from None
        raise _damage(folder, "meta.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damage(folder, f"meta.json cannot be read ({error!r})") from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"token store {folder} has format {version}, but this version reads {FORMAT_VERSION}; {_mend(folder)}"
        )
    try:
        sizes = {name: int(meta["sizes_bytes"][name]) for name in ("tokens.bin", *_SMALL_FILES)}
        checksums = {name: int(meta["checksums"][name]) for name in _SMALL_FILES}
        _, _, _ = int(meta["largest_token"]), meta["fingerprint"], meta["report"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damage(folder, f"meta.json cannot be read ({error!r})") from None
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            holds = "is missing" if found is None else f"holds {found} bytes"
            raise _damage(folder, f"{name} {holds}, but {size} were written")
    for name, checksum in checksums.items():
        if _crc32(folder / name) != checksum:
            raise _damage(folder, f"{name} is not what was written")
    return meta


def _damage(folder: Path, what: str) -> UserError:
    return UserError(f"token store {folder} is damaged: {what}; {_mend(folder)}")


def _mend(folder: Path) -> str:
    return f"remove {folder} and run `dflash-dist prepare` again"


def _crc32(file: Path) -> int:
    return zlib.crc32(file.read_bytes())


def document_key(document_id: str) -> int:
    """A 64-bit hash of a document's id: the first 8 bytes of its sha256, big-endian."""
    # surrogatepass: JSON can hold half of a surrogate pair, which plain UTF-8 refuses.
    return int.from_bytes(hashlib.sha256(document_id.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def opening_key(prompt: list[dict[str, Any]]) -> int:
    """A 64-bit hash of who says what before the first answer: equal for copies, parts and other answers of a chat."""
    return document_key(json.dumps([[message["role"], message["content"]] for message in prompt]))


class StoreWriter:
    """Appends documents to a new store; only the tables of documents and of openings stay in memory."""

    def __init__(self, folder: Path, held_out_share: float) -> None:
        self._folder = folder
        self._share = held_out_share
        self._uses: dict[str, int] = {}
        self._offsets, self._supervised_counts = [0], list[int]()
        self._keys, self._opening_keys, self._checksums = list[int](), list[int](), list[int]()
        self._chats_by_opening = Counter[int]()
        self._trained_openings = set[int]()
        self._prompt_places: dict[int, int] = {}  # of each opening, in bytes
        self._prompts = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (finish and __exit__ close them)
        self._words = open(folder / "tokens.bin", "wb")  # noqa: SIM115
        self._largest_token = 0

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After a failed write, closing would try the unwritten rest again and hide the first error.
        for file in (self._words, self._prompts):
            with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
                file.close()

    @property
    def documents(self) -> int:
        """The number of documents written so far."""
        return len(self._keys)

    def add(
        self,
        chat_id: str,
        rows: Iterable[tuple[str, np.ndarray, np.ndarray]],
        prompt: list[dict[str, Any]],
        *,
        may_be_held_out: bool = True,
    ) -> None:
        """Append the documents of one chat: rows of (suffix of the id, token ids [T], loss mask [T]).

        `prompt`: the messages before its first answer; all chats that open with them go to the same side of the
        held-out split: the training one unless all of them `may_be_held_out`. A repeated id gets `#2`, `#3`, ...
        """
        chat_id = self._unused_id(chat_id)
        opening = opening_key(prompt)
        for suffix, tokens_T, supervised_T in rows:
            assert 0 < len(tokens_T) == len(supervised_T)
            largest_token = int(tokens_T.max())
            assert largest_token < _SUPERVISED, "a token id takes 31 bits"
            words_T = (tokens_T.astype(np.uint32) | _SUPERVISED * supervised_T.astype(bool)).astype(_WORD)
            self._words.write(words_T.data)
            self._checksums.append(zlib.crc32(words_T.data))
            self._largest_token = max(self._largest_token, largest_token)
            self._offsets.append(self._offsets[-1] + len(tokens_T))
            self._supervised_counts.append(int(np.count_nonzero(supervised_T)))
            self._keys.append(document_key(chat_id + suffix))
            self._opening_keys.append(opening)
        if opening not in self._prompt_places:
            self._prompt_places[opening] = self._prompts.tell()
            self._prompts.write(json.dumps(prompt).encode() + b"\n")
        self._chats_by_opening[opening] += 1
        if not may_be_held_out:
            self._trained_openings.add(opening)

    def finish(self, fingerprint: str, report: dict[str, Any]) -> dict[str, Any]:
        """Write the tables and, last, `meta.json`, with `report` in it; returns the content of `meta.json`."""
        assert self.documents, "a store without documents"
        self._words.close()
        held_out = self._held_out_openings()
        arrays = {
            "offsets": np.array(self._offsets, dtype=np.int64),
            "supervised_counts": np.array(self._supervised_counts, dtype=np.int64),
            "keys": np.array(self._keys, dtype=np.uint64),
            "held_out": np.array([opening in held_out for opening in self._opening_keys], dtype=bool),
            "checksums": np.array(self._checksums, dtype=np.uint32),
        }
        for name, array in arrays.items():
            np.save(self._folder / f"{name}.npy", array)
        with open(self._folder / "prompts.jsonl", "wb") as lines:
            for opening in sorted(held_out):
                self._prompts.seek(self._prompt_places[opening])
                lines.write(self._prompts.readline())
        report = report | {
            "documents": self.documents,
            "held_out": int(arrays["held_out"].sum()),
            "tokens": self._offsets[-1],
            "supervised_tokens": sum(self._supervised_counts),
        }
        meta = {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "sizes_bytes": {name: (self._folder / name).stat().st_size for name in ("tokens.bin", *_SMALL_FILES)},
            "checksums": {name: _crc32(self._folder / name) for name in _SMALL_FILES},
            "largest_token": self._largest_token,
            "report": report,
        }
        (self._folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        return meta

    def _unused_id(self, wanted: str) -> str:
        document_id = wanted
        while document_id in self._uses:
            self._uses[wanted] += 1
            document_id = f"{wanted}#{self._uses[wanted]}"
        self._uses[document_id] = 1
        return document_id

    def _held_out_openings(self) -> set[int]:
        """Keys of the openings held out: in the order of the keys, as many as fit into the share of chats.

        One at least of two of which one may be, but never all. One of very many chats ("Hello!") does not fit.
        """
        chats = self._chats_by_opening
        openings = sorted(chats.keys() - self._trained_openings)
        if self._share == 0 or len(chats) < 2 or not openings:
            return set()
        room = max(1.0, self._share * chats.total())
        held_out = set()
        for key in openings:
            if chats[key] <= room:
                held_out.add(key)
                room -= chats[key]
        return held_out or {min(openings, key=lambda key: (chats[key], key))}


def write_once(destination: Path, is_whole: Callable[[Path], bool], write: Callable[[Path], None]) -> bool:
    """Whether `write` had to run: it fills a temporary sibling, which then takes the name `destination`.

    Another process that wants the same folder waits and finds it made. What a killed process left behind is removed.
    UserError if the folder cannot be written.
    """
    if is_whole(destination):
        return False
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _locked(destination) as locked:
            if is_whole(destination):
                return False
            if locked:  # nobody else is writing, so these are leftovers
                for leftover in destination.parent.glob(f".{destination.name}.*.tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".tmp", dir=destination.parent))
            try:
                temporary.chmod(0o755)  # mkdtemp closes it to others, who may share the cache
                write(temporary)
                if destination.exists():  # damaged, or it would have been found whole
                    shutil.rmtree(destination)
                os.rename(temporary, destination)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise UserError(
            f"{destination} cannot be written: {reason}; free some space there or set cache_dir to another folder"
        ) from error
    return True


@contextlib.contextmanager
def _locked(destination: Path) -> Iterator[bool]:
    """Holds the lock of `destination`; False where the file system has none. The kernel frees a killed process's."""
    with open(destination.parent / f".{destination.name}.lock", "w") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that writes {destination}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            locked = True
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF):
                raise
            locked = False
        yield locked
