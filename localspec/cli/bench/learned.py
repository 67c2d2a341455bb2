"""What a pair has learned before a bench, and whether that stays.

Every answer teaches a loaded pair what its passes cost and how often its drafts are right, and a file keeps
that for the next load. The prompts of a bench are not its user's work, and some answers draft deeper than
pays. So a bench begins with what the file has, learns as any other requests would, and in the end the file
is as it was; unless what was learned is to be kept.
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
_PATTERN = "profile-*.json"  # as the engine names them, by a key that only it knows
_PATIENCE = 5.0  # seconds for a request that was interrupted to end
_LOOK = 0.05


@contextlib.contextmanager
def beginning(model: str, *, keep: bool) -> Iterator[list[str]]:
    """The pair is loaded afresh within, and unless `keep` leaves no trace of it. Yields what is to be said
    of that, complete when this is over.
    """
    said: list[str] = []
    if keep:
        yield said
        said.append(KEPT)
        return
    client, folder = PairsClient(), paths.default_paths().state
    name = model or str(client.status()["pair"]["name"])
    with contextlib.suppress(Conflict):  # somebody else is being answered, whose pair it is, too
        client.unload(name)  # what it knows is in its file then
    before = {file: file.read_bytes() for file in folder.glob(_PATTERN)}
    try:
        yield said
    finally:
        client.autostart = False  # one that has gone holds nothing
        said += [DROPPED] * _restored(client, name, folder, before)


def _restored(client: PairsClient, name: str, folder: Path, before: dict[Path, bytes]) -> bool:
    """Unload the pair, and give the file that it writes then its content of before."""
    seen = _stamps(folder)
    if not _unloaded(client, name):
        return False
    changed = [file for file, stamp in _stamps(folder).items() if seen.get(file) != stamp]
    for file in changed:
        with contextlib.suppress(OSError):
            if file in before:
                files.write_whole(file, before[file], sync=False)
            else:
                file.unlink()
    return bool(changed)


def _unloaded(client: PairsClient, name: str) -> bool:
    """Unless it is at work for others, or the daemon has gone."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return bool(client.unload(name))
        except Conflict:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK)
        except NoDaemon:
            return False


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """A file that was written anew is another one."""
    found = {}
    for file in folder.glob(_PATTERN):
        with contextlib.suppress(OSError):
            status = file.stat()
            found[file] = (status.st_ino, status.st_mtime_ns)
    return found
