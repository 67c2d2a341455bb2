"""Hashing every file of a pair, and how far that is. Blocks; for threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.daemon.http.sse import seldom
from localspec.daemon.pairs.registry import Registry
from localspec.errors import InvalidRequest
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import FileReport, Verifying

if TYPE_CHECKING:
    from localspec.registry.store.records import Record

Report = Callable[[Verifying], None]


def verify_pair(registry: Registry, name: str, report: Report) -> Verifying:
    """A pair of the store.

    Raises:
        ModelNotFound: there is none. InvalidRequest: it is the shipped one.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: own files that cannot be used as they are now.
    """
    from localspec.registry.store import integrity

    if name == "builtin":
        raise InvalidRequest(
            "The pair 'builtin' is part of the installation; only pulled pairs have checksums."
        )
    known = registry.pulled(name)
    record = registry.refreshed(known.name, progress=_progress(known, report))
    progress = _progress(record, report)
    progress(0, record.size)
    reports = integrity.verify(registry.store, record.name, progress)
    return _verified(record, reports, integrity.remedy(record), registry.news(record.name))


def verify_files(found: PairFiles, report: Report) -> Verifying:
    """Files that are in no pair.

    Raises:
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: they cannot be used.
    """
    from localspec.registry.store import integrity, local

    draft = Path(found.draft) if found.draft else None
    record = local.describe_files(found.name, Path(found.target), draft)
    progress = _progress(record, report)
    progress(0, record.size)
    reports = integrity.verify_files(record, progress)
    return _verified(record, reports, "Download it again with the program it belongs to.")


def _progress(record: Record, report: Report) -> Callable[[int, int], None]:
    """Reports of bytes hashed, not too often."""
    told = seldom(report)
    return lambda done, size: told(Verifying(record.name, done, size))


def _verified(record: Record, reports: list[FileReport], cure: str, news: str = "") -> Verifying:
    damaged = any(each.problem for each in reports)
    return Verifying(record.name, record.size, record.size, reports, cure if damaged else "", news)
