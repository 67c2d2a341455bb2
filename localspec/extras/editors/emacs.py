"""Write a block into Emacs' init file, since Emacs loads no files from a folder by itself."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.extras.editors import plugin, settings
from localspec.files import write_atomically
from localspec.paths import default_paths

_FIRST_LINE = (
    ";; Written by `localspec editor install emacs`; `localspec editor uninstall emacs` removes it."
)
_LAST_LINE = ";; This is all that localspec wrote."
# Notes in the block about what else has to be undone: creating the file, or ending the line above.
_NEW_FILE_NOTE = ";; There was no such file before.\n"
_OPEN_LINE_NOTE = ";; The line above had no end.\n"
_BLOCK = re.compile(
    rf"^{re.escape(_FIRST_LINE)}\n"
    rf"(?P<note>{re.escape(_NEW_FILE_NOTE)}|{re.escape(_OPEN_LINE_NOTE)})?"
    rf".*?^{re.escape(_LAST_LINE)}\n",
    re.MULTILINE | re.DOTALL,
)


def file(_: str = "emacs") -> Path:
    """Return the init file of this user, also if it does not exist yet."""
    home = Path.home()
    default, xdg_default = home / ".emacs.d", home / ".config" / "emacs"
    for path in (home / ".emacs.el", home / ".emacs"):
        if path.exists():
            return path
    return (xdg_default if xdg_default.is_dir() and not default.is_dir() else default) / "init.el"


def text(editor: str = "emacs", note: str = "") -> str:
    machine = settings.read_environment(default_paths())
    return f"{_FIRST_LINE}\n{note}{settings.SETTINGS[editor].text(machine)}\n{_LAST_LINE}\n"


def install(editor: str = "emacs") -> Path:
    """Write the block in the place of an older one, or else at the end.

    Raises LocalspecError if the file cannot be read or written.
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
    """Remove the block, and the file if it was ours; return None if there is no block.

    Raises LocalspecError if the file cannot be read or written.
    """
    path = file(editor)
    content, _, note = _split_block(_read(path))
    if note is None:
        return None
    if note != _NEW_FILE_NOTE or content:
        _write(path, content)
        return path
    target = path.resolve()
    with plugin.explained(path, "removed"):
        target.unlink()
    with contextlib.suppress(OSError):  # a folder that contains other files stays
        target.parent.rmdir()
    return path


def _split_block(content: str) -> tuple[str, int, str | None]:
    """Return the text without our block, the block's position, and its note; None if there is no block."""
    block = _BLOCK.search(content)
    if block is None:
        return content, len(content), None
    note = block["note"] or ""
    before, after = content[: block.start()], content[block.end() :]
    if note == _OPEN_LINE_NOTE and not after:
        before = before.removesuffix("\n")
    return before + after, len(before), note


def _read(path: Path) -> str:
    with plugin.explained(path, "read"):
        return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""


def _write(path: Path, content: str) -> None:
    """Write the file that a link leads to, and keep its permissions."""
    target = path.resolve()
    with plugin.explained(path, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode if target.exists() else 0o644
        if not mode & 0o200:  # replacing the file would ignore that it is read-only
            raise LocalspecError(f"{path} cannot be written: it is read-only.")
        write_atomically(target, content.encode("utf-8", "surrogateescape"))
        target.chmod(mode)
