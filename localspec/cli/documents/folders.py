"""Find the text files in a folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import size
from localspec.errors import UsageError

_MAX_FILE_BYTES = 256 << 10  # a larger file is probably data
_MAX_TOTAL_BYTES = 4 << 20  # no context holds more
_GIT_TIMEOUT_S = 60.0
# Folders of generated files. They are left out only if git cannot list the files itself.
_GENERATED_FOLDERS = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}


def files(folder: str) -> list[str]:
    """Return the text files in a folder and below it, and summarize them on stderr.

    Files that git ignores, hidden files and very large ones are left out.

    Raises:
        UsageError: there are none, or more than any context holds.
    """
    files: list[str] = []
    omitted: dict[str, list[str]] = {}
    total = 0
    for name in _list_with_git(folder) or _walk(folder):
        path = Path(folder, name)
        if any(part.startswith(".") for part in Path(name).parts):
            omitted.setdefault("hidden", []).append(name)
        elif not path.is_file():  # a broken link, a pipe, or a deleted file that git still lists
            continue
        elif (length := path.stat().st_size) > _MAX_FILE_BYTES:
            omitted.setdefault(f"over {size(_MAX_FILE_BYTES)}", []).append(name)
        elif not _is_text(path):
            omitted.setdefault("not text", []).append(name)
        else:
            files.append(str(path))
            total += length
        if total > _MAX_TOTAL_BYTES:
            raise UsageError(
                f"{folder} has more than {size(_MAX_TOTAL_BYTES)} of text. Choose files with a "
                f"quoted pattern, for example: -f '{folder.rstrip('/')}/**/*.py'"
            )
    omissions = "; ".join(
        f"{len(names)} {reason} ({_list_some(names)})" for reason, names in omitted.items()
    )
    if not files:
        raise UsageError(
            f"{folder} has no text files{f'; left out: {omissions}' if omitted else ''}."
        )
    count = f"{len(files)} file{'s' * (len(files) > 1)}, {size(total)}"
    render.note(f"{folder}: {count}{f'; left out: {omissions}' if omitted else ''}.")
    return files


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _list_with_git(folder: str) -> list[str] | None:
    """Return tracked and new files without ignored ones; None without git or outside a repository."""
    # A repository's configuration may name a program that watches its files. It must not be run,
    # since the repository may come from anyone.
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return sorted({os.fsdecode(name) for name in result.stdout.split(b"\0") if name})


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _GENERATED_FOLDERS
        )
        yield from (os.path.relpath(Path(parent, name), folder) for name in sorted(names))


def _is_text(path: Path) -> bool:
    try:
        data = path.read_bytes()
        data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return b"\0" not in data or data.startswith((b"\xff\xfe", b"\xfe\xff"))
