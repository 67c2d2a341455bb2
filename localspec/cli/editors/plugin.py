"""The one file that makes Vim or Neovim load the plug-in: it leads to the package, which stays where it is.

So an upgrade of localspec is one of the plug-in, and uninstalling leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import localspec
from localspec import literals
from localspec.errors import LocalspecError
from localspec.files import write_whole

EDITORS = ("vim", "nvim")
_FIRST = '" Written by `localspec editor install'
_PLACE = Path("pack", "localspec", "start", "localspec", "plugin", "localspec.vim")
_TEXT = """\
{first} {editor}`; `localspec editor uninstall {editor}` removes it.
if isdirectory({folder})
  let g:localspec_command = get(g:, 'localspec_command', [{command}])
  let &runtimepath ..= ',' .. escape({folder}, '\\,')
  execute 'source' fnameescape({folder} .. '/plugin/localspec.vim')
endif
"""


def file(editor: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the editor looks for it, of this user."""
    home = Path.home()
    if editor == "nvim":
        data = _absolute(environ.get("XDG_DATA_HOME")) or home / ".local" / "share"
        return data / (environ.get("NVIM_APPNAME") or "nvim") / "site" / _PLACE
    xdg = (_absolute(environ.get("XDG_CONFIG_HOME")) or home / ".config") / "vim"
    own = (home / ".vim", home / ".vimrc")
    # Vim 9.1 reads ~/.config/vim where neither of the older places is there.
    folder = xdg if xdg.is_dir() and not any(each.exists() for each in own) else home / ".vim"
    return folder / _PLACE


def _absolute(path: str | None) -> Path | None:
    return Path(path) if path and path.startswith("/") else None


def text(editor: str) -> str:
    """What is written there."""
    folder = Path(localspec.__file__).resolve().parent / "editors"
    command = [sys.executable, "-P", "-m", "localspec"]
    return _TEXT.format(
        first=_FIRST,
        editor=editor,
        folder=literals.vim(str(folder)),
        command=", ".join(map(literals.vim, command)),
    )


def install(editor: str) -> Path:
    """Write it, over an older one of ours.

    Raises:
        LocalspecError: another file is there, or it cannot be written.
    """
    path = file(editor)
    _require_ours(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text(editor).encode())
    except OSError as error:
        raise LocalspecError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def uninstall(editor: str) -> Path | None:
    """Remove it, and the folders that it leaves empty; None when there is none.

    Raises:
        LocalspecError: another file is there, or it cannot be removed.
    """
    path = file(editor)
    if not path.exists():
        return None
    _require_ours(path)
    try:
        path.unlink()
    except OSError as error:
        raise LocalspecError(f"{path} cannot be removed: {error.strerror}.") from error
    with contextlib.suppress(OSError):  # somebody keeps something there
        for folder in path.parents[: len(_PLACE.parts)]:
            folder.rmdir()
    return path


def _require_ours(path: Path) -> None:
    try:
        found = path.read_text(encoding="utf-8", errors="replace") if path.exists() else _FIRST
    except OSError as error:
        raise LocalspecError(f"{path} cannot be read: {error.strerror}.") from error
    if not found.startswith(_FIRST):
        raise LocalspecError(
            f"{path} was not written by localspec and is left as it is; move it away and try again."
        )
