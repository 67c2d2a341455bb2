"""Open, migrate and clean the SQLite file of stored conversations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.chat.reader import split_thoughts
from localspec.daemon.history import responses, statistics, unfinished
from localspec.errors import Conflict, UnsafePath
from localspec.paths import open_file, read_file
from localspec.protocol.conversations import ConversationEntry, Match
from localspec.registry.store.files import write_atomically

if TYPE_CHECKING:
    import sqlite3


VERSION = 4
# The file has this application_id ("LSPC") while none of its pages holds remains of deleted rows.
_CLEAN_APPLICATION_ID = 0x4C535043
# A condition on rows of `conversations`: the case-folded text ?1 occurs in the title or in a message.
CONTAINS_TEXT = (
    "instr(folded(title), ?1) OR EXISTS"
    " (SELECT 1 FROM messages WHERE conversation = id AND instr(folded(content), ?1))"
)
_MESSAGE = (
    "SELECT role, content FROM messages WHERE conversation = ? AND instr(folded(content), ?)"
    " ORDER BY position LIMIT 1"
)
# A longer line is cut: this many characters before the match are shown, and this many in all.
_CONTEXT_CHARS, _MAX_LINE_CHARS = 60, 300


def first_match(db: sqlite3.Connection, entry: ConversationEntry, needle: str) -> Match:
    """Return the first line of the conversation `entry` that contains `needle`.

    The title is searched only if no message contains it. `needle` is already case-folded.
    """
    role, text = db.execute(_MESSAGE, (entry.id, needle)).fetchone() or ("title", entry.title)
    line, start, end = locate_match(text, needle)
    if len(line) > _MAX_LINE_CHARS:
        offset = max(0, start - _CONTEXT_CHARS)
        prefix = "…" if offset else ""
        suffix = "…" if offset + _MAX_LINE_CHARS < len(line) else ""
        line = prefix + line[offset : offset + _MAX_LINE_CHARS] + suffix
        shift = len(prefix) - offset
        start, end = start + shift, min(end + shift, len(line))
    return Match(role, line, start, end)


def locate_match(text: str, needle: str) -> tuple[str, int, int]:
    """Return the line of `text` in which `needle` begins, and the start and end of the match in it.

    `needle` is case-folded. A match that spans several lines ends with its first line. Case folding turns
    some characters into two, so positions in the folded line are counted back to the original one.
    """
    folded = text.casefold()
    position = folded.find(needle)
    line = text.split("\n")[folded.count("\n", 0, position)]
    folded_start = position - (folded.rfind("\n", 0, position) + 1)
    folded_end = folded_start + len(needle.partition("\n")[0])
    start = end = folded_length = 0
    for character in line:
        if folded_length >= folded_end:
            break
        folded_length += len(character.casefold())
        end += 1
        if folded_length <= folded_start:
            start = end
    return line, start, end


def remove_typed_lines(file: Path, contents: Sequence[str] | None) -> None:
    """Remove from chat_history every entry that is part of one of `contents`, or all entries with None.

    `localspec chat` keeps there what people typed for the next chat. Text that is removed from the stored
    conversations must not remain in it. prompt_toolkit defines the format: each entry is a comment with its
    time, then its lines, each after a "+".

    An entry may be only part of a message, because a chat can put files before the typed text. A short line
    that was also typed elsewhere is lost with it, which matters to the arrow keys alone. Raises OSError if
    the file cannot be read, written or deleted, and StoreError if the file cannot be replaced.
    """
    # People may keep it elsewhere behind a link. `Path.resolve` raises where links lead in a circle.
    file = Path(os.path.realpath(file))
    if contents is None:
        file.unlink(missing_ok=True)
        return
    try:
        data = read_file(file)
    except FileNotFoundError:
        return
    remaining: list[bytes] = []
    for is_entry, lines in groupby(data.splitlines(keepends=True), lambda line: line[:1] == b"+"):
        block = list(lines)
        typed = filter(None, _candidates(block)) if is_entry else ()
        if any(text in content for text in typed for content in contents):
            while remaining and remaining[-1][:1] in (b"#", b"\n"):  # its comment with the time
                remaining.pop()
        else:
            remaining += block
    if len(content := b"".join(remaining)) < len(data):
        write_atomically(file, content)


def _candidates(lines: Sequence[bytes]) -> Iterator[str]:
    """Yield the texts that an entry may have sent: all of it, and what follows a command, without quotes."""
    text = b"".join(line[1:] for line in lines).decode("utf-8", "replace").strip()
    argument = text.partition(" ")[2].strip() if text.startswith("/") else ""
    for candidate in (text, argument):
        yield candidate.removeprefix('"""').removesuffix('"""').strip()


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


def open_database(file: Path) -> sqlite3.Connection:
    """Open the file, create it for this user alone if it is missing, and migrate it to `VERSION`.

    Raises UnsafePath if the file is a symbolic link, and Conflict if a newer localspec wrote the file.
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
        for setting in ("foreign_keys = ON", "secure_delete = ON", "journal_mode = WAL"):
            db.execute(f"PRAGMA {setting}")
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
            # Version 3 stored no responses.
            db.executescript(
                f"BEGIN IMMEDIATE;{responses.TABLE}PRAGMA user_version = {VERSION};COMMIT;"
            )
        for table in unfinished.TABLES:
            db.execute(table)
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

    `secure_delete` alone is not enough: when SQLite balances pages, copies of old rows stay behind. Raises
    Conflict if another program has the file open, so its log cannot be emptied now.
    """
    db.execute("VACUUM")
    empty_log(db, file)
    db.execute(f"PRAGMA application_id = {_CLEAN_APPLICATION_ID}")


def empty_log(db: sqlite3.Connection, file: Path) -> None:
    """Move all changes into the file, where `secure_delete` has overwritten deleted rows, and empty its log.

    Raises Conflict if another program has the file open, so its log cannot be emptied now.
    """
    (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise Conflict(
            f"It is removed, but another program has {file} open, so traces may remain "
            "until that program ends and the daemon is restarted."
        )


def size_bytes(db: sqlite3.Connection) -> int:
    (pages,), (page_bytes,) = (
        db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
    )
    return int(pages * page_bytes)


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
