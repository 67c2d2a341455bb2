"""Find the shell in which a command was typed, among the ancestors of this process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Name of a shell's program → name of its language.
LANGUAGES = {
    **{name: name for name in ("bash", "zsh", "fish", "sh")},
    **dict.fromkeys(("dash", "ash", "ksh", "mksh"), "sh"),
}
_MAX_ANCESTORS = 32  # a limit, which no real chain of processes reaches


class Process(NamedTuple):
    """A process, with the id of its parent and the name of its program."""

    pid: int
    parent: int
    name: str


class Shell(NamedTuple):
    """A shell. `language` is bash, zsh, fish or sh, and `program` is the file to run."""

    language: str
    program: str


def ancestors() -> Iterator[Process]:
    """Yield our parent, its parent and so on, as far as the system lets us read them."""
    pid = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        if pid <= 1 or (process := _read_process(pid)) is None:
            return
        yield process
        pid = process.parent


def _read_process(pid: int) -> Process | None:
    try:
        if sys.platform == "linux":
            head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            return Process(pid, int(tail.split()[1]), head.partition("(")[2].lstrip("-"))
        command = ["ps", "-o", "ppid=,comm=", "-p", str(pid)]
        fields = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            None, 1
        )
        return Process(pid, int(fields[0]), Path(fields[1].strip()).name.lstrip("-"))
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def current_shell() -> Shell:
    """Return the nearest shell among our ancestors, or else that of $SHELL, or else sh."""
    for process in ancestors():
        if process.name in LANGUAGES:
            return Shell(LANGUAGES[process.name], _find_program(process))
    program = os.environ.get("SHELL", "")
    name = Path(program).name
    return Shell(LANGUAGES[name], program) if name in LANGUAGES else shell_for("sh")


def shell_for(language: str) -> Shell:
    """Return the shell of a language."""
    return Shell(language, shutil.which(language) or f"/bin/{language}")


def _find_program(process: Process) -> str:
    """Return the file of a shell's process.

    If one program has many names (busybox), the file is looked up by the name of the process.
    """
    try:
        program = Path(f"/proc/{process.pid}/exe").readlink()
    except OSError:
        program = Path()
    if program.name == process.name:
        return str(program)
    return shutil.which(process.name) or shell_for(LANGUAGES[process.name]).program


def system() -> str:
    """Return the name of this operating system for a prompt, such as "Debian GNU/Linux 12"."""
    import platform

    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
