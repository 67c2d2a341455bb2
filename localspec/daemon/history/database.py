"""Open, migrate and clean the SQLite file of stored conversations."""

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
# The file has this application_id ("LSPC") while none of its pages holds remains of deleted rows.
_CLEAN_APPLICATION_ID = 0x4C535043
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
    """Open the file, create it for this user alone if it is missing, and migrate it to `VERSION`.

    Raises:
        UnsafePath: the file is a symbolic link.
        Conflict: a newer localspec wrote the file.
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
        db.execute("PRAGMA temp_store = MEMORY")  # VACUUM then writes no copy to a temporary file
        db.create_function("folded", 1, str.casefold, deterministic=True)
        if version == 0:
            db.executescript(
                f"BEGIN;{_TABLES}PRAGMA user_version = {VERSION};"
                f"PRAGMA application_id = {_CLEAN_APPLICATION_ID};COMMIT;"
            )
        if version == 1:
            _split_thoughts(db)
        if version in (1, 2):
            _add_figures(db)
        if version in (1, 2, 3):
            _add_responses(db)
        if db.execute("PRAGMA application_id").fetchone() != (_CLEAN_APPLICATION_ID,):
            # An earlier run could not clean the file. If that fails again, the next run tries it.
            with contextlib.suppress(Conflict):
                clean(db, file)
    except BaseException:
        db.close()
        raise
    return db


def clean(db: sqlite3.Connection, file: Path) -> None:
    """Rewrite the file and empty its log, so that no deleted text remains on the disk.

    `secure_delete` alone is not enough: when SQLite balances pages, copies of old rows stay behind.

    Raises:
        Conflict: another program has the file open, so its log cannot be emptied now.
    """
    db.execute("VACUUM")
    (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise Conflict(
            f"It is removed, but another program has {file} open, so traces may remain "
            "until that program ends and the daemon is restarted."
        )
    db.execute(f"PRAGMA application_id = {_CLEAN_APPLICATION_ID}")


def _split_thoughts(db: sqlite3.Connection) -> None:
    """Migrate from version 1, which stored an answer as the model wrote it, thoughts included."""
    db.execute("BEGIN IMMEDIATE")
    with db:
        for column in ("reasoning_content", "tool_calls", "tool_call_id", "name"):
            db.execute(f"ALTER TABLE messages ADD COLUMN {column} TEXT")
        answers = db.execute("SELECT rowid, content FROM messages WHERE role = 'assistant'")
        for rowid, content in answers.fetchall():
            reasoning, text = split_thoughts(content)
            if reasoning:
                db.execute(
                    "UPDATE messages SET content = ?, reasoning_content = ? WHERE rowid = ?",
                    (text, reasoning, rowid),
                )
        db.execute("PRAGMA user_version = 2")


def _add_figures(db: sqlite3.Connection) -> None:
    """Migrate from version 2, which stored no kind of an answer, and its rate instead of its duration."""
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
    """Migrate from version 3, which stored no responses."""
    db.executescript(f"BEGIN IMMEDIATE;{responses.TABLE}PRAGMA user_version = {VERSION};COMMIT;")
