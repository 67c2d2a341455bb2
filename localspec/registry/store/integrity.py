"""Check that a pair's files have not changed since they were hashed, and delete those that no pair needs."""

from __future__ import annotations

import os
import shlex
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from localspec.errors import Conflict, Damaged, StoreReadOnly
from localspec.files import UNFINISHED_PATTERN, sync_folder
from localspec.paths import remove_tree
from localspec.protocol.pairs import CollectedView, FileReport, RemovedView
from localspec.registry.store.files import hold_lock, sha256_of, store_error
from localspec.registry.store.store import PULLS_LOCK, Part, Record, Store, StoredModel


def ensure_ready(store: Store, name: str, cancel: threading.Event | None = None) -> Record:
    """Return the record of a pair after checking that it is ready to load.

    Every file must exist, have its size, and be unchanged since it was hashed. A file that was never hashed,
    or whose modification time changed, is hashed now, unless its hash is still in the cache.

    Raises:
        Damaged: a file is damaged or missing; the message names it and what to do.
        PullCancelled: `cancel` was set meanwhile.
    """
    record = store.get(name)
    for part in record.parts:
        if problem := _quick_problem(store, part):
            raise Damaged(f"{problem} {describe_remedy(record)}")
    if not any(_is_stale(store, part) for part in record.parts):
        return record

    def hash_stale(part: Part, _progress: Callable[[int], None]) -> str:
        if _is_stale(store, part):
            return store.hashes.sha256(store.part_path(part), cancel)
        return part.sha256

    record, reports = _verify_parts(store, record, hash_stale)
    for problem in filter(None, (report.problem for report in reports)):
        raise Damaged(f"{problem} {describe_remedy(record)}")
    return record


