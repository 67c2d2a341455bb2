"""The commands of a chat, which begin with a slash. Every command is one small function."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from localspec.cli import inputs, options
from localspec.cli.chat.talk import Conversation
from localspec.cli.command_names import closest
from localspec.cli.templates import Template
from localspec.cli.terminal import clipboard, extract, figures, history, render
from localspec.client.pairs import PairsClient
from localspec.errors import NotFound, UsageError
from localspec.files import format_size
from localspec.paths import expand_user, split_model_names

_QUOTES = '"""'
_COMMAND = re.compile(r"/[a-zA-Z?]*(?!\S)")  # but not a path
_EXIT_WORDS = ("exit", "quit")

Kind = Literal["message", "command", "leave"]


def parse_line(line: str) -> tuple[Kind, str]:
    """Return the kind of a line, and its text.

    A line that begins with a space is always a message. Otherwise a word after a slash is a command, three
    quotes enclose a message of several lines, and `exit` or `quit` alone ends the chat.
    """
    text = line.strip()
    if not line[:1].isspace():
        if text in _EXIT_WORDS:
            return "leave", ""
        if _COMMAND.match(text):
            return "command", text
        if text.startswith(_QUOTES):
            return "message", text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
    return "message", text


def is_complete(line: str) -> bool:
    """Return whether Enter ends the input, which it does except within three quotes."""
    text = line.strip()
    quoted = text.startswith(_QUOTES) and not line[:1].isspace()
    return not quoted or (len(text) >= 6 and text.endswith(_QUOTES))


def quote_message(message: str) -> str:
    """Return a line that means this message when it is typed."""
    message = message.strip()
    plain = parse_line(message) == ("message", message) and is_complete(message)
    return message if plain else f" {message}"


_DEFAULT = "default"
SWITCH = {"on": True, "off": False, "true": True, "false": False, "yes": True, "no": False}


class Chat:
    """The state that commands change: the conversation, the attached files and the next input line."""

    def __init__(self, talk: Conversation, template: Template | None = None) -> None:
        """Create the state of a chat. `template` is used for the first question of each conversation."""
        self.talk = talk
        self.attached: list[str] = []
        self.next_input = ""
        self.ended = False
        self._template = template

    def say(self, text: str) -> None:
        """Send the text that a person wrote, after the attached files, which are attached only once.

        Raises LocalspecError if there is nothing to ask, or no answer.
        """
        parts, self.attached = [*self.attached, text], []
        question = "\n\n".join(parts)
        if self._template is not None and not self.talk.messages:
            old_system = self._template.options.system
            question = self._template.question(question)
            # The template's system message names $input, so it depends on the question.
            if self._template.options.system != old_system:
                self.talk.options.system = self._template.options.system
            render.dim(question)
        self.ask(question, text)

    def ask(self, question: str, title: str = "") -> bool:
        """Send the question as it is, and return whether any part of an answer arrived."""
        answered = self.talk.say(question, title)
        render.line("")
        if self.talk.options.usage and self.talk.last.get("timings"):
            figures.statistics(self.talk.last)
        return answered


class SlashCommand(NamedTuple):
    """A command: its function, and its argument and description for the help."""

    run: Callable[[Chat, str], None]
    argument: str
    help: str


def run(chat: Chat, line: str) -> None:
    """Run a line such as "/name argument".

    Raises UsageError if there is no such command, and LocalspecError if the command failed.
    """
    name, argument = (*line.split(None, 1), "")[:2]
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        hint = _suggestion(name, [*COMMANDS, *ALIASES], "/help lists the commands.")
        hint += " To send it as a message, begin with a space."
        raise UsageError(f"Unknown command {name}; {hint}")
    COMMANDS[name].run(chat, argument.strip())


def _suggestion(word: str, known_words: list[str], fallback: str) -> str:
    match = closest(word, known_words)
    return f"did you mean {match}?" if match else fallback


def _help(_: Chat, __: str) -> None:
    commands = [(f"{name} {entry.argument}", entry.help) for name, entry in COMMANDS.items()]
    render.fields([(f"  {name}", meaning) for name, meaning in (*commands, *KEYS)])


def _edit(chat: Chat, argument: str) -> None:
    text = inputs.edit_text(argument, lambda _: "", "", extension=".md")
    if text and text.strip():
        chat.next_input = quote_message(text)
    else:
        render.line("No text was entered.")


