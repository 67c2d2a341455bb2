"""Saved conversations as they are sent over HTTP: /localspec/conversations. Times are Unix seconds."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class StoredMessage(Struct, omit_defaults=True):
    """A message of a saved conversation.

    - `finish`: how an answer ended: stop, length, tool_calls, interrupted (its reader left) or
      failed.
    - `seconds`: from the answer's first token to its last.
    - `kind`: what the answer was for, one of `requests.Kind`.
    - `reasoning_content`, `tool_calls`, `tool_call_id`, `name`: as in the messages of a request.
    """

    role: str
    content: str
    created: float
    finish: str | None = None
    model: str | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    speed_up: float | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    kind: str | None = None
    seconds: float | None = None


class Match(Struct):
    """A place where a search found its text.

    - `role`: the role of the message, or "title".
    - `line`: the line that contains the text, shortened if it is long.
    - `start`, `end`: the characters of `line` that match.
    """

    role: str
    line: str
    start: int
    end: int


class ConversationEntry(Struct):
    """A conversation as lists show it.

    - `messages`: number of questions and answers.
    - `match`: the first match of a search.
    """

    id: str
    title: str
    model: str
    created: float
    updated: float
    messages: int
    match: Match | UnsetType = UNSET


class ConversationList(Struct):
    conversations: list[ConversationEntry]


class Conversation(Struct):
    id: str
    title: str
    model: str
    created: float
    updated: float
    messages: list[StoredMessage]


class Undone(Struct):
    """The result of taking back a question and everything that followed it.

    - `left`: number of questions that remain before it. With none left, the conversation is
      removed.
    """

    id: str
    question: str
    left: int


class Forgotten(Struct):
    """The number of removed conversations, and the id if it was a single one."""

    removed: int
    id: str | None = None
