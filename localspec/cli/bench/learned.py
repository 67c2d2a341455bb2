"""Reset what a pair has learned during a bench, unless it is to be kept.

Every answer teaches a loaded pair the cost of its passes and the acceptance of its drafts, and a
file saves both for the next load. The prompts of a bench are not its user's work, and some answers
draft deeper than pays. So a bench begins with what the file contains, learns as any other requests
would, and finally restores the file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from localspec import files, paths
from localspec.client.pairs import PairsClient
from localspec.errors import Conflict, NoDaemon

KEPT = (
    "The pair keeps what it learned from these answers: costs of passes, and acceptance of drafts."
)
DROPPED = "The pair's learned timings were reset, and it was unloaded; --apply keeps them."
_PATTERN = "profile-*.json"  # files of the engine, named by a key that only the engine knows
_UNLOAD_TIMEOUT_S = 5.0  # for an interrupted request to end
_POLL_INTERVAL_S = 0.05


@contextlib.contextmanager
def beginning(model: str, *, keep: bool) -> Iterator[list[str]]:
    """Begin with a newly loaded pair, and afterwards reset what it has learned.

    With `keep`, nothing is reset. It yields a list of notes, which is complete after the `with`
    block.
    """
    notes: list[str] = []
    if keep:
        yield notes
        notes.append(KEPT)
        return
    client, folder = PairsClient(), paths.default_paths().state
    name = model or str(client.status()["pair"]["name"])
    with contextlib.suppress(Conflict):  # the pair is also answering someone else
        client.unload(name)  # this saves what the pair has learned to its file
    contents = {file: file.read_bytes() for file in folder.glob(_PATTERN)}
    try:
        yield notes
    finally:
        client.autostart = False  # a daemon that has stopped has no pair to unload
        notes += [DROPPED] * _restore_files(client, name, folder, contents)


def _restore_files(
    client: PairsClient, name: str, folder: Path, contents: dict[Path, bytes]
) -> bool:
    """Unload the pair, which saves its file, and restore the previous content of that file."""
    stamps = _read_stamps(folder)
    if not _unload(client, name):
        return False
    changed = [file for file, stamp in _read_stamps(folder).items() if stamps.get(file) != stamp]
    for file in changed:
        with contextlib.suppress(OSError):
            if file in contents:
                files.write_whole(file, contents[file], sync=False)
            else:
                file.unlink()
    return bool(changed)


def _unload(client: PairsClient, name: str) -> bool:
    """Unload the pair, unless it is answering others or the daemon has stopped."""
    deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
    while True:
        try:
            return bool(client.unload(name))
        except Conflict:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        except NoDaemon:
            return False


def _read_stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the inode and modification time of each file, which change when it is written."""
    stamps = {}
    for file in folder.glob(_PATTERN):
        with contextlib.suppress(OSError):
            status = file.stat()
            stamps[file] = (status.st_ino, status.st_mtime_ns)
    return stamps
