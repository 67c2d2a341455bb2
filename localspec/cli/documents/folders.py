"""The text files in a folder, and what is left out of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import size
from localspec.errors import UsageError

# What is larger is rather data, and more than this in all no context holds.
_HUGE, _MOST = 256 << 10, 4 << 20  # bytes
_PATIENCE = 60.0  # seconds for git
# Made from other files; where git is asked it knows better.
_DERIVED = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}


def files(folder: str) -> list[str]:
    """The text files in it and below, but for what git ignores, hidden and huge ones; said on stderr.

    Raises:
        UsageError: there are none, or more than any context holds.
    """
    files: list[str] = []
    left: dict[str, list[str]] = {}
    total = 0
    for name in _known_to_git(folder) or _walked(folder):
        path = Path(folder, name)
        if any(part.startswith(".") for part in Path(name).parts):
            left.setdefault("hidden", []).append(name)
        elif not path.is_file():  # a link into nowhere, a pipe; of git's also a deleted one
            continue
        elif (length := path.stat().st_size) > _HUGE:
            left.setdefault(f"over {size(_HUGE)}", []).append(name)
        elif not _is_text(path):
            left.setdefault("not text", []).append(name)
        else:
            files.append(str(path))
            total += length
        if total > _MOST:
            raise UsageError(
                f"{folder} has more than {size(_MOST)} of text. Choose files with a quoted pattern, for "
                f"example: -f '{folder.rstrip('/')}/**/*.py'"
            )
    without = "; ".join(f"{len(each)} {why} ({_some(each)})" for why, each in left.items())
    if not files:
        raise UsageError(f"{folder} has no text files{f'; left out: {without}' if left else ''}.")
    count = f"{len(files)} file{'s' * (len(files) > 1)}, {size(total)}"
    render.note(f"{folder}: {count}{f'; left out: {without}' if left else ''}.")
    return files


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _known_to_git(folder: str) -> list[str] | None:
    """Tracked and new files, without ignored ones; None where there is no git or no repository."""
    # A repository may name a program that watches its files: whoever made it may be anyone.
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})


def _walked(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _DERIVED)
        yield from (os.path.relpath(Path(parent, name), folder) for name in sorted(names))


def _is_text(path: Path) -> bool:
    try:
        data = path.read_bytes()
        data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return b"\0" not in data or data.startswith((b"\xff\xfe", b"\xfe\xff"))
