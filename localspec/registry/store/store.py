"""The pairs that are here. Files are named by their hash, a pair is one JSON record.

models/pairs/NAME.json        a pair exists exactly when its record does, and that comes last
models/blobs/SHA256.gguf      whole, verified files, shared between pairs
models/parts/                 files under way, their journals and locks (transfer.py)
models/shards/SHA256/         links with the names llama.cpp expects of a sharded model
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from localspec.errors import (
    Conflict,
    Damaged,
    ModelNotFound,
    RecordTooNew,
    RegistryError,
    StoreReadOnly,
    UnsafePath,
)
from localspec.paths import read_file
from localspec.registry.catalogue import NAME
from localspec.registry.header.model import shard_paths
from localspec.registry.store import records
from localspec.registry.store.files import (
    Hashes,
    locked,
    make_folder,
    store_error,
    write_whole,
)
from localspec.registry.store.records import Part, Record, StoredModel

PULLS_LOCK = ".pulls.lock"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Listing:
    """All pairs, and one sentence for each record that cannot be read."""

    records: tuple[Record, ...]
    problems: tuple[str, ...]


class Store:
    """The folder of one user's models. Nothing is created before something is written."""

    def __init__(
        self,
        root: Path,
        hashes: Hashes | None = None,
        wanted: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`hashes`: those that are known, where somebody keeps them. `wanted`: those of the files that
        pulls which are not finished fetch."""
        self.root = root
        self.wanted = wanted
        self.hashes = hashes or Hashes()
        self.pairs = root / "pairs"
        self.blobs = root / "blobs"
        self.parts = root / "parts"
        self.shards = root / "shards"

    def prepare(self) -> None:
        """Create the folders.

        Raises:
            StoreReadOnly, UnsafePath
        """
        for folder in (self.root, self.pairs, self.blobs, self.parts):
            make_folder(folder)
            if not os.access(folder, os.W_OK):
                raise StoreReadOnly(
                    f"The store {folder} is read-only; pairs in it can be used, not added."
                )

    def listing(self) -> Listing:
        """Every pair; broken and newer records are told, not fatal."""
        found: list[Record] = []
        problems: list[str] = []
        for path in sorted(self.pairs.glob("*.json")) if self.pairs.is_dir() else []:
            try:
                found.append(self.get(path.stem))
            except RegistryError as error:
                problems.append(error.message)
            except (UnsafePath, ModelNotFound) as error:
                problems.append(error.message)
        return Listing(tuple(found), tuple(problems))

    def get(self, name: str) -> Record:
        """The record of one pair.

        Raises:
            ModelNotFound, RecordTooNew, StoreError
        """
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
        return records.decode(name, data)

    def blob(self, sha256: str) -> Path:
        """Where a file with this hash lies, or would lie."""
        return self.blobs / f"{sha256}.gguf"

    def unfinished(self, sha256: str) -> Path:
        """Where such a file grows while it is fetched."""
        return self.parts / f"{sha256}.part"

    def part_path(self, part: Part) -> Path:
        """The file of one part."""
        return Path(part.path) if part.path else self.blob(part.sha256)

    def model_path(self, model: StoredModel) -> Path:
        """The path to hand to llama.cpp; for a sharded model the first of properly named links.

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

    def paths(self, record: Record) -> tuple[Path, Path | None]:
        """What to hand to llama.cpp: target, and draft if there is one."""
        draft = self.model_path(record.draft) if record.draft else None
        return self.model_path(record.target), draft

    # writing

    def put(self, record: Record) -> None:
        """Make a pair visible: its record, whole or not at all.

        Raises:
            DiskFull, StoreReadOnly, StoreError
        """
        self.prepare()
        write_whole(self.record_path(record.name), records.encode(record))

    def put_new(self, record: Record) -> None:
        """The same, refusing to write over a pair of a newer localspec, and with a pulled one over
        a person's own.

        Raises:
            RecordTooNew, Conflict
        """
        try:
            if self.get(record.name).source == "own" and record.source != "own":
                raise Conflict(own_sentence(record.name))
        except RecordTooNew:
            raise
        except (ModelNotFound, RegistryError):
            pass  # none yet, or a broken one, which this mends
        self.put(record)

    def pulling(self) -> AbstractContextManager[bool]:
        """Held by every pull: while it is, no file is collected."""
        return locked(self.parts / PULLS_LOCK, shared=True)

    def record_path(self, name: str) -> Path:
        """Where the record of a pair lies, or would lie. Raises ModelNotFound: no possible name."""
        if not NAME.fullmatch(name):
            raise ModelNotFound(f"'{name[:80]}' is not the name of a pair.", param="model")
        return self.pairs / f"{name}.json"


def local_parts(path: Path, hashes: Hashes | None = None) -> tuple[Part, ...]:
    """The parts of a model used where it lies; with `hashes` each is read once, whole.

    Raises:
        Damaged: its hash is not the one it is named by.
    """
    parts = []
    for each in shard_paths(path):
        info = each.stat()
        told = _told_hash(each)
        found = hashes.of(each) if hashes else told
        if told and found != told:
            raise Damaged(f"{each} is damaged: its SHA-256 does not match its name.")
        parts.append(
            Part(
                file=each.name,
                size=info.st_size,
                sha256=found,
                path=str(each.absolute()),
                checked=info.st_mtime_ns if hashes else 0,
            )
        )
    return tuple(parts)


def _told_hash(path: Path) -> str:
    """The SHA-256 by which its keeper (Ollama, the Hugging Face cache, a store) names a file, or ""."""
    own = path.resolve()
    name = own.name.removeprefix("sha256-").removeprefix("sha256:").removesuffix(".gguf")
    return name if own.parent.name == "blobs" and _SHA256.fullmatch(name) else ""


def own_sentence(name: str) -> str:
    """Why nothing is pulled in place of a pair of the person's own, and what to do."""
    return (
        f"'{name}' is a pair of your own files, which a pull does not replace. Choose "
        f"another name (localspec pull … --name NAME), or run: localspec rm {name}"
    )
