"""A proposed command: shown exactly as it would run, and then explained, edited, run or dropped by a key."""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from localspec.cli.shell import answers
from localspec.cli.shell.shells import Shell
from localspec.cli.terminal import render
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

CANCELLED = 130


def at_terminal() -> bool:
    """Whether a person sees what is shown and types what is read, and the command gets the same."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(each is not None and each.isatty() for each in streams)


def checked(command: str) -> str:
    """`command`, when all of it can be seen.

    Raises:
        LocalspecError: a character of it would show nothing, something else, or command the terminal.
    """
    if char := answers.unseen(command):
        shown = "".join(f"<U+{ord(c):04X}>" if answers.unseen(c) else c for c in command)
        raise LocalspecError(
            f"The command contains an invisible character (U+{ord(char):04X}) and was refused: "
            f"{shown}"
        )
    return command


def settle(command: str, shell: Shell, explain: Callable[[str], object]) -> int:
    """Ask the person at the terminal what becomes of `command`; does not return when it is run.

    Raises:
        LocalspecError: it was edited into one that cannot be seen whole.
    """
    while True:
        match _key(partial(_show, command, shell)):
            case "\r" | "\n":
                _run(command, shell)
            case "e":
                edited = _edited(command)
                if edited is None:
                    break
                command = checked(edited)
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
    """The command begins and ends its lines, so that it can be copied; the terminal breaks it."""
    render.verbatim(command)
    lines = command.count("\n") + 1
    what = f"all {lines} lines" if lines > 1 else "it"
    render.dim(
        f"Enter runs {what} in {shell.language}, e edits, x explains, any other key cancels."
    )


def _key(show: Callable[[], None]) -> str:
    """What one key sends after `show`. What was typed before is dropped: it was meant for something else."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSAFLUSH)
        show()
        return os.read(keyboard, 1024).decode(errors="replace")
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def _edited(command: str) -> str | None:
    """What a person made of it; None if they left by Ctrl-C, Ctrl-D, or with nothing."""
    from prompt_toolkit import PromptSession

    render.dim("Enter runs it, Alt-Enter adds a line, Ctrl-C cancels.")
    session: PromptSession[str] = PromptSession(
        multiline=True, key_bindings=_keys(), enable_open_in_editor=True
    )
    try:
        return session.prompt("", default=command).strip("\n") or None
    except (KeyboardInterrupt, EOFError):
        return None


def _keys() -> KeyBindings:
    """As in a chat: Enter ends, Alt-Enter begins a line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _run(command: str, shell: Shell) -> NoReturn:
    """Become the shell that runs it: its exit code, its signals and its terminal are its own.

    Raises:
        LocalspecError: there is no such shell.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # Python ignores it, and the shell would inherit that
    try:
        os.execv(shell.program, [shell.language, "-c", command])
    except (OSError, ValueError) as error:
        raise LocalspecError(f"{shell.program} cannot be run: {error}.") from error
