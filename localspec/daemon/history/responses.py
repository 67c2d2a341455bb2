"""Kept responses: which turn of a conversation each is, and what of it no message says.

A response belongs to the message that answers it and goes with that, however that goes. Blocks, as the
store does that calls it.
"""

from __future__ import annotations

import secrets
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
    """`id` as clients know it; `body` is JSON; `asked`: how many messages it adds before its answer.
    `follows`: the position of the answer that it goes on from, if any.
    """

    id: str
    body: str
    asked: int
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept response in its conversation.

    `messages` are those up to its answer, the last of them, which stands at `position`; `ids` are the
    responses that they answer, by their index.
    """

    body: str
    conversation: str
    model: str
    messages: list[StoredMessage]
    ids: dict[int, str]
    position: int


def insert(db: sqlite3.Connection, conversation: str, position: int, response: Response) -> None:
    """`position`: of its answer, which is stored."""
    db.execute(
        "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
        (response.id, conversation, position - response.asked, position, response.body),
    )


def place(db: sqlite3.Connection, name: str) -> tuple[str, str, int, int] | None:
    """Body, conversation, and the positions of the first message of its turn and of its answer."""
    found: tuple[str, str, int, int] | None = db.execute(
        "SELECT body, conversation, first, position FROM responses WHERE id = ?", (name,)
    ).fetchone()
    return found


def kept(
    db: sqlite3.Connection,
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
        index[answer]: name
        for name, answer in db.execute(
            "SELECT id, position FROM responses WHERE conversation = ? AND position <= ?",
            (conversation, position),
        )
    }
    said = list(messages[: index[position] + 1])
    return Kept(body, conversation, model, said, ids, position)


def branched(db: sqlite3.Connection, conversation: str, position: int) -> str:
    """A new conversation that is the other one as far as `position`: its id. No answer is counted twice."""
    name = secrets.token_hex(4)
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
    return name
