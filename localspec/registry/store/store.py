"""The store of the installed pairs. Files are named by their hashes, and a pair is one JSON record.

models/pairs/NAME.json        the record of a pair; it is written last, and the pair exists once it does
models/blobs/SHA256.gguf      complete, verified files, shared between pairs
models/parts/                 unfinished downloads, their journals and locks (transfer.py)
models/shards/SHA256/         links with the names that llama.cpp expects of a sharded model
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from localspec.errors import (
    Conflict,
    Damaged,
    ModelNotFound,
    RecordTooNew,
    RegistryError,
    StoreError,
    StoreReadOnly,
    UnsafePath,
)
from localspec.model_traits import SidecarKind, draft_kind, file_draft_kind, reads_target_cache
from localspec.paths import read_file
from localspec.protocol.pairs import DraftKind
from localspec.protocol.settings import Pooling
from localspec.registry.catalogue import NAME_PATTERN
from localspec.registry.header.model import ModelInfo, shard_paths
from localspec.registry.store.files import (
    HashCache,
    hold_lock,
    make_folder,
    store_error,
    write_atomically,
)

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
    numbers. sidecar: as in `ModelInfo`; older records have it by their architecture alone.
    """

    parts: tuple[Part, ...]
    architecture: str
    repo: str = ""
    revision: str = ""
    parameters: int = 0
    heads: int = 0
    pooling: Pooling | None = None
    sidecar: SidecarKind | None = None

    @property
    def file(self) -> str:
        return self.parts[0].file

    @property
    def draft_kind(self) -> DraftKind:
        """The kind of drafts that the file gives, if it is a draft."""
        is_mtp = not self.sidecar and reads_target_cache(self.architecture)
        return file_draft_kind("mtp" if is_mtp else self.sidecar)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An installed pair. `created` is Unix time; `notes` are harmless differences.

    asked: the reference it was pulled from, empty for a pair as the catalogue has it. pooling: the user's
    choice, which overrides the target's file. draft_found: nobody named the draft, which lies beside the
    target. projector: the file by which the target reads pictures. other_projector: one that its repository
    has and that was left out.
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
    draft_found: bool = False
    projector: StoredModel | None = None
    other_projector: str = ""

    @property
    def kind(self) -> DraftKind:
        """What drafts for the target; "none" if the target does not write text."""
        return self.kind_with_heads(self.target.heads)

    def kind_with_heads(self, n_heads: int) -> DraftKind:
        """Return `kind` for so many MTP heads in the target's file, which an older record does not state."""
        return draft_kind(
            writes_text=not self.target.pooling,
            draft=self.draft.draft_kind if self.draft else None,
            has_heads=n_heads > 0,
        )

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
        """Each model with its role, "target", "draft" or "projector"."""
        models = (("target", self.target), ("draft", self.draft), ("projector", self.projector))
        return tuple((role, model) for role, model in models if model)

    @property
    def language_models(self) -> tuple[tuple[str, StoredModel], ...]:
        """The target and the draft, each with its role."""
        return tuple(entry for entry in self.by_role if entry[1] is not self.projector)

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


def store_model(
    model: ModelInfo, parts: tuple[Part, ...], repo: str = "", revision: str = ""
) -> StoredModel:
    """Return what a record keeps of a model with these files."""
    return StoredModel(
        parts=parts,
        architecture=model.architecture,
        repo=repo,
        revision=revision,
        parameters=model.parameters,
        heads=model.drafting_heads,
        pooling=model.pooling,
        sidecar=model.sidecar,
    )


def roles_for_pooling(pooling: Pooling | None) -> tuple[Literal["embed", "rerank"], ...]:
    """Return the roles of a model with this pooling; none for a model that writes text."""
    if pooling is None:
        return ()
    return ("rerank",) if pooling == "rank" else ("embed",)


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
        if problem := _find_problem(part):
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


PULLS_LOCK = ".pulls.lock"


@dataclass(frozen=True, slots=True)
class Listing:
    """All readable records, and one sentence for each record that cannot be read."""

    records: tuple[Record, ...]
    problems: tuple[str, ...]


