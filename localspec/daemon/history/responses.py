"""Kept responses: which turn of a conversation each is, and what of it no message says.

A response belongs to the message that answers it and goes with that, however that goes. Blocks, as the
store does that calls it.
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
    """`id` as clients know it; `body` is JSON; `asked`: how many messages it adds before its answer."""

    id: str
    body: str
    asked: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept response in its conversation.

    `messages` are those up to its answer, the last of them, and `ids` the responses that they answer, by
    their index. `first`: the index of the first that is its own. `newest`: nothing follows it.
    """

    body: str
    conversation: str
    model: str
    messages: list[StoredMessage]
    ids: dict[int, str]
    first: int
    newest: bool


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
    body, conversation, first, position = where
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
    end = index[position] + 1
    begin = next((at for each, at in index.items() if each >= first), end)
    return Kept(
        *(body, conversation, model, list(messages[:end]), ids, begin, end == len(messages))
    )
