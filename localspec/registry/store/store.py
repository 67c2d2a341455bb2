"""The pairs that are here. Files are named by their hash, a pair is one JSON record.

models/pairs/NAME.json        a pair exists exactly when its record does, and that comes last
models/blobs/SHA256.gguf      whole, verified files, shared between pairs
models/parts/                 files under way, their journals and locks (transfer.py)
models/shards/SHA256/         links with the names llama.cpp expects of a sharded model
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from localspec.errors import (
    Conflict,
    Damaged,
    ModelNotFound,
    RecordTooNew,
    RegistryError,
    StoreReadOnly,
    UnsafePath,
)
from localspec.files import UNFINISHED, sync_folder
from localspec.paths import read_file, remove_tree
from localspec.protocol.pairs import CollectedView, FileReport, RemovedView
from localspec.registry.catalogue import NAME
from localspec.registry.header.model import shard_paths
from localspec.registry.store import records
from localspec.registry.store.files import (
    Hashes,
    locked,
    make_folder,
    sha256_of,
    store_error,
    write_whole,
)
from localspec.registry.store.records import Part, Record, StoredModel

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
        self._wanted = wanted
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

    # reading

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
        path = self._record_path(name)
        if path.is_symlink():
            raise UnsafePath(f"{path} is a symbolic link; remove it and try again.")
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise ModelNotFound(
                f"There is no pair '{name}' here; run: localspec pull {name}", param="model"
            ) from None
        except OSError as error:
            raise store_error(error, path) from error
        return records.decode(name, data)

    def blob(self, sha256: str) -> Path:
        """Where a file with this hash lies, or would lie."""
        return self.blobs / f"{sha256}.gguf"

    def part_path(self, part: Part) -> Path:
        """The file of one part."""
        return Path(part.path) if part.path else self.blob(part.sha256)

    def model_path(self, model: StoredModel) -> Path:
        """The path to hand to llama.cpp; for a sharded model the first of properly named links."""
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

    def ready(self, name: str, cancel: threading.Event | None = None) -> Record:
        """The pair, ready to load: every file there, of its size, unchanged since it was hashed.

        A file whose hash was never taken, or whose modification time moved, is hashed now, unless
        that was done and could not be written down.

        Raises:
            Damaged: naming the file and what to do.
            PullCancelled: `cancel` was set meanwhile.
        """
        record = self.get(name)
        stale = False
        for part in record.parts:
            problem = self._quick_problem(part)
            if problem:
                raise Damaged(f"{problem} {remedy(record)}")
            stale = stale or self._is_stale(part)
        if stale:

            def hashed(part: Part, _progress: Callable[[int], None]) -> str:
                if self._is_stale(part):
                    return self.hashes.of(self.part_path(part), cancel)
                return part.sha256

            record, reports = self._verified(record, hashed)
            bad = [report.problem for report in reports if report.problem]
            if bad:
                raise Damaged(f"{bad[0]} {remedy(record)}")
        return record

    def changed(self, part: Part, cancel: threading.Event | None = None) -> bool:
        """Is it another file than the one that was hashed? Its content decides, not its date.

        Raises:
            PullCancelled: `cancel` was set meanwhile.
        """
        try:
            if self.part_path(part).stat().st_size != part.size:
                return True
            if not part.checked or not self._is_stale(part):
                return False  # with 0: found damaged, or never hashed
            return self.hashes.of(self.part_path(part), cancel) != part.sha256
        except OSError:
            return False  # whoever loads it says so

    def glance(self, record: Record) -> str:
        """What a look at the folders says against using the pair, a sentence; empty where nothing does."""
        own = record.source == "own"
        for part in record.parts:
            problem = self._quick_problem(part)
            if own and self._was_touched(part):
                return f"{part.file} has changed; it is read again when the pair is used."
            if not (part.path or part.checked or problem):
                problem = f"{part.file} was found damaged."
            if problem:
                return f"{problem} {remedy(record)}"
        return ""

    def _was_touched(self, part: Part) -> bool:
        """Is there another file than when it was looked at last, or the same with another date?"""
        try:
            info = self.part_path(part).stat()
        except OSError:  # missing, or in a folder that may not be read
            return False
        if not stat.S_ISREG(info.st_mode):
            return False
        return info.st_size != part.size or bool(part.checked and info.st_mtime_ns != part.checked)

    def _is_stale(self, part: Part) -> bool:
        return not part.sha256 or self._mtime(part) != part.checked

    def verify(
        self, name: str, progress: Callable[[int, int], None] | None = None
    ) -> list[FileReport]:
        """Hash every file of a pair and remember the outcome; `progress(done, total)` in bytes."""

        def hashed(part: Part, told: Callable[[int], None]) -> str:
            return sha256_of(self.part_path(part), progress=told)

        return self._verified(self.get(name), hashed, progress)[1]

    def _verified(
        self,
        record: Record,
        hashed: Callable[[Part, Callable[[int], None]], str],
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Record, list[FileReport]]:
        """The record with what `hashed` found, written down too, and what that says of each file."""
        reports: list[FileReport] = []
        done = 0
        checked: dict[str, StoredModel] = {}
        for role, model in _roles(record):
            parts: list[Part] = []
            for part in model.parts:
                told = _shifted(progress, done, record.size)
                part, problem = self._verify_part(part, partial(hashed, part, told))
                done += part.size
                parts.append(part)
                reports.append(FileReport(role, part.file, problem))
            checked[role] = msgspec.structs.replace(model, parts=tuple(parts))
        updated = msgspec.structs.replace(
            record, target=checked["target"], draft=checked.get("draft")
        )
        if updated != record:
            with suppress(StoreReadOnly):  # the answer counts; next time they are hashed again
                self.put(updated)
        return updated, reports

    def _verify_part(self, part: Part, hashed: Callable[[], str]) -> tuple[Part, str]:
        """The part with its new `checked` mark, and what is wrong with it."""
        unchecked = msgspec.structs.replace(part, checked=0)
        problem = self._quick_problem(part)
        if problem:
            return unchecked, problem
        mtime = self._mtime(part)
        try:
            found = hashed()
        except OSError as error:
            return unchecked, f"{part.file} cannot be read: {error.strerror}."
        if part.sha256 and found != part.sha256:
            return unchecked, f"{part.file} is damaged: its SHA-256 is not the one recorded."
        return msgspec.structs.replace(part, sha256=found, checked=mtime), ""

    def _quick_problem(self, part: Part) -> str:
        """What a look at the directory says against a file; empty when nothing does."""
        path = self.part_path(part)
        try:
            info = path.stat() if part.path else path.lstat()
        except OSError:
            return f"{part.file} is missing ({path})."
        if not stat.S_ISREG(info.st_mode):
            return f"{path} is not a file (a link, perhaps)."
        if info.st_size != part.size:
            return f"{part.file} has {info.st_size} bytes and should have {part.size}."
        return ""

    def _mtime(self, part: Part) -> int:
        return self.part_path(part).stat().st_mtime_ns

    # writing

    def put(self, record: Record) -> None:
        """Make a pair visible: its record, whole or not at all.

        Raises:
            DiskFull, StoreReadOnly, StoreError
        """
        self.prepare()
        write_whole(self._record_path(record.name), records.encode(record))

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
        return locked(self.parts / ".pulls.lock", shared=True)

    def remove(self, name: str, in_use: Callable[[str], bool] = lambda _: False) -> RemovedView:
        """Forget a pair and delete the store's files that no other pair needs.

        Raises:
            Conflict: `in_use` says that the pair is loaded.
        """
        record = self.get(name)
        if in_use(name):
            raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
        self.prepare()
        try:
            self._record_path(name).unlink()
            sync_folder(self.pairs)
        except OSError as error:
            raise store_error(error, self._record_path(name)) from error
        with locked(self.parts / ".pulls.lock", wait=False) as alone:
            if not alone:
                return RemovedView(
                    name, 0, ("its files, until the running pull ends: localspec gc",)
                )
            return self._delete(record)

    def _delete(self, record: Record) -> RemovedView:
        """The files of a removed pair."""
        needed = self._needed()
        freed, kept = 0, []
        for part in {part.sha256 or part.path: part for part in record.parts}.values():
            if part.path:
                kept.append(f"{part.path} (not ours)")
            elif part.sha256 in needed:
                kept.append(f"{part.file} (used by {', '.join(needed[part.sha256])})")
            else:
                freed += _delete_file(self.blob(part.sha256))
                remove_tree(self.shards / part.sha256)
        return RemovedView(record.name, freed, tuple(kept))

    def collect(self, *, dry_run: bool = False) -> CollectedView:
        """Delete what no pair needs: files, temporary ones, downloads that nobody waits for.

        Raises:
            Conflict: a pull is running, or a record cannot be read (its files might be needed).
        """
        if not self.root.is_dir():
            return CollectedView(0, (), dry_run)
        problems = self.listing().problems
        if problems:
            raise Conflict(f"Nothing was deleted: {problems[0]}")
        self.prepare()
        with locked(self.parts / ".pulls.lock", wait=False) as alone:
            if not alone:
                raise Conflict("A pull is running; wait for its end or cancel it, then try again.")
            freed, gone = 0, []
            for path in list(self._garbage()):
                size = path.lstat().st_blocks * 512  # unfinished files have holes
                if path.suffix != ".lock":
                    gone.append(path.name)
                freed += size
                if not dry_run:
                    _delete_file(path)
            return CollectedView(freed, tuple(gone), dry_run)

    def _garbage(self) -> Iterator[Path]:
        needed = self._needed()
        for path in sorted(self.blobs.glob("*.gguf")):
            if path.stem not in needed:
                yield path
        wanted = self._wanted()
        for path in sorted(self.parts.iterdir()):
            if path.name != ".pulls.lock" and path.stem not in wanted:
                yield path
        yield from sorted(self.pairs.glob(UNFINISHED))
        for folder in sorted(self.shards.glob("*")):
            if folder.name not in needed:
                yield from sorted(folder.iterdir())

    def _needed(self) -> dict[str, list[str]]:
        """Hash → names of the pairs that need the file."""
        needed: dict[str, list[str]] = {}
        for record in self.listing().records:
            for part in record.parts:
                if not part.path:
                    needed.setdefault(part.sha256, []).append(record.name)
        for sha256 in self._wanted():
            needed.setdefault(sha256, []).append("a pull that goes on later")
        return needed

    def _record_path(self, name: str) -> Path:
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
            raise Damaged(f"{each} is damaged: its SHA-256 is not the one it is named by.")
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


def _shifted(
    progress: Callable[[int, int], None] | None, start: int, total: int
) -> Callable[[int], None]:
    """Progress within one file as progress within the pair."""
    return lambda done: progress(start + done, total) if progress else None


def _roles(record: Record) -> Iterator[tuple[str, StoredModel]]:
    yield "target", record.target
    if record.draft:
        yield "draft", record.draft


def own_sentence(name: str) -> str:
    """Why nothing is pulled in place of a pair of the person's own, and what to do."""
    return (
        f"'{name}' is a pair of your own files, which a pull does not replace. Give another name "
        f"(localspec pull … --name NAME), or run: localspec rm {name}"
    )


def remedy(record: Record) -> str:
    """What to do about a damaged file of the pair."""
    if record.source != "own":
        return f"Run: localspec pull {record.name}"  # fetches what is damaged and nothing else
    files = f"--target {shlex.quote(record.target.parts[0].path)}"
    if record.draft:
        files += f" --draft {shlex.quote(record.draft.parts[0].path)}"
    roles = "" if record.roles == ("chat",) else "".join(f" --role {each}" for each in record.roles)
    again = f"localspec add {record.name} {files}{roles} --replace"
    return f"Restore it, or take it as it is: {again}"


def _delete_file(path: Path) -> int:
    """Delete one file of the store; the bytes freed."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error(error, path) from error
    return size
