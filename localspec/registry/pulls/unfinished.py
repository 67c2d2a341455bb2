"""The pulls that are wanted and not here yet, so that they go on when the daemon starts again."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from localspec.errors import RegistryError, UnsafePath
from localspec.files import sync_folder
from localspec.paths import read_file
from localspec.registry.pulls.wanted import Wanted
from localspec.registry.store.files import make_folder, write_whole

VERSION = 1


class _Kept(msgspec.Struct):
    pulls: tuple[Wanted, ...] = ()
    version: int = VERSION


class Unfinished:
    """One file, written whole each time, and none while nothing is wanted. For threads.

    What cannot be kept is pulled all the same; it only does not go on by itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def all(self) -> tuple[Wanted, ...]:
        """What is wanted, the oldest first; nothing where the file is broken."""
        try:
            kept = msgspec.json.decode(read_file(self._path), type=_Kept)
        except (OSError, msgspec.MsgspecError):
            return ()
        return kept.pulls if kept.version == VERSION else ()

    def files(self) -> frozenset[str]:
        """The hashes of all files that are being fetched."""
        return frozenset(sha256 for each in self.all() for sha256 in each.files)

    def keep(self, wanted: Wanted) -> None:
        """Also in place of what was wanted under this name before."""
        wanted = msgspec.structs.replace(wanted, endpoint=_without_secrets(wanted.endpoint))
        with self._lock:
            others = [each for each in self.all() if each.name != wanted.name]
            self._write((*others, wanted))

    def drop(self, name: str) -> bool:
        """Forget one; whether it was wanted."""
        with self._lock:
            pulls = self.all()
            others = tuple(each for each in pulls if each.name != name)
            if others != pulls:
                self._write(others)
            return others != pulls

    def _write(self, pulls: tuple[Wanted, ...]) -> None:
        with suppress(RegistryError, UnsafePath, OSError):
            if pulls:
                make_folder(self._path.parent)
                write_whole(self._path, msgspec.json.encode(_Kept(pulls)))
            else:
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)


def _without_secrets(endpoint: str) -> str:
    """An address without a user's name and password, and without what may be a key behind it."""
    if not endpoint:
        return ""
    try:
        address = urlsplit(endpoint)
    except ValueError:
        return ""
    host = address.netloc.rpartition("@")[2]
    return urlunsplit((address.scheme, host, address.path, "", ""))
