"""Keep the turns that are being answered, so that a killed daemon loses neither question nor answer.

A turn becomes part of its conversation when its answer ends. Until then it is kept here: the question
before its answer begins, and the answer as it was a moment ago. What a daemon leaves here when it is killed,
the next one adds to the conversations as answers that were interrupted. All functions block: the store calls
them in its own thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from localspec.daemon.history.responses import NewResponse
from localspec.protocol.conversations import Conversation, StoredMessage

if TYPE_CHECKING:
    import sqlite3

# The answer has a table of its own, because it is written again and again, and the question may be long.
TABLES = (
    "CREATE TABLE IF NOT EXISTS unfinished_turns"
    " (key TEXT PRIMARY KEY, conversation TEXT NOT NULL, turn BLOB NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS unfinished_answers"
    " (key TEXT PRIMARY KEY REFERENCES unfinished_turns (key) ON DELETE CASCADE,"
    " updated REAL NOT NULL, answer BLOB NOT NULL) STRICT",
)


class Turn(msgspec.Struct):
    """The arguments of `ConversationStore.add` for a turn whose answer has not ended."""

    addition: Conversation  # ends with the answer as far as it is written
    new: bool
    cut: StoredMessage | None = None
    response: NewResponse | None = None


def find_conversations(db: sqlite3.Connection, name: str) -> list[str]:
    """Return the conversations whose id begins with `name` and whose first turn is unfinished."""
    rows = db.execute(
        "SELECT DISTINCT conversation FROM unfinished_turns WHERE substr(conversation, 1, length(?1)) = ?1"
        " AND conversation NOT IN (SELECT id FROM conversations)",
        (name,),
    )
    return [row[0] for row in rows]


def load(db: sqlite3.Connection, conversation: str | None = None) -> Iterator[tuple[str, Turn]]:
    """Yield the turns that are kept, of one conversation unless that is None, each with its key.

    The one whose answer went on last comes last.
    """
    rows = db.execute(
        "SELECT key, turn, updated, answer FROM unfinished_turns LEFT JOIN unfinished_answers USING (key)"
        " WHERE ?1 IS NULL OR conversation = ?1 ORDER BY updated, unfinished_turns.rowid",
        (conversation,),
    )
    for key, encoded, updated, answer in rows.fetchall():
        turn = msgspec.msgpack.decode(encoded, type=Turn)
        if answer is not None:
            turn.addition.updated = updated
            turn.addition.messages[-1] = msgspec.msgpack.decode(answer, type=StoredMessage)
        yield key, turn
