"""A block in Emacs' init file: it has no folder that it reads files of others from."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from localspec.cli.editors import settings
from localspec.errors import LocalspecError
from localspec.files import write_whole
from localspec.paths import default_paths

_FIRST = (
    ";; Written by `localspec editor install emacs`; `localspec editor uninstall emacs` removes it."
)
_LAST = ";; This is all that localspec wrote."
# What is undone besides: the file itself, or the end of the line above.
_NEW, _OPEN = ";; There was no such file before.\n", ";; The line above had no end.\n"
_BLOCK = re.compile(
    rf"^{re.escape(_FIRST)}\n(?P<note>{re.escape(_NEW)}|{re.escape(_OPEN)})?.*?^{re.escape(_LAST)}\n",
    re.MULTILINE | re.DOTALL,
)


class _Found(NamedTuple):
    """The init file without our block, where that is or will be, and what is noted in it."""

    rest: str
    at: int
    note: str | None  # None: there is no block


def file(editor: str = "emacs") -> Path:
    """The init file that it reads, or would read if there were one, of this user."""
    del editor
    home = Path.home()
    own, xdg = home / ".emacs.d", home / ".config" / "emacs"
    old = [home / ".emacs.el", home / ".emacs"]
    for each in old:
        if each.exists():
            return each
    return (xdg if xdg.is_dir() and not own.is_dir() else own) / "init.el"


def text(editor: str = "emacs", note: str = "") -> str:
    """What is written into it."""
    here = settings.machine(default_paths())
    return f"{_FIRST}\n{note}{settings.SETTINGS[editor].text(here)}\n{_LAST}\n"


def install(editor: str = "emacs") -> Path:
    """Write it, in the place of an older one of ours, else at the end.

    Raises:
        LocalspecError: the file cannot be read or written.
    """
    path = file(editor)
    rest, at, was = _found(_read(path))
    before, after = rest[:at], rest[at:]
    note = _NEW if was == _NEW or not path.exists() else ""
    if before and not before.endswith("\n"):
        before, note = before + "\n", _OPEN
    _write(path, before + text(editor, note) + after)
    return path


def uninstall(editor: str = "emacs") -> Path | None:
    """Take it out; None when it is not there.

    Raises:
        LocalspecError: the file cannot be read or written.
    """
    path = file(editor)
    rest, _, note = _found(_read(path))
    if note is None:
        return None
    if note == _NEW and not rest:
        _remove(path)
    else:
        _write(path, rest)
    return path


def _found(whole: str) -> _Found:
    block = _BLOCK.search(whole)
    if block is None:
        return _Found(whole, len(whole), None)
    note = block["note"] or ""
    before, after = whole[: block.start()], whole[block.end() :]
    if note == _OPEN and not after:
        before = before.removesuffix("\n")
    return _Found(before + after, len(before), note)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    except OSError as error:
        raise LocalspecError(f"{path} cannot be read: {error.strerror}.") from error


def _write(path: Path, whole: str) -> None:
    """Behind a link, where it is one, and for whom it could be read before."""
    real = path.resolve()
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        mode = real.stat().st_mode if real.exists() else 0o644
        if not mode & 0o200:  # a new file in its place would not ask
            raise LocalspecError(f"{path} cannot be written: it is read-only.")
        write_whole(real, whole.encode("utf-8", "surrogateescape"))
        real.chmod(mode)
    except OSError as error:
        raise LocalspecError(f"{path} cannot be written: {error.strerror}.") from error


def _remove(path: Path) -> None:
    """With its folder, where that is left empty."""
    real = path.resolve()
    try:
        real.unlink()
    except OSError as error:
        raise LocalspecError(f"{path} cannot be removed: {error.strerror}.") from error
    with contextlib.suppress(OSError):
        real.parent.rmdir()
