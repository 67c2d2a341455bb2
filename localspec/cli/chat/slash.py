"""What can be typed in a chat instead of a question. A command is one small function."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from localspec.cli import inputs
from localspec.cli.chat.talk import Talk
from localspec.cli.terminal import figures, render
from localspec.cli.terminal.pairs import size
from localspec.client.pairs import PairsClient
from localspec.errors import UsageError


class Chat:
    """What commands change: the talk, and what goes with the next question."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.attached: list[str] = []
        self.ended = False

    def question(self, text: str) -> str:
        """`text` with the attached files before it; they are used up."""
        parts, self.attached = [*self.attached, text], []
        return "\n\n".join(parts)


class Slash(NamedTuple):
    run: Callable[[Chat, str], str | None]  # a question to ask, or None
    argument: str
    help: str


def run(chat: Chat, line: str) -> str | None:
    """Run "/name argument"; the question it makes, if it makes one.

    Raises:
        UsageError: there is no such command.
        LocalspecError: what it met.
    """
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {close[0]}?" if close else "/help lists them."
        raise UsageError(f"There is no command {name}; {meant}")
    return COMMANDS[name].run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    del chat, argument
    render.fields([(f"  {name} {each.argument}", each.help) for name, each in COMMANDS.items()])
    render.line('  Alt-Enter adds a line; or begin and end with """. Ctrl-C stops an answer.')


def _edit(chat: Chat, argument: str) -> str | None:
    import click

    del chat
    text = click.edit(argument or None, extension=".md")
    if text is None or not text.strip():
        render.line("Nothing was written.")
        return None
    return text.strip()


def _file(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("Which file? As in: /file src/main.py")
    # A name with blanks is one file when there is one, else several names.
    names = [argument] if Path(argument).expanduser().exists() else argument.split()
    text = inputs.files(names)
    chat.attached.append(text)
    render.line(f"{size(len(text.encode()))} will go with your next question.")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.talk.system = argument
        render.line("It holds from your next question on.")
    else:
        render.line(chat.talk.system or "There is no system message; /system TEXT sets one.")


def _pair(chat: Chat, argument: str) -> None:
    if ":" in argument or any(map(inputs.is_path, argument.split(","))):
        chat.talk.model = argument
        return
    names = pair_names(chat.talk)
    if argument and argument not in names:
        raise UsageError(f"There is no pair '{argument}' here; there are {', '.join(names)}.")
    if argument:
        chat.talk.model = argument
        render.line(f"{argument} will answer from now on.")
        return
    for name in names:
        render.line(f"{'*' if name == chat.talk.model else ' '} {name}")


def pair_names(talk: Talk) -> list[str]:
    client = PairsClient(talk.client.socket_path, autostart=talk.client.autostart)
    return [each["name"] for each in client.pairs()["pairs"]]


def _regen(chat: Chat, argument: str) -> str:
    del argument
    return chat.talk.undo()


def _undo(chat: Chat, argument: str) -> None:
    del argument
    question = chat.talk.undo()
    render.line(f"Taken back: {question.splitlines()[0][:60]}")


def _save(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("Where to? As in: /save talk.md")
    path = Path(argument).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(chat.talk.markdown())
    except FileExistsError:
        raise UsageError(f"{path} exists; choose another name.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    render.line(f"Saved in {path}.")


def _stats(chat: Chat, argument: str) -> None:
    del argument
    if not chat.talk.last.get("timings"):
        render.line("No answer is complete yet.")
    else:
        figures.statistics(chat.talk.last)


def _exit(chat: Chat, argument: str) -> None:
    del argument
    chat.ended = True


COMMANDS = {
    "/help": Slash(_help, "", "this list"),
    "/edit": Slash(_edit, "[TEXT]", "write the question in $EDITOR"),
    "/file": Slash(_file, "FILE…", "ask about files; patterns too"),
    "/system": Slash(_system, "[TEXT]", "set or show the system message"),
    "/pair": Slash(_pair, "[NAME]", "change the pair, or list them"),
    "/regen": Slash(_regen, "", "answer the last question anew"),
    "/undo": Slash(_undo, "", "take the last question back"),
    "/save": Slash(_save, "FILE", "write the talk to a file"),
    "/stats": Slash(_stats, "", "statistics of the last answer"),
    "/exit": Slash(_exit, "", "end the chat (or Ctrl-D)"),
}
