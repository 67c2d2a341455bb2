"""Write a block into Emacs' init file, since Emacs loads no files from a folder by itself."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from localspec.errors import LocalspecError
from localspec.extras.editors import settings
from localspec.files import write_atomically
from localspec.paths import default_paths

_FIRST_LINE = (
    ";; Written by `localspec editor install emacs`; `localspec editor uninstall emacs` removes it."
)
_LAST_LINE = ";; This is all that localspec wrote."
# Notes in the block about what else has to be undone: creating the file, or ending the line above.
_NEW_FILE_NOTE, _OPEN_LINE_NOTE = (
    ";; There was no such file before.\n",
    ";; The line above had no end.\n",
)
_BLOCK = re.compile(
    rf"^{re.escape(_FIRST_LINE)}\n"
    rf"(?P<note>{re.escape(_NEW_FILE_NOTE)}|{re.escape(_OPEN_LINE_NOTE)})?"
    rf".*?^{re.escape(_LAST_LINE)}\n",
    re.MULTILINE | re.DOTALL,
)


class _InitFile(NamedTuple):
    """The init file without our block."""

    rest: str  # the text without the block
    at: int  # position of the block, also if it is not written yet
    note: str | None  # note in the block; None: there is no block


def file(editor: str = "emacs") -> Path:
    """Return the init file of this user, also if it does not exist yet."""
    del editor
    home = Path.home()
    default, xdg_default = home / ".emacs.d", home / ".config" / "emacs"
    older_places = [home / ".emacs.el", home / ".emacs"]
    for path in older_places:
        if path.exists():
            return path
    return (xdg_default if xdg_default.is_dir() and not default.is_dir() else default) / "init.el"


def text(editor: str = "emacs", note: str = "") -> str:
    """Return the text of the block."""
    machine = settings.read_environment(default_paths())
    return f"{_FIRST_LINE}\n{note}{settings.SETTINGS[editor].text(machine)}\n{_LAST_LINE}\n"


def install(editor: str = "emacs") -> Path:
    """Write the block in the place of an older one, or else at the end.

    Raises:
        LocalspecError: the file cannot be read or written.
    """
    path = file(editor)
    content, position, old_note = _split_block(_read(path))
    before, after = content[:position], content[position:]
    note = _NEW_FILE_NOTE if old_note == _NEW_FILE_NOTE or not path.exists() else ""
    if before and not before.endswith("\n"):
        before, note = before + "\n", _OPEN_LINE_NOTE
    _write(path, before + text(editor, note) + after)
    return path


def uninstall(editor: str = "emacs") -> Path | None:
    """Remove the block; return None if there is none.

    Raises:
        LocalspecError: the file cannot be read or written.
    """
    path = file(editor)
    content, _, note = _split_block(_read(path))
    if note is None:
        return None
    if note == _NEW_FILE_NOTE and not content:
        _remove(path)
    else:
        _write(path, content)
    return path


def _split_block(content: str) -> _InitFile:
    block = _BLOCK.search(content)
    if block is None:
        return _InitFile(content, len(content), None)
    note = block["note"] or ""
    before, after = content[: block.start()], content[block.end() :]
    if note == _OPEN_LINE_NOTE and not after:
        before = before.removesuffix("\n")
    return _InitFile(before + after, len(before), note)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    except OSError as error:
        raise LocalspecError(f"{path} cannot be read: {error.strerror}.") from error


def _write(path: Path, content: str) -> None:
    """Write the file that a link leads to, and keep its permissions."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode if target.exists() else 0o644
        if not mode & 0o200:  # replacing the file would ignore that it is read-only
            raise LocalspecError(f"{path} cannot be written: it is read-only.")
        write_atomically(target, content.encode("utf-8", "surrogateescape"))
        target.chmod(mode)
    except OSError as error:
        raise LocalspecError(f"{path} cannot be written: {error.strerror}.") from error


def _remove(path: Path) -> None:
    """Remove the file, and its folder if that becomes empty."""
    target = path.resolve()
    try:
        target.unlink()
    except OSError as error:
        raise LocalspecError(f"{path} cannot be removed: {error.strerror}.") from error
    with contextlib.suppress(OSError):
        target.parent.rmdir()
