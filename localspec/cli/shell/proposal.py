"""Show a proposed command exactly as it would run, then explain, edit, run or drop it by a key."""

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

CANCELLED = 130  # exit code, as after Ctrl-C


def at_terminal() -> bool:
    """Return whether all three streams are terminals.

    Only then a person sees and answers, and the command that runs gets the same terminal.
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams)


def require_visible(command: str) -> str:
    """Return the command if all of its characters are visible.

    Raises:
        LocalspecError: a character would be invisible, look different, or control the terminal.
    """
    if unseen_char := answers.find_invisible(command):
        escaped = "".join(
            f"<U+{ord(char):04X}>" if answers.find_invisible(char) else char for char in command
        )
        raise LocalspecError(
            f"The command contains an invisible character (U+{ord(unseen_char):04X}) and was refused: "
            f"{escaped}"
        )
    return command


def decide(command: str, shell: Shell, explain: Callable[[str], object]) -> int:
    """Let the person at the terminal decide what happens to `command`.

    Returns the exit code if it is not run. If it is run, this process becomes the shell and does not return.

    Raises:
        LocalspecError: it was edited into a command that is not completely visible.
    """
    while True:
        match _read_key(partial(_show, command, shell)):
            case "\r" | "\n":
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
    lines = command.count("\n") + 1
    subject = f"all {lines} lines" if lines > 1 else "it"
    render.dim(
        f"Enter runs {subject} in {shell.language}, e edits, x explains, any other key cancels."
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
    """Let a person edit the command. Returns None after Ctrl-C, Ctrl-D, or an empty result."""
    from prompt_toolkit import PromptSession

    render.dim("Enter runs it, Alt-Enter adds a line, Ctrl-C cancels.")
    session: PromptSession[str] = PromptSession(
        multiline=True, key_bindings=_make_key_bindings(), enable_open_in_editor=True
    )
    try:
        return session.prompt("", default=command).strip("\n") or None
    except (KeyboardInterrupt, EOFError):
        return None


def _make_key_bindings() -> KeyBindings:
    """Return the same keys as in a chat: Enter ends, Alt-Enter begins a new line."""
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
    """Replace this process by the shell that runs the command, with its exit code and terminal.

    Raises:
        LocalspecError: there is no such shell.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores SIGPIPE, and the shell would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(shell.program, [shell.language, "-c", command])
    except (OSError, ValueError) as error:
        raise LocalspecError(f"{shell.program} cannot be run: {error}.") from error
