"""A block in Emacs' init file: it has no folder that it reads files of others from."""

from __future__ import annotations

import re
from pathlib import Path

from localspec.cli.editors import settings
from localspec.errors import LocalspecError
from localspec.files import write_whole
from localspec.paths import default_paths

_FIRST = (
    ";; Written by `localspec editor install emacs`; `localspec editor uninstall emacs` removes it."
)
_LAST = ";; This is all that localspec wrote."
_BLOCK = re.compile(rf"^{re.escape(_FIRST)}\n.*?^{re.escape(_LAST)}\n", re.MULTILINE | re.DOTALL)


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


def text(editor: str = "emacs") -> str:
    """What is written into it."""
    here = settings.machine(default_paths())
    return f"{_FIRST}\n{settings.SETTINGS[editor].text(here)}\n{_LAST}\n"


def install(editor: str = "emacs") -> Path:
    """Write it, in the place of an older one of ours, else at the end.

    Raises:
        LocalspecError: the file cannot be read or written.
    """
    path = file(editor)
    rest, at = _without(_read(path))
    before, after = rest[:at], rest[at:]
    if before and not before.endswith("\n"):
        before += "\n"
    _write(path, before + text(editor) + after)
    return path


def uninstall(editor: str = "emacs") -> Path | None:
    """Take it out; None when it is not there.

    Raises:
        LocalspecError: the file cannot be read or written.
    """
    path = file(editor)
    found = _read(path)
    rest, _ = _without(found)
    if rest == found:
        return None
    _write(path, rest)
    return path


def _without(found: str) -> tuple[str, int]:
    """The file without our block, and where that was, or will be."""
    block = _BLOCK.search(found)
    if block is None:
        return found, len(found)
    return found[: block.start()] + found[block.end() :], block.start()


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
        write_whole(real, whole.encode("utf-8", "surrogateescape"))
        real.chmod(mode)
    except OSError as error:
        raise LocalspecError(f"{path} cannot be written: {error.strerror}.") from error
