"""Store responses: which turn of a conversation each one is, and the JSON that no message holds.

Responses are those of OpenAI's Responses API and the messages of Anthropic's threads: answers that a
later request continues by their id. The prefix of the id says which API it belongs to. A response belongs
to the message that answers it and is deleted together with that message. All functions block: the
store calls them in its own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.protocol.conversations import StoredMessage

if TYPE_CHECKING:
    import sqlite3

TABLE = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL, first INTEGER NOT NULL, position INTEGER NOT NULL,
    body TEXT NOT NULL,
    FOREIGN KEY (conversation, position) REFERENCES messages (conversation, position)
        ON DELETE CASCADE
) STRICT;
CREATE INDEX responses_of ON responses (conversation, position);
"""


@dataclass(frozen=True, slots=True)
class NewResponse:
    id: str  # the client's name for it
    body: str  # JSON
    continues: str | None = None  # the id of the response before it


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response and the conversation that it is part of."""

    id: str
    body: str
    conversation: str
    model: str
    messages: list[StoredMessage]  # of the conversation, up to and including the answer
    ids: dict[int, str]  # the response id of each answer among them, by its index
    is_last: bool  # whether no message follows the answer


def find_location(db: sqlite3.Connection, response_id: str) -> tuple[str, str, int, int] | None:
    """Return the response's body, its conversation, and two positions: its first message and its answer."""
    row: tuple[str, str, int, int] | None = db.execute(
        "SELECT body, conversation, first, position FROM responses WHERE id = ?", (response_id,)
    ).fetchone()
    return row


def load_response(
    db: sqlite3.Connection,
    name: str,
    location: tuple[str, str, int, int],
    model: str,
    messages: Sequence[StoredMessage],
) -> StoredResponse:
    """Return the response `name`, whose row `find_location` found.

    `messages` are all messages of its conversation, and `model` is the conversation's pair.
    """
    body, conversation, _, position = location
    rows = db.execute(
        "SELECT position FROM messages WHERE conversation = ? ORDER BY position", (conversation,)
    )
    index_of = {row_position: index for index, (row_position,) in enumerate(rows)}
    ids = {
        index_of[answer]: response_id
        for response_id, answer in db.execute(
            "SELECT id, position FROM responses WHERE conversation = ? AND position <= ?",
            (conversation, position),
        )
    }
    included = list(messages[: index_of[position] + 1])
    is_last = len(included) == len(messages)
    return StoredResponse(name, body, conversation, model, included, ids, is_last)


def copy_beginning(db: sqlite3.Connection, conversation: str, position: int, name: str) -> None:
    """Copy a conversation up to `position` into a new conversation called `name`.

    The copy has no figures, so that no answer is counted twice in the statistics.
    """
    db.execute(
        "INSERT INTO conversations SELECT ?, created, updated, model, title FROM conversations"
        " WHERE id = ?",
        (name, conversation),
    )
    db.execute(
        "INSERT INTO messages (conversation, position, role, content, created, model, kind,"
        " reasoning_content, tool_calls, tool_call_id, name)"
        " SELECT ?, position, role, content, created, model, kind,"
        " reasoning_content, tool_calls, tool_call_id, name"
        " FROM messages WHERE conversation = ? AND position <= ?",
        (name, conversation, position),
    )
