"""What goes over the socket about kept conversations: /localspec/conversations. Times in Unix seconds."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class StoredMessage(Struct, omit_defaults=True):
    """`finish` of an answer: stop, length, tool_calls, interrupted (its reader left) or failed;
    `seconds` from its first token to its last; `kind` what it was for (requests.Kind).

    `reasoning_content`, `tool_calls`, `tool_call_id` and `name` are as in a request's messages.
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
    """Where a text was found: its line, cut if it is long, and which characters of that are the text.

    `role` is that of the message, or "title".
    """

    role: str
    line: str
    start: int
    end: int


class ConversationEntry(Struct):
    """One line of the list. `messages` counts questions and answers; `match`: the first, of a search."""

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
    """`question` was taken back, and what followed it; `left` questions stand before it.

    With none left the conversation is removed.
    """

    id: str
    question: str
    left: int


class Forgotten(Struct):
    """How many conversations were removed, and which if it was one."""

    removed: int
    id: str | None = None
