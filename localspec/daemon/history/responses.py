"""Kept responses: which turn of a conversation each is, and what of it no message says.

They are those of OpenAI's Responses API and the messages of Anthropic's threads: answers that a later
request continues by their id. The beginning of an id says which of the two it is of. A response belongs
to the message that answers it and goes with that, however that goes. Blocks, as the store does that
calls it.
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
class Response:
    """`id` as clients know it; `body` is JSON; `continues`: the id of the response that it goes on from."""

    id: str
    body: str
    continues: str | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept response in its conversation.

    `messages` are those up to its answer, the last of them; `ids` are the responses that they answer, by
    their index. `is_last`: no message of the conversation follows.
    """

    id: str
    body: str
    conversation: str
    model: str
    messages: list[StoredMessage]
    ids: dict[int, str]
    is_last: bool


def insert(
    db: sqlite3.Connection, conversation: str, first: int, position: int, response: Response
) -> None:
    """Store `response`, whose turn begins at `first` and whose answer is stored at `position`."""
    db.execute(
        "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
        (response.id, conversation, first, position, response.body),
    )


def place(db: sqlite3.Connection, name: str) -> tuple[str, str, int, int] | None:
    """Body, conversation, and the positions of the first message of its turn and of its answer."""
    found: tuple[str, str, int, int] | None = db.execute(
        "SELECT body, conversation, first, position FROM responses WHERE id = ?", (name,)
    ).fetchone()
    return found


def kept(
    db: sqlite3.Connection,
    name: str,
    where: tuple[str, str, int, int],
    model: str,
    messages: Sequence[StoredMessage],
) -> Kept:
    """`messages`: all of its conversation, whose model is `model`."""
    body, conversation, _, position = where
    rows = db.execute(
        "SELECT position FROM messages WHERE conversation = ? ORDER BY position", (conversation,)
    )
    index = {each: at for at, (each,) in enumerate(rows)}
    ids = {
        index[answer]: each
        for each, answer in db.execute(
            "SELECT id, position FROM responses WHERE conversation = ? AND position <= ?",
            (conversation, position),
        )
    }
    said = list(messages[: index[position] + 1])
    is_last = len(said) == len(messages)
    return Kept(name, body, conversation, model, said, ids, is_last)


def branch(db: sqlite3.Connection, conversation: str, position: int, name: str) -> None:
    """Copy a conversation as far as `position` into a new one, `name`. No answer is counted twice."""
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
