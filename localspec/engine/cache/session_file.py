"""The file of a session: the states of target and draft, with the tokens that they belong to.

Nothing of a file reaches llama.cpp before its hash was verified.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from localspec.engine.cache.prefixes import Prefix, common_prefix, free_memory
from localspec.engine.cache.slot import Mark, usable
from localspec.engine.llama import State
from localspec.paths import open_file

MAGIC = b"LSPREFIX"
VERSION = 2
_PIECE_BYTES = 16 << 20
_HEAD = struct.Struct("<8sII32s")  # magic, version, size of the header, hash of all that follows


class Unusable(Exception):
    """A file that cannot be used; the message gives the reason."""


class Stopped(Exception):
    """The time for writing is over, or the conversation was forgotten."""


class Kept(NamedTuple):
    """What a saved state can be reused for, as in `Prefix`. marks: after how many tokens they are."""

    tokens: list[int]
    least: int
    marks: list[int]
    exact: bool

    @classmethod
    def of(cls, prefix: Prefix) -> Kept:
        marks = [mark.tokens for mark in prefix.marks]
        return cls(list(prefix.tokens), prefix.least, marks, prefix.exact)

    def usable(self, tokens: list[int]) -> int:
        """Return how many of these tokens the state can be cut to."""
        return usable(common_prefix(self.tokens, tokens), self.least, self.marks)

    def covers(self, other: Kept) -> bool:
        """Whether this state can be used for all that another one can."""
        is_included = self.exact == other.exact and self.usable(other.tokens) == len(other.tokens)
        return is_included and (self.least <= other.least or set(other.marks) <= set(self.marks))


class _Header(msgspec.Struct):
    """The header. identity: of files, settings and machine.

    `target`, `draft` and `marks` give the sizes in bytes of the states, in the order in which they follow.
    marks: for each, its number of tokens and its size.
    """

    identity: str
    tokens: list[int]
    n_draft: int
    least: int
    exact: bool
    target: int
    draft: int
    marks: list[tuple[int, int]]

    @property
    def kept(self) -> Kept:
        return Kept(self.tokens, self.least, [tokens for tokens, _ in self.marks], self.exact)

    @property
    def sizes(self) -> list[int]:
        return [self.target, self.draft, *(size for _, size in self.marks)]

    def describes(self, size: int) -> bool:
        """Whether this can be the header of a body of `size` bytes."""
        count = len(self.tokens)
        return (
            size == sum(self.sizes)
            and min(self.sizes) >= 0
            and 0 <= self.n_draft <= count
            and 0 <= self.least <= count
            and all(0 < tokens <= count for tokens, _ in self.marks)
        )


def read(path: Path, identity: str) -> Prefix:
    """Read the state in a file of this identity.

    Raises:
        Unusable: The file is damaged, of another identity or version, or too large for the memory.
        OSError: The file cannot be read.
    """
    raw, body = _read_verified(path)
    header = _parse_header(raw, identity, len(body))
    target, draft, *marks = np.split(body, np.cumsum(header.sizes)[:-1])
    return Prefix(
        header.tokens,
        target,
        draft if header.draft else None,
        header.n_draft,
        header.least,
        header.exact,
        marks=[Mark(entry[0], state) for entry, state in zip(header.marks, marks, strict=True)],
    )


def head(path: Path, identity: str) -> Kept:
    """Read what the header of a file says. It is good for a search, but its hash was not verified.

    Raises:
        Unusable, OSError: As `read`.
    """
    with _open(path) as file:
        raw, _ = _read_raw_header(file)
        body = os.fstat(file.fileno()).st_size - file.tell()
    return _parse_header(raw, identity, body).kept


def _parse_header(raw: bytes, identity: str, body: int) -> _Header:
    """Parse the header of a file with `body` bytes behind it. Raises Unusable."""
    try:
        header = msgspec.msgpack.decode(raw, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unusable("it is damaged") from error
    if header.identity != identity:
        raise Unusable("it belongs to other files or settings")
    if not header.describes(body):
        raise Unusable("it is damaged")
    return header


def _open(path: Path) -> BinaryIO:
    return os.fdopen(open_file(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _read_raw_header(file: BinaryIO) -> tuple[bytes, bytes]:
    """Return the header, and the hash of it and all that follows. Raises Unusable, OSError."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(_HEAD.size)
    if len(start) < _HEAD.size:
        raise Unusable("it is cut short")
    magic, version, length, digest = _HEAD.unpack(start)
    if magic != MAGIC:
        raise Unusable("it is not a saved state")
    if version > VERSION:
        raise Unusable("a newer localspec wrote it")
    if version < VERSION:
        raise Unusable("an older localspec wrote it")
    if length > size:
        raise Unusable("it is damaged")
    return file.read(length), digest


def _read_verified(path: Path) -> tuple[bytes, State]:
    """Return the header and body of a file whose hash is right. Raises Unusable, OSError."""
    with _open(path) as file:
        raw, digest = _read_raw_header(file)
        size, free = os.fstat(file.fileno()).st_size, free_memory()
        if free is not None and size > free // 2:
            raise Unusable("there is too little free memory for it")
        if file.tell() >= size:
            raise Unusable("it is cut short")
        # Mapped, not read, because allocating hundreds of MiB costs more than all else here. A file is never
        # written to under its final name; where one is replaced or removed, the mapping stays valid.
        body: State = np.asarray(np.memmap(file, np.uint8, "r", file.tell()))
        hashed = hashlib.sha256(raw)
        hashed.update(body.data)
    if hashed.digest() != digest:
        raise Unusable("it is damaged")
    return raw, body


def write(file: BinaryIO, prefix: Prefix, identity: str, should_stop: Callable[[], bool]) -> None:
    """Write a prefix, piece by piece, calling `should_stop` before each piece.

    Raises:
        Stopped: `should_stop` returned True.
        OSError: The file cannot be written.
    """
    draft = prefix.draft if prefix.draft is not None else np.empty(0, np.uint8)
    header = msgspec.msgpack.encode(
        _Header(
            identity,
            list(prefix.tokens),
            prefix.n_draft,
            prefix.least,
            prefix.exact,
            prefix.target.nbytes,
            draft.nbytes,
            [(mark.tokens, mark.state.nbytes) for mark in prefix.marks],
        )
    )
    hashed = hashlib.sha256(header)
    file.write(_HEAD.pack(MAGIC, VERSION, len(header), bytes(32)))
    file.write(header)
    for state in (prefix.target, draft, *(mark.state for mark in prefix.marks)):
        for offset in range(0, state.nbytes, _PIECE_BYTES):
            if should_stop():
                raise Stopped
            piece = state[offset : offset + _PIECE_BYTES].data
            hashed.update(piece)
            file.write(piece)
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, VERSION, len(header), hashed.digest()))
