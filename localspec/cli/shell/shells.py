"""Which shell a command was typed in, found among the processes that led here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What a shell's program is called → the language it speaks.
LANGUAGES = {
    **{name: name for name in ("bash", "zsh", "fish", "sh")},
    **dict.fromkeys(("dash", "ash", "ksh", "mksh"), "sh"),
}
_FAR = 32  # processes; nobody sits deeper


class Process(NamedTuple):
    pid: int
    parent: int
    name: str


class Shell(NamedTuple):
    """`language`: bash, zsh, fish or sh; `program`: the file to run it with."""

    language: str
    program: str


def ancestors() -> Iterator[Process]:
    """Our parent, its parent and so on, as far as we may look."""
    pid = os.getppid()
    for _ in range(_FAR):
        if pid <= 1 or (found := _process(pid)) is None:
            return
        yield found
        pid = found.parent


def _process(pid: int) -> Process | None:
    try:
        if sys.platform == "linux":
            before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            return Process(pid, int(after.split()[1]), before.partition("(")[2].lstrip("-"))
        asked = ["ps", "-o", "ppid=,comm=", "-p", str(pid)]
        shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(
            None, 1
        )
        return Process(pid, int(shown[0]), Path(shown[1].strip()).name.lstrip("-"))
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def current() -> Shell:
    """The nearest shell among our ancestors, else $SHELL, else sh."""
    for each in ancestors():
        if each.name in LANGUAGES:
            return Shell(LANGUAGES[each.name], _program(each))
    program = os.environ.get("SHELL", "")
    name = Path(program).name
    return Shell(LANGUAGES[name], program) if name in LANGUAGES else named("sh")


def named(language: str) -> Shell:
    return Shell(language, shutil.which(language) or f"/bin/{language}")


def _program(process: Process) -> str:
    """The file that runs it. One program may have many names (busybox), which we do not call by its own."""
    try:
        program = Path(f"/proc/{process.pid}/exe").readlink()
    except OSError:
        program = Path()
    if program.name == process.name:
        return str(program)
    return shutil.which(process.name) or named(LANGUAGES[process.name]).program


def system() -> str:
    """What to call this system in a prompt, as in "Debian GNU/Linux 12"."""
    import platform

    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
