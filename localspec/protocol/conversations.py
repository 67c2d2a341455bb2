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


# Statistics of saved answers as they are sent over HTTP: /localspec/statistics. Times in seconds.


class Group(Struct):
    """Statistics of some answers together.

    - `name`: a day ("2026-11-22"), the name of a pair, or a kind of work.
    - `seconds`: from each answer's first token to its last, summed up.
    - `tokens_per_second`: over those seconds; null if there are none.
    - `acceptance`: accepted drafted tokens as a fraction of all drafted tokens, 0…1; null if
      nothing was drafted.
    - `measured_seconds`: time taken by the answers whose speed-up was measured.
    - `speed_up`: over plain decoding, of those answers; null if it was never measured.
    - `saved_seconds`: time that those answers saved; null if it was never measured.
    """

    name: str
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    drafted: int = 0
    accepted: int = 0
    acceptance: float | None = None
    measured_seconds: float = 0.0
    speed_up: float | None = None
    saved_seconds: float | None = None


class ClientReading(Struct):
    """What reading next turns ahead has gained for one client, since its first answer.

    - `client`: the name of its program and the endpoint that it uses; "localspec" is `ask` and `chat`.
    - `right`, `wrong`: next turns that began as they were read, and that did not.
    - `saved_seconds`, `wasted_seconds`: the time of reading what was used, and what was not.
    """

    client: str
    right: int
    wrong: int
    saved_seconds: float
    wasted_seconds: float


class Statistics(Struct):
    """Statistics of the `days` days that end today, in the daemon's time zone.

    - `by_day`: the newest day last. From the first day with an answer on, days without answers are
      included.
    - `unfinished`: answers that were interrupted or failed. Their figures are not known, so they
      are counted nowhere else.
    - `read_ahead`: of all pairs and days.
    """

    days: int
    since: str
    until: str
    pair: str
    total: Group
    by_day: list[Group]
    by_pair: list[Group]
    by_kind: list[Group]
    unfinished: int
    read_ahead: list[ClientReading] = []
