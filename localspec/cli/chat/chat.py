"""The loop of `localspec chat`: read a line, send it, and continue after errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec import paths
from localspec.cli import base_models, inputs
from localspec.cli.chat import slash
from localspec.cli.chat.slash import Chat, is_complete, parse_line
from localspec.cli.chat.talk import Conversation
from localspec.cli.options import SETTABLE, AskOptions
from localspec.cli.templates import Template
from localspec.cli.terminal import render
from localspec.errors import ContextExceeded, LocalspecError, TemplateFailed, UsageError

if TYPE_CHECKING:
    import asyncio

    from prompt_toolkit import PromptSession
    from prompt_toolkit.buffer import Buffer
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

# A message that is being typed is read ahead after a pause of its writer, once so much of it is new.
_PAUSE_S = 0.6
_MIN_NEW_CHARS = 40


def run(options: AskOptions) -> int:
    """Chat until Ctrl-D or /exit.

    Raises UsageError if stdin or stdout is no terminal, or a file or template cannot be used, and
    LocalspecError if the conversation to continue does not exist.
    """
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError("A chat needs a terminal; in a pipe, use: localspec ask")
    options = inputs.resolve_query(options)
    template = Template(options) if options.template is not None else None
    if template is None and options.values:
        raise UsageError("-p gives a value to a template's parameter; add -t TEMPLATE.")
    options = options if template is None else template.options
    chat = Chat(Conversation(options.changed()), template)
    if options.model:
        base_models.require_chat(chat.talk.client, inputs.resolve_pair(options.model))
    if options.files:
        slash.attach(chat, options.files)
    session = _make_session(chat)
    if chat.talk.messages:
        turns = len(chat.talk.questions)
        render.dim(f"Continuing after {turns} question{'s' * (turns != 1)}.")
    render.dim("/help lists the commands, Ctrl-D exits.")
    while not chat.ended:
        default, chat.next_input = chat.next_input, ""
        try:
            line = session.prompt("› ", default=default)
        except KeyboardInterrupt:
            continue  # Ctrl-C empties the line, as in a shell
        except EOFError:
            break
        _handle_line(chat, line)
    if options.no_log:
        chat.talk.client.forget_private()
    return 0


def _handle_line(chat: Chat, line: str) -> None:
    """Handle one line that a person typed. Errors are printed, and the chat continues."""
    kind, text = parse_line(line)
    try:
        if kind == "command":
            slash.run(chat, text)
        elif kind == "leave":
            chat.ended = True
        elif text:
            chat.say(text)
        if not chat.ended and chat.talk.last:  # the line at the bottom shows the pair's context
            chat.talk.context = chat.talk.client.status()["pair"].get("n_ctx") or 0
    except KeyboardInterrupt:
        render.dim("Stopped.")
    except TemplateFailed as error:
        talk = chat.talk
        render.error(
            base_models.explain_error(talk.client, talk.options.model or "", error).message
        )
    except ContextExceeded as error:
        render.error(inputs.describe_chat_too_long(error, chat.talk.client))
    except LocalspecError as error:
        render.error(error.message)
    except OSError as error:
        render.error(f"{error.filename or ''}: {error.strerror or error}.".removeprefix(": "))


class _DraftReader:
    """Has a message that is being typed read after each pause, once enough of it is new."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._timer: asyncio.TimerHandle | None = None
        self._read = 0, ""  # what was read, and behind how many messages

    def note_change(self, buffer: Buffer) -> None:
        """Wait for a pause; called in the terminal's loop for each change of the text."""
        import asyncio

        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(RuntimeError):  # the text was changed before the loop runs
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_PAUSE_S, self._read_ahead, buffer)

    def _read_ahead(self, buffer: Buffer) -> None:
        talk, (kind, text) = self._chat.talk, parse_line(buffer.text)
        begun = "\n\n".join([*self._chat.attached, text])
        turn, known = self._read
        is_more = turn == len(talk.messages) and begun.startswith(known)
        if kind == "message" and len(begun) - len(known) * is_more >= _MIN_NEW_CHARS:
            self._read = len(talk.messages), begun
            talk.read_ahead(begun)