def has_changed(
    store: Store,
    part: Part,
    cancel: threading.Event | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> bool:
    """Return whether a file is no longer the one that was hashed. Its content decides, not its date.

    progress: called with the bytes read so far.

    Raises:
        PullCancelled: `cancel` was set meanwhile.
    """
    try:
        if store.part_path(part).stat().st_size != part.size:
            return True
        if not part.checked or not _is_stale(store, part):
            return False  # `checked` is 0 if it was found damaged or never hashed
        return store.hashes.sha256(store.part_path(part), cancel, progress) != part.sha256
    except OSError:
        return False  # loading it reports the error


def find_quick_problem(store: Store, record: Record) -> str:
    """Return why the pair cannot be used, as a sentence, or an empty text.

    This looks only at the directory entries of its files and reads none of them.
    """
    for part in record.parts:
        problem = _quick_problem(store, part)
        if record.source == "own" and _was_touched(store, part):
            return f"{part.file} has changed; it is read again when the pair is used."
        if not (part.path or part.checked or problem):
            problem = f"{part.file} was found damaged."
        if problem:
            return f"{problem} {describe_remedy(record)}"
    return ""


def _was_touched(store: Store, part: Part) -> bool:
    """Return whether the size or the modification time of a file differs from the recorded one."""
    try:
        info = store.part_path(part).stat()
    except OSError:  # it is missing, or its folder may not be read
        return False
    is_other = info.st_size != part.size or bool(part.checked and info.st_mtime_ns != part.checked)
    return is_other and stat.S_ISREG(info.st_mode)


def _is_stale(store: Store, part: Part) -> bool:
    return not part.sha256 or store.part_path(part).stat().st_mtime_ns != part.checked


def verify(
    store: Store, name: str, progress: Callable[[int, int], None] | None = None
) -> list[FileReport]:
    """Hash every file of a pair and record the result. `progress(done, total)` is in bytes."""

    def hash_part(part: Part, report: Callable[[int], None]) -> str:
        return sha256_of(store.part_path(part), progress=report)

    return _verify_parts(store, store.get(name), hash_part, progress)[1]


def verify_files(
    record: Record, progress: Callable[[int, int], None] | None = None
) -> list[FileReport]:
    """Check the files of a record that is not stored. Only those whose names contain their hash are hashed.

    The header and weights of the others were checked when the record was made.
    """
    reports, done = [], 0
    for role, model in record.by_role:
        for part in model.parts:
            report = offset_progress(progress, done, record.size)
            problem = ""
            if part.sha256 and sha256_of(Path(part.path), progress=report) != part.sha256:
                problem = f"{part.file} is damaged: its SHA-256 does not match its name."
            reports.append(FileReport(role, part.file, problem, hashed=bool(part.sha256)))
            done += part.size
    return reports


def _verify_parts(
    store: Store,
    record: Record,
    hash_part: Callable[[Part, Callable[[int], None]], str],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Record, list[FileReport]]:
    """Hash the parts of a pair with `hash_part` and store the updated record.

    Returns:
        The updated record, and a report for each file.
    """
    reports: list[FileReport] = []
    done = 0
    models: dict[str, StoredModel] = {}
    for role, model in record.by_role:
        parts: list[Part] = []
        for part in model.parts:
            report = offset_progress(progress, done, record.size)
            part, problem = _verify_part(store, part, partial(hash_part, part, report))
            done += part.size
            parts.append(part)
            reports.append(FileReport(role, part.file, problem))
        models[role] = msgspec.structs.replace(model, parts=tuple(parts))
    updated = msgspec.structs.replace(record, **models)
    if updated != record:
        with suppress(StoreReadOnly):  # the files are hashed again next time
            store.put(updated)
    return updated, reports


def _verify_part(store: Store, part: Part, hash_file: Callable[[], str]) -> tuple[Part, str]:
    """Return the part with its new `checked` time, and what is wrong with it."""
    unchecked = msgspec.structs.replace(part, checked=0)
    if problem := _quick_problem(store, part):
        return unchecked, problem
    mtime = store.part_path(part).stat().st_mtime_ns
    try:
        sha256 = hash_file()
    except OSError as error:
        return unchecked, f"{part.file} cannot be read: {error.strerror}."
    if part.sha256 and sha256 != part.sha256:
        return unchecked, f"{part.file} is damaged: its SHA-256 does not match the recorded one."
    return msgspec.structs.replace(part, sha256=sha256, checked=mtime), ""


def _quick_problem(store: Store, part: Part) -> str:
    """Return what is wrong with a file, judged by its directory entry, or an empty text."""
    path = store.part_path(part)
    try:
        info = path.stat() if part.path else path.lstat()
    except OSError:
        return f"{part.file} is missing ({path})."
    if not stat.S_ISREG(info.st_mode):
        return f"{path} is not a file (perhaps a link)."
    if info.st_size != part.size:
        return f"{part.file} has {info.st_size} bytes but should have {part.size}."
    return ""


def offset_progress(
    progress: Callable[[int, int], None] | None, start: int, total: int
) -> Callable[[int], None]:
    """Return a callback that converts progress within one file to progress within the pair."""
    return lambda done: progress(start + done, total) if progress else None


def describe_remedy(record: Record) -> str:
    """Return what to do about a damaged or missing file of the pair."""
    if record.source != "own":
        return f"Run: localspec pull {record.name}"  # downloads only what is damaged
    if not all(os.path.isfile(part.path) for part in record.parts):  # noqa: PTH113 - never raises
        return f"Restore it, or remove the pair: localspec rm {record.name}"
    files = "".join(
        f" --{role} {shlex.quote(model.parts[0].path)}" for role, model in record.by_role
    )
    if record.roles != ("chat",) and not record.target.pooling:
        files += "".join(f" --role {role}" for role in record.roles)
    elif record.pooling:
        files += f" --pooling {record.pooling}"
    return f"Restore it, or accept it as it is: localspec add {record.name}{files} --replace"


def remove_pair(
    store: Store, name: str, in_use: Callable[[str], bool] = lambda _: False
) -> RemovedView:
    """Remove a pair and delete the store's files that no other pair needs.

    Raises:
        Conflict: `in_use` returns that the pair is loaded.
    """
    record = store.get(name)
    if in_use(name):
        raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
    store.prepare()
    try:
        store.record_path(name).unlink()
        sync_folder(store.pairs)
    except OSError as error:
        raise store_error(error, store.record_path(name)) from error
    with hold_lock(store.parts / PULLS_LOCK, wait=False) as is_locked:
        if not is_locked:
            until = "its files, until the running pull is done; then run: localspec gc"
            return RemovedView(name, 0, (until,))
        needed = _find_owners(store)
        freed, remaining = 0, []
        for part in {part.sha256 or part.path: part for part in record.parts}.values():
            if part.path:
                remaining.append(f"{part.path} (your own file)")
            elif part.sha256 in needed:
                remaining.append(f"{part.file} (used by {', '.join(needed[part.sha256])})")
            else:
                freed += _delete_file(store.blob(part.sha256))
                remove_tree(store.shards / part.sha256)
        return RemovedView(name, freed, tuple(remaining))


def collect_garbage(store: Store, *, dry_run: bool = False) -> CollectedView:
    """Delete what no pair needs: files, temporary files, and downloads that nobody will resume.

    Raises:
        Conflict: a pull is running, or a record cannot be read, whose files might be needed.
    """
    if not store.root.is_dir():
        return CollectedView(0, (), dry_run)
    problems = store.listing().problems
    if problems:
        raise Conflict(f"Nothing was deleted: {problems[0]}")
    store.prepare()
    with hold_lock(store.parts / PULLS_LOCK, wait=False) as is_locked:
        if not is_locked:
            raise Conflict("A pull is running; wait until it is done or cancel it, then try again.")
        freed, deleted = 0, []
        for path in list(_find_garbage(store)):
            # Allocated bytes, since unfinished files have holes.
            size = path.lstat().st_blocks * 512
            if path.suffix != ".lock":
                deleted.append(path.name)
            freed += size
            if not dry_run:
                _delete_file(path)
        return CollectedView(freed, tuple(deleted), dry_run)


def _find_garbage(store: Store) -> Iterator[Path]:
    """Yield every file of the store that no pair and no unfinished pull needs."""
    needed = _find_owners(store)
    for path in sorted(store.blobs.glob("*.gguf")):
        if path.stem not in needed:
            yield path
    unfinished = store.unfinished_hashes()
    for path in sorted(store.parts.iterdir()):
        if path.name != PULLS_LOCK and path.stem not in unfinished:
            yield path
    yield from sorted(store.pairs.glob(UNFINISHED_PATTERN))
    for folder in sorted(store.shards.glob("*")):
        if folder.name not in needed:
            yield from sorted(folder.iterdir())


def _find_owners(store: Store) -> dict[str, list[str]]:
    """Return the names of the pairs that need each file, by the file's hash."""
    needed: dict[str, list[str]] = {}
    for record in store.listing().records:
        for part in record.parts:
            if not part.path:
                needed.setdefault(part.sha256, []).append(record.name)
    for sha256 in store.unfinished_hashes():
        needed.setdefault(sha256, []).append("an interrupted pull that will resume")
    return needed


def _delete_file(path: Path) -> int:
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error(error, path) from error
    return size
