"""A session's file: what target and draft remember, with the tokens they stand for.

Nothing of a file reaches llama.cpp before its hash is right.
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
_PIECE = 16 << 20
_HEAD = struct.Struct("<8sII32s")  # magic, version, bytes of the header, hash of all that follows


class Unusable(Exception):
    """A file that will not be used; says why."""


class Stopped(Exception):
    """The time for writing is over, or what is written is forgotten."""


class Kept(NamedTuple):
    """What can be gone on from with a state, as `Prefix` has it; marks: after how many tokens."""

    tokens: list[int]
    least: int
    marks: list[int]
    exact: bool

    @classmethod
    def of(cls, prefix: Prefix) -> Kept:
        marks = [mark.tokens for mark in prefix.marks]
        return cls(list(prefix.tokens), prefix.least, marks, prefix.exact)

    def usable(self, tokens: list[int]) -> int:
        """How many of these tokens it can be cut to."""
        return usable(common_prefix(self.tokens, tokens), self.least, self.marks)

    def covers(self, other: Kept) -> bool:
        """Can all that another one is for be gone on from with this one?"""
        same = self.exact == other.exact and self.usable(other.tokens) == len(other.tokens)
        return same and (self.least <= other.least or set(other.marks) <= set(self.marks))


class _Header(msgspec.Struct):
    """identity: of files, settings and machine; sizes in bytes of the states, in this order behind it.

    marks: of each its tokens and its size.
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
        return Kept(self.tokens, self.least, [at for at, _ in self.marks], self.exact)

    @property
    def sizes(self) -> list[int]:
        return [self.target, self.draft, *(size for _, size in self.marks)]

    def describes(self, size: int) -> bool:
        """Can this be what stands in so many bytes?"""
        count = len(self.tokens)
        return (
            size == sum(self.sizes)
            and min(self.sizes) >= 0
            and 0 <= self.n_draft <= count
            and 0 <= self.least <= count
            and all(0 < tokens <= count for tokens, _ in self.marks)
        )


def read(path: Path, identity: str) -> Prefix:
    """What a file of this identity holds.

    Raises:
        Unusable: it is not whole, of another identity or version, or there is no memory for it.
        OSError: it cannot be read.
    """
    raw, body = _sound(path)
    header = _header(raw, identity, len(body))
    target, draft, *marks = np.split(body, np.cumsum(header.sizes)[:-1])
    return Prefix(
        header.tokens,
        target,
        draft if header.draft else None,
        header.n_draft,
        header.least,
        header.exact,
        marks=[Mark(at[0], state) for at, state in zip(header.marks, marks, strict=True)],
    )


def head(path: Path, identity: str) -> Kept:
    """What a file of this identity says of itself: to be looked for by, and not to be believed.

    Raises:
        Unusable, OSError: as `read`.
    """
    with _opened(path) as file:
        raw, _ = _raw_header(file)
        body = os.fstat(file.fileno()).st_size - file.tell()
    return _header(raw, identity, body).kept


def _header(raw: bytes, identity: str, body: int) -> _Header:
    """The header of a file with so many bytes behind it. Raises Unusable."""
    try:
        header = msgspec.msgpack.decode(raw, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unusable("it is damaged") from error
    if header.identity != identity:
        raise Unusable("it belongs to other files or settings")
    if not header.describes(body):
        raise Unusable("it is damaged")
    return header


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_file(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _raw_header(file: BinaryIO) -> tuple[bytes, bytes]:
    """The header, and the hash that it and what follows should have. Raises Unusable, OSError."""
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


def _sound(path: Path) -> tuple[bytes, State]:
    """Header and body of a file whose hash is right. Raises Unusable, OSError."""
    with _opened(path) as file:
        raw, digest = _raw_header(file)
        size, free = os.fstat(file.fileno()).st_size, free_memory()
        if free is not None and size > free // 2:
            raise Unusable("there is too little free memory for it")
        if file.tell() >= size:
            raise Unusable("it is cut short")
        # Mapped, not read: new memory of hundreds of MiB is dearer than all else here. Nobody writes into
        # a file that has its name; where one is replaced or removed, this stays as it was.
        body: State = np.asarray(np.memmap(file, np.uint8, "r", file.tell()))
        hashed = hashlib.sha256(raw)
        hashed.update(body.data)
    if hashed.digest() != digest:
        raise Unusable("it is damaged")
    return raw, body


def write(file: BinaryIO, prefix: Prefix, identity: str, over: Callable[[], bool]) -> None:
    """Write a prefix, piece by piece. over: asked before each.

    Raises:
        Stopped: `over` said so.
        OSError: it cannot be written.
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
        for at in range(0, state.nbytes, _PIECE):
            if over():
                raise Stopped
            piece = state[at : at + _PIECE].data
            hashed.update(piece)
            file.write(piece)
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, VERSION, len(header), hashed.digest()))
