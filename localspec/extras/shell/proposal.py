"""Show a proposed command exactly as it would run, then explain, edit, run or drop it by a key.

It runs in the shell in which it was asked for, which is among the ancestors of this process.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from localspec.cli.terminal import render
from localspec.errors import LocalspecError
from localspec.extras.shell import asking

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
        parent, command = _run_ps("ppid=,comm=", pid).split(None, 1)
        return Process(pid, int(parent), Path(command.strip()).name.lstrip("-"))
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def _run_ps(columns: str, pid: int) -> str:
    command = ["ps", "-o", columns, "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_arguments(process: Process) -> str:
    """Return the command line of a process, with a blank between its words; empty if it is unknown."""
    try:
        if sys.platform == "linux":
            data = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            return data.decode(errors="replace").replace("\0", " ")
        return _run_ps("args=", process.pid)
    except (OSError, subprocess.CalledProcessError):
        return ""


def current_shell() -> Shell:
    """Return the nearest shell among our ancestors, or else that of $SHELL, or else sh."""
    for process in ancestors():
        if process.name in LANGUAGES:
            return Shell(LANGUAGES[process.name], _find_program(process))
    program = os.environ.get("SHELL", "")
    name = Path(program).name
    return Shell(LANGUAGES[name], program) if name in LANGUAGES else shell_for("sh")


def shell_for(language: str) -> Shell:
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


CANCELLED = 130  # exit code, as after Ctrl-C


def at_terminal() -> bool:
    """Return whether all three streams are terminals.

    Only then a person sees and answers, and the command that runs gets the same terminal.
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams)


def require_visible(command: str) -> str:
    """Return the command if all of its characters are visible.

    Raises LocalspecError if a character would be invisible, look different, or control the terminal.
    """
    if unseen := asking.find_invisible(command):
        shown = (f"<U+{ord(c):04X}>" if asking.find_invisible(c) else c for c in command)
        raise LocalspecError(
            f"The command contains an invisible character (U+{ord(unseen):04X}) and was refused: "
            f"{''.join(shown)}"
        )
    return command


# Commands that delete or overwrite, each with what it does. Nothing here makes other commands safe: it only
# asks for more than a key that was pressed by habit.
_NAMED = r"(?<![\w.$-])(?:/\S*/)?(?:%s)(?![\w.-])"  # a program, with or without its folder
_DESTRUCTIVE = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (_NAMED % "rm|unlink|shred", "deletes files"),
        (r"\s--?delete\b", "deletes files"),
        (_NAMED % "truncate", "empties files"),
        (_NAMED % r"dd|mkfs(?:\.\w+)?|mkswap|wipefs|[sc]?fdisk|sgdisk|parted", "overwrites a disk"),
        (r">\|?\s*/dev/(?!null|zero|std|tty|fd|pts|shm)", "overwrites a device"),
        (r"\btee\b[^|;&]*\s/dev/(?!null|std|tty|fd|pts|shm)", "overwrites a device"),
        (r"\bgit\b[^|;&]*\s(?:clean|reset\b[^|;&]*\s--hard)\b", "discards changes"),
        (r"\bgit\b[^|;&]*\s(?:checkout|restore)\b[^|;&]*\s(?:--|\.|:/)", "discards changes"),
        (r"\bgit\b[^|;&]*\sstash\s+(?:drop|clear)\b", "discards changes"),
        (
            r"\bgit\b[^|;&]*\spush\b[^|;&]*\s(?:-\w*f|--force|--mirror|--delete)",
            "rewrites a remote",
        ),
        (
            _NAMED % "chmod|chown|chgrp" + r"[^|;&]*\s(?:-\w*R|--recursive)",
            "changes all files below",
        ),
        (
            r"\b(?:curl|wget)\b.*?\|\s*(?:(?:sudo|env)\s+(?:-\S+\s+|\w+=\S*\s+)*)?"
            r"(?:/\S*/)?(?:\w{0,2}sh|python3?|perl|ruby|node)(?![\w.-])",
            "runs what it downloads",
        ),
        (r"(?:sh|eval|source|\.)\s[^|;&]*[<$`]\(?\s*(?:curl|wget)\b", "runs what it downloads"),
    )
)


def find_danger(command: str) -> str:
    """Return what a command destroys, as "deletes files", or an empty string."""
    joined = command.replace("\\\n", " ")
    return next((what for pattern, what in _DESTRUCTIVE if pattern.search(joined)), "")


def decide(command: str, shell: Shell, explain: Callable[[str], object]) -> int:
    """Let the person at the terminal decide what happens to `command`.

    Returns the exit code if it is not run. If it is run, this process becomes the shell and does not return.
    Raises LocalspecError if it was edited into a command that is not completely visible.
    """
    while True:
        match _read_key(partial(_show, command, shell)):
            case "\r" | "\n" if not find_danger(command):
                _run(command, shell)
            case "y" if find_danger(command):
                _run(command, shell)
            case "e":
                edited = _edit(command)
                if edited is None:
                    break
                command = require_visible(edited)
                _run(command, shell)
            case "x" | "?":
                render.line("")
                explain(command)
                render.line("")
            case _:
                break
    render.note("Cancelled; nothing was run.")
    return CANCELLED


def _show(command: str, shell: Shell) -> None:
    """Print the command on lines of its own, so that it can be copied. The terminal breaks the lines."""
    render.verbatim(command)
    lines, danger = command.count("\n") + 1, find_danger(command)
    subject = f"all {lines} lines" if lines > 1 else "it"
    if danger:
        render.note(f"Careful: it {danger}.")
    key = "y" if danger else "Enter"
    render.dim(
        f"{key} runs {subject} in {shell.language}, e edits, x explains, any other key cancels."
    )


def _read_key(show: Callable[[], None]) -> str:
    """Call `show` and return what one key sends after that.

    Earlier input is dropped, because it was not meant as an answer.
    """
    keyboard = sys.stdin.fileno()
    old_settings = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSAFLUSH)
        show()
        return os.read(keyboard, 1024).decode(errors="replace")
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, old_settings)


def _edit(command: str) -> str | None:
    """Let a person edit the command. Returns None after Ctrl-D, or an empty result."""
    from prompt_toolkit import PromptSession

    from localspec.cli.chat.chat import make_key_bindings

    render.dim("Enter runs it, Alt-Enter adds a line, Ctrl-C cancels.")
    session: PromptSession[str] = PromptSession(
        multiline=True, key_bindings=make_key_bindings(lambda _: True), enable_open_in_editor=True
    )
    try:
        return session.prompt("", default=command).strip("\n") or None
    except EOFError:
        return None


def _run(command: str, shell: Shell) -> NoReturn:
    """Replace this process by the shell that runs the command, with its exit code and terminal.

    Raises LocalspecError if there is no such shell.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores SIGPIPE, and the shell would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(shell.program, [shell.language, "-c", command])
    except (OSError, ValueError) as error:
        raise LocalspecError(f"{shell.program} cannot be run: {error}.") from error