def _file(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("Name a file, for example: /file src/main.py")
    # A name with blanks is one file when there is one, else several names.
    is_one_file = os.path.exists(expand_user(argument))  # noqa: PTH110 - also where it is too long
    attach(chat, [argument] if is_one_file else argument.split())


def attach(chat: Chat, names: list[str]) -> None:
    """Attach files to the next question. Raises UsageError if one cannot be read."""
    if "-" in names:
        raise UsageError("In a chat standard input is the keyboard; name a file.")
    text = inputs.read_files(names)
    chat.attached.append(text)
    render.line(f"{format_size(len(text.encode()))} will be included in your next question.")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.talk.options.system = argument
        render.line("Applies from the next question.")
    else:
        render.line(chat.talk.options.system or "No system message is set; /system TEXT sets one.")


def _pair(chat: Chat, argument: str) -> None:
    if ":" not in argument and not any(map(inputs.is_path, split_model_names(argument))):
        listed = _fetch_pairs(chat.talk)
        names = [entry["name"] for entry in listed["pairs"]]
        if not argument:
            used = chat.talk.options.model or listed.get("configured")
            for name in names:
                render.line(f"{'*' if name == used else ' '} {name}")
            return
        if argument not in names:
            installed = ", ".join(names)
            raise UsageError(f"No pair '{argument}' is installed; installed pairs: {installed}.")
    chat.talk.options.model = argument
    render.line(f"Now using {argument}.")


def _fetch_pairs(talk: Conversation) -> dict[str, Any]:
    return PairsClient(talk.client.socket_path, autostart=talk.client.autostart).pairs()


def pair_names(talk: Conversation) -> list[str]:
    return [entry["name"] for entry in _fetch_pairs(talk)["pairs"]]


def _set(chat: Chat, argument: str) -> None:
    """Show or change settings. `/set parameter NAME VALUE`, as in Ollama, is understood too."""
    words = argument.removeprefix("parameter ").split()
    values = chat.talk.options
    if not words:
        rows = [["NAME", "VALUE", "MEANING"]]
        for name, option in options.SETTABLE.items():
            rows.append([name, _format_value(getattr(values, name)), option.help])
        render.table(rows)
        return
    name = words[0].lstrip("-").replace("-", "_").lower()
    name = {"max_tokens": "tokens", "num_predict": "tokens", "pair": "model"}.get(name, name)
    for option in options.SETTABLE.values():
        if any(flag.lstrip("-").replace("-", "_") == name for flag in option.flags):
            name = option.name
    if name in ("model", "system"):
        value = argument.removeprefix("parameter ").strip().removeprefix(words[0]).strip()
        COMMANDS["/pair" if name == "model" else "/system"].run(chat, value)
        return
    if name not in options.SETTABLE:
        suggestion = _suggestion(name, list(options.SETTABLE), "/set alone lists what can be set.")
        raise UsageError(f"'{words[0]}' cannot be set; {suggestion}")
    option = options.SETTABLE[name]
    if len(words) == 1:
        render.line(f"{name} is {_format_value(getattr(values, name))}. {option.help}")
        return
    setattr(values, name, _parse_value(option, " ".join(words[1:])))
    render.line(f"{name} is {_format_value(getattr(values, name))} from the next question.")


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _DEFAULT if value is None else str(value)


def _parse_value(option: options.Option, text: str) -> Any:
    flag = option.kind is bool
    if text == _DEFAULT:
        return False if flag else None
    value = SWITCH.get(text.lower()) if flag else options.parse_value(option, text)
    if value is None:
        kind = {int: "a whole number", float: "a number"}.get(option.kind)
        allowed = "on or off" if flag else f"{kind} {option.limits}, or '{_DEFAULT}'"
        raise UsageError(f"'{option.name}' must be {allowed}, not '{text}'.")
    return value


def _new(chat: Chat, _: str) -> None:
    if chat.talk.messages and not chat.talk.is_unsaved:
        render.line(f"The previous conversation is saved: localspec history show {chat.talk.id}")
    chat.talk.start_new()
    render.line("Started a new conversation.")


def _clear(chat: Chat, argument: str) -> None:
    from prompt_toolkit.shortcuts import clear

    clear()
    _new(chat, argument)


def _history(chat: Chat, _: str) -> None:
    chat.talk.catch_up()
    if not chat.talk.messages:
        render.line("This conversation is empty.")
        return
    history.conversation(chat.talk.as_history_entry(), plain=chat.talk.options.plain)


def _regen(chat: Chat, _: str) -> None:
    """Answer the last question again.

    If no other answer arrives, the question is put into the next input line, because it is removed from the
    conversation first.
    """
    chat.talk.catch_up()
    if not chat.talk.questions:
        raise NotFound("There is no question to answer again.")
    question = chat.talk.undo()
    n_messages = len(chat.talk.messages)
    try:
        chat.ask(question)
    finally:
        if len(chat.talk.messages) == n_messages:
            chat.next_input = quote_message(question)


def _undo(chat: Chat, _: str) -> None:
    first_line = chat.talk.undo().strip().partition("\n")[0]
    render.line(f"Removed: {first_line[:60]}")


def _compact(chat: Chat, _: str) -> None:
    try:
        chat.talk.compact()
    except KeyboardInterrupt:
        render.dim("Stopped; the conversation stays as it is.")
        return
    render.dim("The conversation goes on from this summary. /undo brings the whole one back.")


def _continue(chat: Chat, _: str) -> None:
    chat.ask("")


def _copy(chat: Chat, argument: str) -> None:
    """Copy the last answer, or the N-th code block counted from the end of the conversation."""
    messages = chat.talk.messages
    answers = [str(each["content"]) for each in messages if each["role"] == "assistant"]
    if not answers:
        raise NotFound("There is no answer to copy.")
    if not argument:
        clipboard.copy(answers[-1])
        return
    blocks = [block for answer in answers for block in extract.blocks(answer)]
    if not blocks:
        raise NotFound("No answer has a code block; /copy alone copies the last answer.")
    if not (argument.isdecimal() and 1 <= int(argument) <= len(blocks)):
        are = f"are {len(blocks)} code blocks" if len(blocks) != 1 else "is 1 code block"
        raise UsageError(f"There {are} in this conversation; /copy 1 copies the last one.")
    clipboard.copy(blocks[-int(argument)])


def _save(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("Name a file, for example: /save chat.md")
    path = expand_user(argument)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(chat.talk.markdown())
    except FileExistsError:
        raise UsageError(f"{path} already exists; choose another name.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    render.line(f"Saved to {path}.")


def _stats(chat: Chat, _: str) -> None:
    if chat.talk.last.get("timings"):
        figures.statistics(chat.talk.last)
    else:
        render.line("There is no complete answer yet.")


def _exit(chat: Chat, _: str) -> None:
    chat.ended = True


COMMANDS = {
    "/help": SlashCommand(_help, "", "Show this list."),
    "/new": SlashCommand(_new, "", "Start a new conversation; the settings stay."),
    "/clear": SlashCommand(_clear, "", "Clear the screen and start a new conversation."),
    "/history": SlashCommand(_history, "", "Show this conversation."),
    "/undo": SlashCommand(_undo, "", "Remove the last question and its answer."),
    "/regen": SlashCommand(_regen, "", "Answer the last question again."),
    "/continue": SlashCommand(_continue, "", "Continue an answer that was cut off or stopped."),
    "/compact": SlashCommand(_compact, "", "Replace a long conversation by a summary of it."),
    "/copy": SlashCommand(
        _copy, "[N]", "Copy the last answer, or the N-th code block from the end."
    ),
    "/edit": SlashCommand(_edit, "[TEXT]", "Write the question in $EDITOR; Enter then sends it."),
    "/file": SlashCommand(_file, "FILE…", "Include files or globs in the next question."),
    "/system": SlashCommand(_system, "[TEXT]", "Show or set the system message."),
    "/pair": SlashCommand(_pair, "[NAME]", "List the pairs, or switch to one."),
    "/set": SlashCommand(_set, "[NAME [VALUE]]", "Show or set temperature, tokens, seed and more."),
    "/save": SlashCommand(_save, "FILE", "Save the conversation as Markdown."),
    "/stats": SlashCommand(_stats, "", "Show statistics of the last answer."),
    "/exit": SlashCommand(_exit, "", "End the chat; also /bye, exit, quit or Ctrl-D."),
}
ALIASES = {
    "/bye": "/exit",
    "/quit": "/exit",
    "/q": "/exit",
    "/?": "/help",
    "/model": "/pair",
    "/retry": "/regen",
    "/reset": "/new",
}
KEYS = (
    ("Alt-Enter", 'Start a new line. Text between """ and """ may span several lines.'),
    ("Tab", "Complete a command, a file, a pair or a setting."),
    ("Ctrl-C", "Stop the answer, or clear the line."),
    ("Ctrl-\\", "End the thoughts, so that the answer follows."),
    ("a space first", "Send a message that begins with a slash as it is."),
)