def _make_session(chat: Chat) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    history: History = InMemoryHistory()
    if not chat.talk.is_unsaved:
        history = _open_typed_lines(paths.default_paths().typed_lines)
    session: PromptSession[str] = PromptSession(
        history=history,
        multiline=True,  # our key binding for Enter decides
        key_bindings=make_key_bindings(is_complete),
        completer=_make_completer(chat.talk),
        complete_while_typing=False,
        bottom_toolbar=lambda: render.harmless(chat.talk.state(), lines=False),
        prompt_continuation="  ",
        enable_open_in_editor=True,
    )
    session.default_buffer.on_text_changed += _DraftReader(chat).note_change
    return session


def _open_typed_lines(file: Path) -> History:
    """Return the lines that were typed in earlier chats.

    The daemon removes lines from this file when their conversation is removed from the history.
    """
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Private(FileHistory):
        """A history file that only its owner can read.

        `history rm --all` may delete it during a chat, and then it is created again with this mode.
        """

        was_reported = False

        def store_string(self, string: str) -> None:
            try:
                file.touch(mode=0o600)
                super().store_string(string)
            except OSError as error:  # a full disk must not end a chat
                if not self.was_reported:
                    message = f"Input history is not saved: {file}: {error.strerror}."
                    run_in_terminal(lambda: render.error(message))
                self.was_reported = True

    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(paths.open_file(file, os.O_RDWR | os.O_CREAT))
    except OSError as error:
        render.error(f"Input history is not saved: {file} cannot be opened ({error.strerror}).")
        return InMemoryHistory()
    return Private(str(file))


def make_key_bindings(is_complete: Callable[[str], bool]) -> KeyBindings:
    """Return the keys of what is typed: Enter ends it once it is complete, Alt-Enter begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # Enter accepts the selected completion
        elif is_complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _make_completer(talk: Conversation) -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class Commands(Completer):
        """Completes commands, and the files and pairs that are their arguments."""

        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterator[Completion]:
            line = document.text_before_cursor
            if not line.startswith("/") or "\n" in line:
                return
            name, space, argument = line.partition(" ")
            name = slash.ALIASES.get(name, name) if space else name
            words: list[tuple[str, str]] = []
            typed = argument if space else name
            if not space:
                words = [(command, entry.help) for command, entry in slash.COMMANDS.items()]
            elif name in ("/file", "/save"):
                path = argument.rpartition(" ")[2] if name == "/file" else argument
                for item in files.get_completions(Document(path), complete_event):
                    if _can_be_shown(item.text):
                        yield item
            elif name == "/pair":
                words = _list_pairs(talk)
            elif name == "/set":
                name, space, value = argument.partition(" ")
                typed = value if space else name
                words = _list_settings(name if space else "")
            for word, meaning in words:
                if word.startswith(typed):
                    yield Completion(word, -len(typed), display_meta=meaning or None)

    return Commands()


def _can_be_shown(text: str) -> bool:
    """Return whether a completion is harmless as it is.

    It becomes the typed text, so it cannot be made harmless first.
    """
    return text == render.harmless(text, lines=False)


def _list_settings(name: str) -> list[tuple[str, str]]:
    """Return the settings with their meanings, or the values of the setting `name`, if they are few."""
    if not name:
        return [(setting.name, setting.help) for setting in SETTABLE.values()]
    if name not in SETTABLE:
        return []
    return [(word, "") for word in (("on", "off") if SETTABLE[name].kind is bool else ("default",))]


def _list_pairs(talk: Conversation) -> list[tuple[str, str]]:
    try:
        return [(name, "") for name in slash.pair_names(talk) if _can_be_shown(name)]
    except LocalspecError:
        return []
