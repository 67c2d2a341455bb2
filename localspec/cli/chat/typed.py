"""The meaning of a typed line: a message, a command, or the end of the chat.

A line that begins with a space is always a message. Otherwise a word after a slash is a command, three
quotes enclose a message of several lines, and `exit` or `quit` alone ends the chat.
"""

from __future__ import annotations

import re
from typing import Literal

_QUOTES = '"""'
_COMMAND = re.compile(r"/[a-zA-Z?]*(?!\S)")  # but not a path
_EXIT_WORDS = ("exit", "quit")

Kind = Literal["message", "command", "leave"]


def parse_line(line: str) -> tuple[Kind, str]:
    """Return the kind of a line, and its text."""
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
