"""Are a pair's files what they were when their hashes were taken?"""

from __future__ import annotations

import os
import shlex
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from localspec.errors import Damaged, StoreReadOnly
from localspec.protocol.pairs import FileReport
from localspec.registry.store.files import sha256_of
from localspec.registry.store.records import Part, Record, StoredModel
from localspec.registry.store.store import Store


def ready(store: Store, name: str, cancel: threading.Event | None = None) -> Record:
    """The pair, ready to load: every file there, of its size, unchanged since it was hashed.

    A file whose hash was never taken, or whose modification time moved, is hashed now, unless
    that was done and could not be written down.

    Raises:
        Damaged: naming the file and what to do.
        PullCancelled: `cancel` was set meanwhile.
    """
    record = store.get(name)
    stale = False
    for part in record.parts:
        problem = _quick_problem(store, part)
        if problem:
            raise Damaged(f"{problem} {remedy(record)}")
        stale = stale or _is_stale(store, part)
    if stale:

        def hashed(part: Part, _progress: Callable[[int], None]) -> str:
            if _is_stale(store, part):
                return store.hashes.of(store.part_path(part), cancel)
            return part.sha256

        record, reports = _verified(store, record, hashed)
        bad = [report.problem for report in reports if report.problem]
        if bad:
            raise Damaged(f"{bad[0]} {remedy(record)}")
    return record


def changed(
    store: Store,
    part: Part,
    cancel: threading.Event | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> bool:
    """Is it another file than the one that was hashed? Its content decides, not its date.

    `progress` hears the bytes that were read of it.

    Raises:
        PullCancelled: `cancel` was set meanwhile.
    """
    try:
        if store.part_path(part).stat().st_size != part.size:
            return True
        if not part.checked or not _is_stale(store, part):
            return False  # with 0: found damaged, or never hashed
        return store.hashes.of(store.part_path(part), cancel, progress) != part.sha256
    except OSError:
        return False  # whoever loads it says so


def glance(store: Store, record: Record) -> str:
    """What a look at the folders says against using the pair, a sentence; empty where nothing does."""
    own = record.source == "own"
    for part in record.parts:
        problem = _quick_problem(store, part)
        if own and _was_touched(store, part):
            return f"{part.file} has changed; it is read again when the pair is used."
        if not (part.path or part.checked or problem):
            problem = f"{part.file} was found damaged."
        if problem:
            return f"{problem} {remedy(record)}"
    return ""


def _was_touched(store: Store, part: Part) -> bool:
    """Is there another file than when it was looked at last, or the same with another date?"""
    try:
        info = store.part_path(part).stat()
    except OSError:  # missing, or in a folder that may not be read
        return False
    if not stat.S_ISREG(info.st_mode):
        return False
    return info.st_size != part.size or bool(part.checked and info.st_mtime_ns != part.checked)


def _is_stale(store: Store, part: Part) -> bool:
    return not part.sha256 or _mtime(store, part) != part.checked


def verify(
    store: Store, name: str, progress: Callable[[int, int], None] | None = None
) -> list[FileReport]:
    """Hash every file of a pair and remember the outcome; `progress(done, total)` in bytes."""

    def hashed(part: Part, told: Callable[[int], None]) -> str:
        return sha256_of(store.part_path(part), progress=told)

    return _verified(store, store.get(name), hashed, progress)[1]


def verify_files(
    record: Record, progress: Callable[[int, int], None] | None = None
) -> list[FileReport]:
    """The files of a record that is not stored: hashed where their names state their hash.

    Of others header and weights were looked at when the record was made; more is not known of them.
    """
    reports, done = [], 0
    for role, model in record.by_role:
        for part in model.parts:
            told = shifted(progress, done, record.size)
            wrong = part.sha256 and sha256_of(Path(part.path), progress=told) != part.sha256
            problem = (
                f"{part.file} is damaged: its SHA-256 does not match its name." if wrong else ""
            )
            reports.append(FileReport(role, part.file, problem, hashed=bool(part.sha256)))
            done += part.size
    return reports


def _verified(
    store: Store,
    record: Record,
    hashed: Callable[[Part, Callable[[int], None]], str],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Record, list[FileReport]]:
    """The record with what `hashed` found, written down too, and what that says of each file."""
    reports: list[FileReport] = []
    done = 0
    checked: dict[str, StoredModel] = {}
    for role, model in record.by_role:
        parts: list[Part] = []
        for part in model.parts:
            told = shifted(progress, done, record.size)
            part, problem = _verify_part(store, part, partial(hashed, part, told))
            done += part.size
            parts.append(part)
            reports.append(FileReport(role, part.file, problem))
        checked[role] = msgspec.structs.replace(model, parts=tuple(parts))
    updated = msgspec.structs.replace(record, target=checked["target"], draft=checked.get("draft"))
    if updated != record:
        with suppress(StoreReadOnly):  # the answer counts; next time they are hashed again
            store.put(updated)
    return updated, reports


def _verify_part(store: Store, part: Part, hashed: Callable[[], str]) -> tuple[Part, str]:
    """The part with its new `checked` mark, and what is wrong with it."""
    unchecked = msgspec.structs.replace(part, checked=0)
    problem = _quick_problem(store, part)
    if problem:
        return unchecked, problem
    mtime = _mtime(store, part)
    try:
        found = hashed()
    except OSError as error:
        return unchecked, f"{part.file} cannot be read: {error.strerror}."
    if part.sha256 and found != part.sha256:
        return unchecked, f"{part.file} is damaged: its SHA-256 does not match the recorded one."
    return msgspec.structs.replace(part, sha256=found, checked=mtime), ""


def _quick_problem(store: Store, part: Part) -> str:
    """What a look at the directory says against a file; empty when nothing does."""
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


def _mtime(store: Store, part: Part) -> int:
    return store.part_path(part).stat().st_mtime_ns


def shifted(
    progress: Callable[[int, int], None] | None, start: int, total: int
) -> Callable[[int], None]:
    """Progress within one file as progress within the pair."""
    return lambda done: progress(start + done, total) if progress else None


def remedy(record: Record) -> str:
    """Return what to do about a damaged or missing file of the pair."""
    if record.source != "own":
        return f"Run: localspec pull {record.name}"  # fetches what is damaged and nothing else
    if not all(os.path.isfile(part.path) for part in record.parts):  # noqa: PTH113 - never raises
        return f"Restore it, or remove the pair: localspec rm {record.name}"
    files = f"--target {shlex.quote(record.target.parts[0].path)}"
    if record.draft:
        files += f" --draft {shlex.quote(record.draft.parts[0].path)}"
    told = record.roles == ("chat",) or record.target.pooling
    chosen = f" --pooling {record.pooling}" if record.pooling else ""
    roles = chosen if told else "".join(f" --role {each}" for each in record.roles)
    again = f"localspec add {record.name} {files}{roles} --replace"
    return f"Restore it, or accept it as it is: {again}"