class Store:
    """The folder of one user's models. Nothing is created until something is written."""

    def __init__(
        self,
        root: Path,
        hashes: HashCache | None = None,
        wanted: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """Set the folder. Hashes may be shared with other stores.

        wanted: returns the hashes of the files that unfinished pulls need.
        """
        self.root = root
        self.unfinished_hashes = wanted
        self.hashes = hashes or HashCache()
        self.pairs = root / "pairs"
        self.blobs = root / "blobs"
        self.parts = root / "parts"
        self.shards = root / "shards"

    def prepare(self) -> None:
        """Create the folders. Raises StoreReadOnly, UnsafePath."""
        for folder in (self.root, self.pairs, self.blobs, self.parts):
            make_folder(folder)
            if not os.access(folder, os.W_OK):
                raise StoreReadOnly(
                    f"The store {folder} is read-only; pairs in it can be used, not added."
                )

    def listing(self) -> Listing:
        """Return all records; broken and newer ones are reported as problems."""
        readable: list[Record] = []
        problems: list[str] = []
        for path in sorted(self.pairs.glob("*.json")) if self.pairs.is_dir() else []:
            try:
                readable.append(self.get(path.stem))
            except (RegistryError, UnsafePath, ModelNotFound) as error:
                problems.append(error.message)
        return Listing(tuple(readable), tuple(problems))

    def get(self, name: str) -> Record:
        """Return the record of one pair. Raises ModelNotFound, RecordTooNew, StoreError, UnsafePath."""
        path = self.record_path(name)
        if path.is_symlink():
            raise UnsafePath(f"{path} is a symbolic link; remove it and try again.")
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise ModelNotFound(
                f"The pair '{name}' is not pulled yet; run: localspec pull {name}", param="model"
            ) from None
        except OSError as error:
            raise store_error(error, path) from error
        return decode(name, data)

    def blob(self, sha256: str) -> Path:
        """Return the path of the complete file with this hash, whether it exists or not."""
        return self.blobs / f"{sha256}.gguf"

    def unfinished(self, sha256: str) -> Path:
        """Return the path of the unfinished download of a file with this hash."""
        return self.parts / f"{sha256}.part"

    def part_path(self, part: Part) -> Path:
        """Return the path of a part's file."""
        return Path(part.path) if part.path else self.blob(part.sha256)

    def model_path(self, model: StoredModel) -> Path:
        """Return the path that llama.cpp loads.

        For a sharded model it is the first of several links, which have the names that llama.cpp expects.

        Raises:
            StoreReadOnly, DiskFull, StoreError, UnsafePath: the links cannot be made.
        """
        first = self.part_path(model.parts[0])
        if len(model.parts) == 1 or model.parts[0].path:
            return first
        folder = self.shards / model.parts[0].sha256
        links = [folder / Path(part.file).name for part in model.parts]
        try:
            make_folder(folder)
            for link, part in zip(links, model.parts, strict=True):
                if not link.exists():
                    os.link(self.part_path(part), link)
        except OSError as error:
            raise store_error(error, folder) from error
        return links[0]

    def model_paths(self, record: Record) -> tuple[Path, Path | None]:
        """Return the paths that llama.cpp loads: of the target, and of the draft if there is one."""
        draft = self.model_path(record.draft) if record.draft else None
        return self.model_path(record.target), draft

    def put(self, record: Record) -> None:
        """Write the record of a pair atomically, which makes the pair visible.

        Raises:
            DiskFull, StoreReadOnly, StoreError
        """
        self.prepare()
        data = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
        write_atomically(self.record_path(record.name), data)

    def put_new(self, record: Record) -> None:
        """Write the record of a pair unless that would replace one that must stay.

        A pair of a newer localspec is never replaced, and a pair of the user's own files not by a pulled one.

        Raises:
            RecordTooNew, Conflict
        """
        try:
            if self.get(record.name).source == "own" and record.source != "own":
                raise Conflict(explain_own_pair(record.name))
        except RecordTooNew:
            raise
        except (ModelNotFound, RegistryError):
            pass  # there is none, or a broken one, which is replaced
        self.put(record)

    def pulling(self) -> AbstractContextManager[bool]:
        """Return a shared lock that every pull holds, so that no file is deleted meanwhile."""
        return hold_lock(self.parts / PULLS_LOCK, shared=True)

    def record_path(self, name: str) -> Path:
        """Return the path of a pair's record, whether it exists or not.

        Raises:
            ModelNotFound: the name is not a valid pair name.
        """
        if not NAME_PATTERN.fullmatch(name):
            raise ModelNotFound(f"'{name[:80]}' is not the name of a pair.", param="model")
        return self.pairs / f"{name}.json"


def list_local_parts(path: Path, hashes: HashCache | None = None) -> tuple[Part, ...]:
    """Return the parts of a model that is used where it lies. With `hashes`, each file is read and hashed.

    Raises:
        Damaged: a file does not have the hash that its name states.
    """
    parts = []
    for file in shard_paths(path):
        info = file.stat()
        stated_hash = _hash_from_name(file)
        sha256 = hashes.sha256(file) if hashes else stated_hash
        if stated_hash and sha256 != stated_hash:
            raise Damaged(f"{file} is damaged: its SHA-256 does not match its name.")
        parts.append(
            Part(
                file=file.name,
                size=info.st_size,
                sha256=sha256,
                path=str(file.absolute()),
                checked=info.st_mtime_ns if hashes else 0,
            )
        )
    return tuple(parts)


def _hash_from_name(path: Path) -> str:
    """Return the SHA-256 in a file's name, or "".

    Ollama, the Hugging Face cache and localspec's stores name files by their hash.
    """
    target = path.resolve()
    name = target.name.removeprefix("sha256-").removeprefix("sha256:").removesuffix(".gguf")
    return name if target.parent.name == "blobs" and _SHA256.fullmatch(name) else ""


def explain_own_pair(name: str) -> str:
    """Return why a pull does not replace a pair of the user's own files, and what to do."""
    return (
        f"'{name}' is a pair of your own files, which a pull does not replace. Choose "
        f"another name (localspec pull … --name NAME), or run: localspec rm {name}"
    )
