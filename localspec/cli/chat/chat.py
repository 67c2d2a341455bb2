"""`localspec chat`: reading lines, asking, and going on whatever happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec import paths
from localspec.cli.chat import slash
from localspec.cli.chat.slash import Chat
from localspec.cli.chat.talk import Talk
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_QUOTES = '"""'


def run(options: dict[str, Any]) -> int:
    """Talk until Ctrl-D or /exit.

    Raises:
        UsageError: stdin or stdout is no terminal.
        LocalspecError: the conversation to go on with is not there.
    """
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError("A chat needs a terminal; in a pipe: localspec ask")
    chat = Chat(Talk(options))
    session = _session(chat)
    _greet(chat)
    while not chat.ended:
        try:
            line = session.prompt("› ")
        except KeyboardInterrupt:
            continue  # Ctrl-C empties the line, as in a shell
        except EOFError:
            break
        _turn(chat, unquoted(line))
    return 0


def _greet(chat: Chat) -> None:
    if chat.talk.messages:
        turns = len(chat.talk.messages) // 2
        render.dim(f"Going on after {turns} question{'s' * (turns != 1)}.")
    render.dim("/help lists the commands, Ctrl-D ends.")


def _turn(chat: Chat, text: str) -> None:
    """One line of the person: a command, or a question and its answer."""
    try:
        question: str | None = text
        if text.startswith("/"):
            question = slash.run(chat, text)
        if question and question.strip():
            chat.talk.say(chat.question(question), question)
            render.line("")
            _look(chat.talk)
    except KeyboardInterrupt:
        render.dim("Stopped; what came is part of the conversation.")
    except LocalspecError as error:
        render.error(error.message)


def _look(talk: Talk) -> None:
    """How large the context is: for the line at the bottom."""
    pair = talk.client.status()["pair"]
    talk.context = pair.get("n_ctx") or 0


def unquoted(text: str) -> str:
    """Without the three quotes around several lines."""
    text = text.strip()
    if text.startswith(_QUOTES):
        return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text


def complete(text: str) -> bool:
    """Whether Enter ends the input: not within three quotes."""
    text = text.strip()
    return not text.startswith(_QUOTES) or (len(text) >= 6 and text.endswith(_QUOTES))


# ---------------------------------------------------------------------------- prompt_toolkit


def _session(chat: Chat) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    history: History = InMemoryHistory()
    if not chat.talk.keeps_nothing:
        history = _typed_lines(paths.default_paths().typed_lines)
    return PromptSession(
        history=history,
        multiline=True,  # our Enter decides
        key_bindings=_keys(),
        completer=_completer(chat.talk),
        complete_while_typing=False,
        bottom_toolbar=lambda: render.harmless(chat.talk.state(), lines=False),
        prompt_continuation="  ",
        enable_open_in_editor=True,
    )


def _typed_lines(file: Path) -> History:
    """What was typed in earlier chats. The daemon removes what is removed from the history."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Private(FileHistory):
        """Made anew for its owner alone when `history rm --all` has deleted it meanwhile."""

        def store_string(self, string: str) -> None:
            file.touch(mode=0o600)
            super().store_string(string)

    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(paths.open_file(file, os.O_RDWR | os.O_CREAT))
    except OSError as error:
        render.error(f"What you type is not kept: {file} cannot be opened ({error.strerror}).")
        return InMemoryHistory()
    return Private(str(file))


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # Enter takes the completion that is shown
        elif complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _completer(talk: Talk) -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class Commands(Completer):
        """Commands, their files, their pairs."""

        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterator[Completion]:
            line = document.text_before_cursor
            if not line.startswith("/") or "\n" in line:
                return
            name, blank, argument = line.partition(" ")
            if not blank:
                for command, each in slash.COMMANDS.items():
                    if command.startswith(name):
                        yield Completion(command, -len(name), display_meta=each.help)
            elif name in ("/file", "/save"):
                found = files.get_completions(Document(argument), complete_event)
                yield from (each for each in found if _can_be_shown(each.text))
            elif name == "/pair":
                yield from _pairs(talk, argument)

    return Commands()


def _can_be_shown(text: str) -> bool:
    """A completion becomes what is typed, so it cannot be made harmless first."""
    return text == render.harmless(text, lines=False)


def _pairs(talk: Talk, beginning: str) -> Iterator[Completion]:
    from prompt_toolkit.completion import Completion

    try:
        names = slash.pair_names(talk)
    except LocalspecError:
        return
    for name in names:
        if name.startswith(beginning) and _can_be_shown(name):
            yield Completion(name, -len(beginning))
