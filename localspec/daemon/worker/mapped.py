"""Whether the files that an engine reads its weights from are still what it loaded.

llama.cpp maps them: one that is cut meanwhile ends the process at the next read of what is gone
(SIGBUS), and that is no fault of pair or kernels. One replaced by another name is no danger: what was
mapped stays until the engine ends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from localspec.errors import BadGguf
from localspec.protocol.frames import PairFiles

Mark = tuple[int, int] | None  # size in bytes, time of the last change in ns; None: not there


class Mapped:
    """The files of a pair as they are now."""

    def __init__(self, pair: PairFiles) -> None:
        from localspec.registry.header.model import shard_paths

        files: list[Path] = []
        for name in (pair.target, pair.draft):
            with contextlib.suppress(BadGguf):  # the load will say it
                files += shard_paths(Path(name)) if name else []
        self._marks = {file: _mark(file) for file in files}

    def changed(self) -> Path | None:
        """The first that is not what it was."""
        return next((file for file, mark in self._marks.items() if _mark(file) != mark), None)


def _mark(file: Path) -> Mark:
    try:
        info = file.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns
