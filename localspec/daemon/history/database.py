"""The file of kept conversations: its tables, how it is opened, brought up to date and cleaned."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.daemon.completion.reply.parser import split_thoughts
from localspec.daemon.history import responses, statistics
from localspec.errors import Conflict, UnsafePath
from localspec.paths import open_file

if TYPE_CHECKING:
    import sqlite3

VERSION = 4
# The file's application_id while no page of it holds remains of what was deleted.
_CLEAN = 0x4C535043
_TABLES = f"""
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, created REAL NOT NULL, updated REAL NOT NULL,
    model TEXT NOT NULL, title TEXT NOT NULL
) STRICT;
CREATE INDEX conversations_updated ON conversations (updated);
CREATE TABLE messages (
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER NOT NULL, role TEXT NOT NULL, content TEXT NOT NULL, created REAL NOT NULL,
    finish TEXT, model TEXT, tokens INTEGER, tokens_per_second REAL, drafted INTEGER,
    accepted INTEGER, speed_up REAL, reasoning_content TEXT, tool_calls TEXT, tool_call_id TEXT,
    name TEXT, kind TEXT, seconds REAL,
    PRIMARY KEY (conversation, position)
) STRICT;
{statistics.TABLE}{responses.TABLE}"""


def opened(file: Path) -> sqlite3.Connection:
    """Open, or create for this user alone, and bring it up to date.

    Raises:
        UnsafePath: it is a link, which is refused for every file of ours.
        Conflict: it is of a newer localspec.
    """
    import sqlite3

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if file.is_symlink():
        raise UnsafePath(f"{file} is a symbolic link; remove it and try again.")
    os.close(open_file(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
    db = sqlite3.connect(file)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise Conflict(f"{file} was written by a newer localspec; upgrade, or move it away.")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA temp_store = MEMORY")  # writing the file anew leaves none elsewhere
        db.create_function("folded", 1, str.casefold, deterministic=True)
        if version == 0:
            db.executescript(
                f"BEGIN;{_TABLES}PRAGMA user_version = {VERSION};"
                f"PRAGMA application_id = {_CLEAN};COMMIT;"
            )
        if version == 1:
            _split_thoughts(db)
        if version in (1, 2):
            _add_figures(db)
        if version in (1, 2, 3):
            _add_responses(db)
        if db.execute("PRAGMA application_id").fetchone() != (_CLEAN,):
            with contextlib.suppress(Conflict):
                clean(db, file)
    except BaseException:
        db.close()
        raise
    return db


def clean(db: sqlite3.Connection, file: Path) -> None:
    """Write the file anew: balanced pages keep remains, whatever secure_delete says.

    Raises:
        Conflict: another program reads the file, so that its log cannot be emptied now.
    """
    db.execute("VACUUM")
    (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise Conflict(
            f"It is removed, but another program has {file} open, so traces may remain "
            "until that program ends and the daemon is restarted."
        )
    db.execute(f"PRAGMA application_id = {_CLEAN}")


def _split_thoughts(db: sqlite3.Connection) -> None:
    """From version 1, which kept answers as the model wrote them, thoughts and all in one text."""
    db.execute("BEGIN IMMEDIATE")
    with db:
        for name in ("reasoning_content", "tool_calls", "tool_call_id", "name"):
            db.execute(f"ALTER TABLE messages ADD COLUMN {name} TEXT")
        answers = db.execute("SELECT rowid, content FROM messages WHERE role = 'assistant'")
        for row, content in answers.fetchall():
            reasoning, text = split_thoughts(content)
            if reasoning:
                db.execute(
                    "UPDATE messages SET content = ?, reasoning_content = ? WHERE rowid = ?",
                    (text, reasoning, row),
                )
        db.execute("PRAGMA user_version = 2")


def _add_figures(db: sqlite3.Connection) -> None:
    """From version 2, which kept no kind of an answer, and of its time the rate."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("ALTER TABLE messages ADD COLUMN kind TEXT")
        db.execute("ALTER TABLE messages ADD COLUMN seconds REAL")
        db.execute(
            "UPDATE messages SET seconds = (tokens - 1) / tokens_per_second"
            " WHERE tokens > 0 AND tokens_per_second > 0"
        )
        db.execute(statistics.TABLE)
        db.execute("PRAGMA user_version = 3")


def _add_responses(db: sqlite3.Connection) -> None:
    """From version 3, which kept no responses."""
    db.executescript(f"BEGIN IMMEDIATE;{responses.TABLE}PRAGMA user_version = {VERSION};COMMIT;")
