"""Write the one file that makes Vim or Neovim load the plug-in from the installed package.

Upgrading localspec thus upgrades the plug-in, and uninstalling it leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from localspec import literals
from localspec.errors import LocalspecError
from localspec.files import write_atomically

EDITORS = ("vim", "nvim")
_FIRST_LINE = '" Written by `localspec editor install'
_RELATIVE_PATH = Path("pack", "localspec", "start", "localspec", "plugin", "localspec.vim")
_TEMPLATE = """\
{first} {editor}`; `localspec editor uninstall {editor}` removes it.
if isdirectory({folder})
  let g:localspec_command = get(g:, 'localspec_command', [{command}])
  let &runtimepath ..= ',' .. escape({folder}, '\\,')
  execute 'source' fnameescape({folder} .. '/plugin/localspec.vim')
endif
"""


def file(editor: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the editor of this user looks for the file."""
    home = Path.home()
    if editor == "nvim":
        data = _parse_absolute(environ.get("XDG_DATA_HOME")) or home / ".local" / "share"
        return data / (environ.get("NVIM_APPNAME") or "nvim") / "site" / _RELATIVE_PATH
    xdg = (_parse_absolute(environ.get("XDG_CONFIG_HOME")) or home / ".config") / "vim"
    # Vim 9.1 reads ~/.config/vim if neither of the older places exists.
    has_older = (home / ".vim").exists() or (home / ".vimrc").exists()
    return (xdg if xdg.is_dir() and not has_older else home / ".vim") / _RELATIVE_PATH


def _parse_absolute(path: str | None) -> Path | None:
    return Path(path) if path and path.startswith("/") else None


def text(editor: str) -> str:
    """Return the content of the file."""
    command = [sys.executable, "-P", "-m", "localspec"]
    return _TEMPLATE.format(
        first=_FIRST_LINE,
        editor=editor,
        folder=literals.vim(str(Path(__file__).resolve().parent / "vim")),
        command=", ".join(map(literals.vim, command)),
    )


def install(editor: str) -> Path:
    """Write the file, also over an older one of ours.

    Raises LocalspecError if another file is in its place, or it cannot be written.
    """
    path = file(editor)
    _require_ours(path)
    with explained(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text(editor).encode())
    return path


@contextlib.contextmanager
def explained(path: Path, verb: str) -> Iterator[None]:
    """Raise LocalspecError in place of an OSError, as in "init.el cannot be written: Permission denied."."""
    try:
        yield
    except OSError as error:
        raise LocalspecError(f"{path} cannot be {verb}: {error.strerror}.") from error


def uninstall(editor: str) -> Path | None:
    """Remove the file and the folders that become empty; return None if there is no file.

    Raises LocalspecError if another file is in its place, or it cannot be removed.
    """
    path = file(editor)
    if not path.exists():
        return None
    _require_ours(path)
    with explained(path, "removed"):
        path.unlink()
    with contextlib.suppress(OSError):  # a folder that contains other files stays
        for folder in path.parents[: len(_RELATIVE_PATH.parts)]:
            folder.rmdir()
    return path


def _require_ours(path: Path) -> None:
    with explained(path, "read"):
        is_ours = not path.exists() or path.read_text("utf-8", "replace").startswith(_FIRST_LINE)
    if not is_ours:
        raise LocalspecError(
            f"{path} was not written by localspec and is left as it is; move it away and try again."
        )
