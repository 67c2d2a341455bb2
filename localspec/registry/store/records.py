"""The record of a pair in the store: one JSON file with a format version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from localspec.errors import RecordTooNew, StoreError
from localspec.protocol.pairs import DraftKind
from localspec.protocol.settings import Pooling
from localspec.purpose import is_sidecar

VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a model.

    path: where a file lies that is used in place; empty for a file of the store, which is named by its hash.
    checked: the modification time (ns) at which the hash was last found right. 0 means that it was never
    checked, so the file is hashed before it is used.
    """

    file: str
    size: int
    sha256: str = ""
    path: str = ""
    checked: int = 0


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A target or draft: where it came from, and its parts, several if it is sharded.

    heads: how many MTP heads in its own file can draft. pooling: set for a model that turns texts into
    numbers.
    """

    parts: tuple[Part, ...]
    architecture: str
    repo: str = ""
    revision: str = ""
    parameters: int = 0
    heads: int = 0
    pooling: Pooling | None = None

    @property
    def file(self) -> str:
        return self.parts[0].file

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An installed pair. `created` is Unix time; `notes` are harmless differences.

    asked: the reference it was pulled from, empty for a pair as the catalogue has it. pooling: the user's
    choice, which overrides the target's file.
    """

    name: str
    target: StoredModel
    draft: StoredModel | None = None
    version: int = VERSION
    source: Literal["hub", "own"] = "hub"
    created: float = 0
    summary: str = ""
    licence: str = ""
    roles: tuple[str, ...] = ("chat",)
    notes: tuple[str, ...] = ()
    template_sha256: str = ""
    asked: str = ""
    pooling: Pooling | None = None

    @property
    def kind(self) -> DraftKind:
        """What drafts for the target; "none" if the target does not write text."""
        if self.target.pooling:
            return "none"
        if self.draft:
            return "mtp-sidecar" if is_sidecar(self.draft.architecture) else "model"
        return "mtp-embedded" if self.target.heads else "ngram"

    @property
    def purposes(self) -> tuple[str, ...]:
        """The roles of the pair, with "text" instead of "chat" if its target cannot chat.

        A base model's file has no chat template.
        """
        if self.template_sha256:
            return self.roles
        return tuple("text" if role == "chat" else role for role in self.roles)

    @property
    def by_role(self) -> tuple[tuple[str, StoredModel], ...]:
        """Each model with its role, "target" or "draft"."""
        models = (("target", self.target), ("draft", self.draft))
        return tuple((role, model) for role, model in models if model)

    @property
    def models(self) -> tuple[StoredModel, ...]:
        return tuple(model for _, model in self.by_role)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for model in self.models for part in model.parts)

    @property
    def size(self) -> int:
        return sum(model.size for model in self.models)


class _Versioned(msgspec.Struct):
    version: int


def roles_of(pooling: Pooling | None) -> tuple[Literal["embed", "rerank"], ...]:
    """Return the roles of a model with this pooling; none for a model that writes text."""
    if pooling is None:
        return ()
    return ("rerank",) if pooling == "rank" else ("embed",)


def encode(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode(name: str, data: bytes) -> Record:
    """Parse a record from its file.

    Raises:
        RecordTooNew: it was written by a newer localspec.
        StoreError: it is not a valid record.
    """
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version > VERSION:
            raise RecordTooNew(
                f"The pair '{name}' was written by a newer localspec (record version {version}, "
                f"this one supports {VERSION}); it is left untouched. Upgrade localspec to use it."
            )
        record = msgspec.json.decode(data, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"The record of the pair '{name}' is broken: {error}.") from error
    if record.name != name or not all(model.parts for model in record.models):
        raise StoreError(f"The record of the pair '{name}' is broken: it names another pair.")
    for part in record.parts:
        problem = _find_problem(part)
        if problem:
            raise StoreError(f"The record of the pair '{name}' is broken: {problem}.")
    return record


def _find_problem(part: Part) -> str:
    """Return what is wrong with a part, or "". A wrong part could lead to another file than its own."""
    if part.sha256 and not _SHA256.fullmatch(part.sha256):
        return f"'{part.sha256[:80]}' is not a SHA-256"
    if not part.sha256 and not part.path:
        return "a file of the store has no SHA-256"
    if part.path and not Path(part.path).is_absolute():
        return f"'{part.path[:80]}' is not an absolute path"
    if part.file in ("", ".", "..") or "\0" in part.file + part.path:
        return f"'{part.file[:80]}' is not a file's name"
    if part.size < 0:
        return f"{part.file[:80]} has {part.size} bytes"
    return ""
