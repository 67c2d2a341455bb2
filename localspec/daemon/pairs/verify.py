"""Hash every file of a pair and report the progress. Blocks, so call it in a thread."""

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
    """Verify the files of a pair in the store.

    Raises:
        ModelNotFound: There is no such pair.
        InvalidRequest: It is the built-in pair.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: Own files cannot be used as they are now.
    """
    from localspec.registry.store import integrity

    if name == "builtin":
        raise InvalidRequest(
            "The pair 'builtin' is part of the installation; only pulled pairs have checksums."
        )
    installed = registry.pulled(name)
    record = registry.refreshed(installed.name, progress=_progress_reporter(installed, report))
    progress = _progress_reporter(record, report)
    progress(0, record.size)
    reports = integrity.verify(registry.store, record.name, progress)
    return _final_report(record, reports, integrity.remedy(record), registry.news(record.name))


def verify_files(files: PairFiles, report: Report) -> Verifying:
    """Verify files that belong to no pair.

    Raises:
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: The files cannot be used.
    """
    from localspec.registry.store import integrity, local

    draft = Path(files.draft) if files.draft else None
    record = local.describe_files(files.name, Path(files.target), draft)
    progress = _progress_reporter(record, report)
    progress(0, record.size)
    reports = integrity.verify_files(record, progress)
    return _final_report(record, reports, "Download it again with the program it belongs to.")


def _progress_reporter(record: Record, report: Report) -> Callable[[int, int], None]:
    """Return a function that reports the bytes hashed, at a limited rate."""
    limited_report = seldom(report)
    return lambda done, size: limited_report(Verifying(record.name, done, size))


def _final_report(
    record: Record, reports: list[FileReport], cure: str, news: str = ""
) -> Verifying:
    damaged = any(report.problem for report in reports)
    return Verifying(record.name, record.size, record.size, reports, cure if damaged else "", news)
