"""Store conversations that clients asked to keep: SQLite in the data folder, one thread that owns it.

A request has `"localspec": {"conversation": "new" | "last" | ID}`. Its messages continue that
conversation. They are kept before the answer begins, and join the conversation with the answer when that
ends, however it ends; see `unfinished`. Nothing is stored for a request that does not ask for it. All reads
and writes run in one thread in the order of the requests. So a question that follows at once finds its
conversation complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from localspec.daemon import logs
from localspec.daemon.history import database, responses, statistics, unfinished
from localspec.errors import Conflict, InvalidRequest, LocalspecError, NotFound
from localspec.files import write_atomically
from localspec.paths import Paths, read_file, remove_tree
from localspec.protocol.conversations import (
    Conversation,
    ConversationEntry,
    Statistics,
    StoredMessage,
    Undone,
)
from localspec.protocol.frames import ANONYMOUS_CLIENTS
from localspec.registry.tuned import remove_tuned_drafts

if TYPE_CHECKING:
    import sqlite3

log = logging.getLogger("localspec.daemon")
Result = TypeVar("Result")

LAST = "last"
# A file up to this size is cleaned with each deletion, in some hundredths of a second. A larger one would
# hold questions back, so it is cleaned when none is being answered, or after some time in any case.
_CLEANED_AT_ONCE_BYTES = 8 << 20
_CLEAN_AFTER_S, _CLEAN_WITHIN_S = 2.0, 60.0
_ENTRY = (
    "SELECT id, title, model, created, updated,"
    " (SELECT count(*) FROM messages WHERE conversation = id AND role != 'system')"
    " FROM conversations "
)
# The columns have the order of the fields.
_MESSAGE = (
    f"SELECT {', '.join(StoredMessage.__struct_fields__)} FROM messages"
    " WHERE conversation = ? ORDER BY position"
)
_END_TURN = "DELETE FROM unfinished_turns WHERE key = ?"
_DELETE_LAST_ANSWER = (
    "DELETE FROM messages WHERE conversation = ?1 AND content = ?2 AND role = 'assistant'"
    " AND position = (SELECT max(position) FROM messages WHERE conversation = ?1)"
)


class ConversationStore:
    """The store of conversations.

    Methods that are not asynchronous block, so call them through `run`. Each of them may raise Conflict:
    the file was written by a newer localspec, cannot be used, or (after a removal) is open in another
    program. A `name` is the id of a conversation, or a beginning of it. NotFound is raised if there is none,
    and InvalidRequest if several ids begin like that. After a removal, the caller has to drop what the engine
    holds in memory.
    """

    def __init__(self, paths: Paths) -> None:
        """Create the store without opening its SQLite file."""
        self._file = paths.data / "conversations.sqlite"
        # In the folder of states is one of each conversation, in which the engine saves prompt states.
        self._states, self._typed_lines = paths.model_states, paths.typed_lines
        self._tuned = paths.tuned  # drafts that learned from conversations
        # Called in the store's thread for a turn of a conversation that was removed meanwhile, since the
        # engine may hold states of it that were made after the removal.
        self.on_removed_meanwhile: Callable[[str], object] = lambda _: None
        # Conversation or response of each unstored turn.
        self._under_way: dict[asyncio.Event, str] = {}
        # The keys of the unfinished turns of this daemon that are kept.
        self._kept: set[str] = set()
        self._clean_by: float | None = None  # when the file is to be cleaned at the latest
        self._lost_file = paths.unsaved_notice
        self._lost = ""  # why the newest turn was not stored, "" if it was
        with contextlib.suppress(OSError):
            self._lost = read_file(self._lost_file).decode("utf-8", "replace")
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="conversations")

    async def run(self, work: Callable[[ConversationStore], Result]) -> Result:
        """Run `work(self)` in the thread, after everything that was submitted before. Raises as it does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._safely, work)

    def submit(
        self, work: Callable[[ConversationStore], object], *, newest: bool = False
    ) -> Future[str]:
        """Run `work(self)` in the thread. Return a future of the reason why it failed, "" if it did not.

        newest: it is about the newest turn, so the next question for the last one is told of a failure.
        """

        def run_and_log() -> str:
            try:
                self._safely(work)
            except LocalspecError as error:
                log.error("a conversation was not stored: %s", error.message)
                if newest:
                    self._remember_lost(error.message)
                return error.message
            return ""

        try:
            return self._thread.submit(run_and_log)
        except RuntimeError:  # the daemon has ended
            nothing_lost: Future[str] = Future()
            nothing_lost.set_result("")
            return nothing_lost

    def _remember_lost(self, reason: str) -> None:
        """Record why the newest turn was not stored, in a file so that the next daemon knows it too."""
        if reason != self._lost:
            self._lost = reason
            with contextlib.suppress(OSError):
                self._lost_file.unlink(missing_ok=True)
                if reason:
                    write_atomically(self._lost_file, reason.encode())

    @contextlib.asynccontextmanager
    async def answering(self, name: str) -> AsyncIterator[None]:
        """Mark a turn of the conversation (or response) `name` as under way until it is stored or dropped."""
        finished = asyncio.Event()
        self._under_way[finished] = name
        try:
            yield
        finally:
            del self._under_way[finished]
            finished.set()

    async def wait_until_settled(self, name: str) -> None:
        """Wait for the turns under way in the conversation whose id begins with `name`.

        A client learns the id with the first word of an answer. It may disconnect and ask again before the
        daemon has noticed that, and stored the part of the answer that was sent.
        """
        while turns := [turn for turn, full in self._under_way.items() if full.startswith(name)]:
            await turns[0].wait()

    def _safely(self, work: Callable[[ConversationStore], Result]) -> Result:
        """Run `work` and turn errors of SQLite and the file system, such as a full disk, into Conflict."""
        import sqlite3

        try:
            return work(self)
        except sqlite3.Error as error:
            raise Conflict(f"The history {self._file} cannot be used: {error}.") from error
        except OSError as error:
            path = error.filename or self._file
            raise Conflict(f"The history cannot be used: {path}: {error.strerror}.") from error

    def close(self) -> None:
        """Store what is still waiting, and close the file."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _close(self) -> None:
        if self._connection is not None:
            if self._clean_by is not None:
                with contextlib.suppress(LocalspecError):  # the next daemon tries it again
                    self._safely(ConversationStore._clean)
            self._connection.close()

    def list_entries(self, limit: int = 50, search: str = "") -> list[ConversationEntry]:
        """Return the newest `limit` conversations, or those that contain `search` with its first match.

        Case is ignored.
        """
        if not self._file.exists():
            return []
        needle = search.casefold()
        rows = self._db.execute(
            f"{_ENTRY}WHERE ?1 = '' OR {database.CONTAINS_TEXT} ORDER BY updated DESC, rowid DESC LIMIT ?2",
            (needle, limit),
        )
        entries = [ConversationEntry(*row) for row in rows]
        if needle:
            for entry in entries:
                entry.match = database.first_match(self._db, entry, needle)
        return entries

    def get(self, name: str) -> Conversation:
        """Return the conversation `name`, which may be "last".

        Raises Conflict if the newest answer was not stored, so "last" would mean another conversation.
        """
        entry = self._find(name)
        messages = [StoredMessage(*row) for row in self._db.execute(_MESSAGE, (entry.id,))]
        for message in messages:
            if isinstance(message.tool_calls, str):
                message.tool_calls = json.loads(message.tool_calls)
        return Conversation(
            entry.id, entry.title, entry.model, entry.created, entry.updated, messages
        )

    def _find(self, name: str) -> ConversationEntry:
        none_yet = "There are no conversations yet; `localspec ask` starts one."
        if not self._file.exists():
            raise NotFound(none_yet)
        if name == LAST:
            if self._lost:
                raise Conflict(
                    f"The last answer was not saved, so there is no 'last' conversation: {self._lost} "
                    "Name an earlier one by its id (--cid ID). See: localspec history"
                )
            rows = self._db.execute(f"{_ENTRY}ORDER BY updated DESC, rowid DESC LIMIT 1").fetchall()
        else:
            query = f"{_ENTRY}WHERE substr(id, 1, length(?)) = ? LIMIT 2"
            rows = self._db.execute(query, (name, name)).fetchall()
        if not rows and name == LAST:
            raise NotFound(none_yet)
        if not rows or not name:
            raise NotFound(f"There is no conversation '{name}'. See: localspec history")
        if len(rows) > 1:
            raise InvalidRequest(f"More than one conversation ID starts with '{name}'.")
        return ConversationEntry(*rows[0])

    async def get_response(self, name: str) -> responses.StoredResponse:
        """Return a stored response as `response` does, and wait for its answer if that is only now ending."""
        await self.wait_until_settled(name)
        return await self.run(lambda store: store.response(name))

    def response(self, name: str) -> responses.StoredResponse:
        """Return a stored response by its id. Raises NotFound."""
        _, conversation, *_ = location = self._place(name)
        stored = self.get(conversation)
        return responses.load_response(self._db, name, location, stored.model, stored.messages)

    def _place(self, name: str) -> tuple[str, str, int, int]:
        location = responses.find_location(self._db, name) if self._file.exists() else None
        if location is None:
            raise NotFound(f"There is no response '{name[:80]}': it was not kept, or was deleted.")
        return location

    def statistics(self, days: int, pair: str) -> Statistics:
        """Return sums over the answers of the last `days`, of `pair` alone unless that is empty."""
        return statistics.statistics(self._db if self._file.exists() else None, days, pair)

    def add_figures(self, answer: StoredMessage) -> None:
        """Store the figures of an answer that belongs to no conversation."""
        with self._db as db:
            db.execute(
                "INSERT INTO figures VALUES"
                " (:created, :model, :kind, :tokens, :seconds, :drafted, :accepted, :speed_up)",
                msgspec.structs.asdict(answer),
            )

    def begin_turn(self, key: str, turn: unfinished.Turn) -> None:
        """Keep a turn until `add` or `drop_turn` is called with its key."""
        row = (key, turn.addition.id, msgspec.msgpack.encode(turn))
        with self._db as db:
            db.execute("INSERT INTO unfinished_turns VALUES (?, ?, ?)", row)
        self._kept.add(key)

    def update_turn(self, key: str, answer: StoredMessage) -> None:
        """Keep the answer of a turn as far as it is written."""
        if key in self._kept:
            with self._db as db:
                db.execute(
                    "INSERT INTO unfinished_answers SELECT ?1, ?2, ?3"
                    " WHERE EXISTS (SELECT 1 FROM unfinished_turns WHERE key = ?1)"
                    " ON CONFLICT (key) DO UPDATE SET updated = excluded.updated, answer = excluded.answer",
                    (key, time.time(), msgspec.msgpack.encode(answer)),
                )

    def drop_turn(self, key: str) -> None:
        """Delete a turn that is not to be stored."""
        if key in self._kept:
            with self._db as db:
                db.execute(_END_TURN, (key,))
                db.execute("PRAGMA application_id = 0")
            self._clean_later()
            self._kept.discard(key)

    def _store_left_turns(self) -> None:
        """Store the turns that a daemon left unfinished. They are the newest ones of the history."""
        for key, turn in unfinished.load(self._db):
            (newest,) = self._db.execute("SELECT max(updated) FROM conversations").fetchone()
            turn.addition.updated = max(turn.addition.updated, (newest or 0.0) + 0.001)
            self._kept.add(key)
            self.end_turn(key, turn)

    def end_turn(self, key: str, turn: unfinished.Turn) -> None:
        """Add a turn, or drop it if its owner has removed the conversation meanwhile."""
        try:
            self.add(turn, key)
        except NotFound as error:
            log.info("an answer was not stored: %s", error.message)
            self.drop_turn(key)
        self._remember_lost("")

    def add(self, turn: unfinished.Turn, key: str = "") -> None:
        """Append the messages of a turn to its conversation, and set the conversation's pair to its pair.

        They replace `cut`, the last stored answer, if they complete it. If the conversation has gone on
        without the response that this one continues, the messages go into a copy of the conversation's
        beginning. The turn is no longer kept as unfinished under `key`. Raises NotFound if the turn, the
        conversation, the continued response or `cut` was removed in the meantime.
        """
        addition, cut, response, new = turn.addition, turn.cut, turn.response, turn.new
        with self._db as db:
            was_dropped = key in self._kept and not db.execute(_END_TURN, (key,)).rowcount
            continues = response and response.continues
            continued = responses.find_location(db, continues) if continues else None
            query = "SELECT 1 FROM conversations WHERE id = ?"
            exists = continued if continues else db.execute(query, (addition.id,)).fetchone()
            if was_dropped or not (new or exists):
                self._forget_traces(addition.id)
                raise NotFound(f"Conversation {addition.id} was removed in the meantime.")
            if continued:
                name = self._branch(db, addition.id, continued)
                addition = msgspec.structs.replace(addition, id=name)
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET updated = excluded.updated, model = excluded.model",
                (addition.id, addition.created, addition.updated, addition.model, addition.title),
            )
            if any(message.role == "system" for message in addition.messages):
                query = "DELETE FROM messages WHERE conversation = ? AND role = 'system'"
                db.execute(query, (addition.id,))
            if cut is not None:
                replaced = db.execute(_DELETE_LAST_ANSWER, (addition.id, cut.content)).rowcount
                if not replaced:
                    problem = f"the answer to be continued in {addition.id} was removed meanwhile."
                    raise NotFound(problem)
            last = _last_position(db, addition.id)
            for position, message in enumerate(addition.messages, last + 1):
                # The system message is stored first, whichever turn it came with.
                place = 0 if message.role == "system" else position
                row = (addition.id, place, *_column_values(message))
                db.execute(f"INSERT INTO messages VALUES ({', '.join('?' * len(row))})", row)
            if response is not None:
                # Its turn begins after the last message, and its answer ends the turn.
                turn_range = last + 1, last + len(addition.messages)
                db.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                    (response.id, addition.id, *turn_range, response.body),
                )
        self._kept.discard(key)

    def _branch(
        self, db: sqlite3.Connection, name: str, continued: tuple[str, str, int, int]
    ) -> str:
        """Return the conversation for a turn that continues the response `continued`; create it for a branch.

        `name` is the conversation under which the turn was answered.
        """
        _, conversation, _, position = continued
        if name != conversation:
            responses.copy_beginning(db, conversation, position, name)
        elif position != _last_position(db, name):
            # Another turn was stored while this one was answered. The prompt was logged, and its state may
            # be saved, under a conversation that the turn will not be part of and not be removed with.
            self._forget_traces(name)
            name = secrets.token_hex(4)
            responses.copy_beginning(db, conversation, position, name)
        return name

    def _forget_traces(self, name: str) -> None:
        """Remove a conversation's prompts from the log and from the engine."""
        logs.forget_prompts(name)
        self.on_removed_meanwhile(name)

    def remove(self, name: str) -> str:
        """Remove a conversation with its states, log entries and typed lines, and return its id."""
        begun = unfinished.find_conversations(self._db, name) if self._file.exists() else []
        found = begun[0] if len(begun) == 1 and name else self._find(name).id
        rows = self._db.execute(
            "SELECT content FROM messages WHERE conversation = ? AND role != 'assistant'", (found,)
        )
        prompts = [content for (content,) in rows]
        for _, turn in unfinished.load(self._db, found):
            prompts += [message.content for message in turn.addition.messages[:-1]]
        with self._forgetting(found, prompts), self._deleting() as db:
            db.execute("DELETE FROM conversations WHERE id = ?", (found,))
            db.execute("DELETE FROM unfinished_turns WHERE conversation = ?", (found,))
        return found

    def remove_response(self, name: str) -> str:
        """Remove a stored response with its question, and return the id of its conversation.

        A conversation that holds nothing else is removed as well. Raises NotFound.
        """
        _, conversation, first, last = self._place(name)
        turn = (conversation, first, last)
        (other_messages,) = self._db.execute(
            "SELECT count(*) FROM messages WHERE conversation = ? AND role != 'system'"
            " AND position NOT BETWEEN ? AND ?",
            turn,
        ).fetchone()
        if not other_messages:
            return self.remove(conversation)
        with self._forgetting(conversation, []), self._deleting() as db:
            db.execute(
                "DELETE FROM messages WHERE conversation = ? AND position BETWEEN ? AND ?", turn
            )
        return conversation

    def remove_all(self) -> int:
        """Remove every conversation and return their number."""
        count = 0
        with self._forgetting(None, None):
            if self._file.exists():
                with self._deleting() as db:
                    count = db.execute("DELETE FROM conversations").rowcount
                    db.execute("DELETE FROM figures")
                    db.execute("DELETE FROM unfinished_turns")
        return count

    def remove_states(self, name: str | None) -> None:
        """Delete the saved prompt states of a conversation, or of all if `name` is None."""
        for folder in [self._states / name] if name else self._states.glob("*"):
            remove_tree(folder)

    def collect(self, *, dry_run: bool) -> list[tuple[str, int]]:
        """Delete saved states of removed conversations, and return their names and sizes in bytes."""
        known_ids = {ANONYMOUS_CLIENTS}
        if self._file.exists():
            known_ids |= {row[0] for row in self._db.execute("SELECT id FROM conversations")}
        orphans = []
        for path in sorted(self._states.glob("*/*")):
            if path.parent.name not in known_ids:
                orphans.append((f"{path.parent.name}/{path.name}", path.lstat().st_size))
                if not dry_run:
                    path.unlink(missing_ok=True)
        return orphans

    def undo(self, name: str) -> Undone:
        """Remove the last question and everything after it, and the conversation if that was its only one."""
        entry = self._find(name)
        with self._db as db:
            question = db.execute(
                "SELECT position, content FROM messages WHERE conversation = ? AND role = 'user'"
                " ORDER BY position DESC LIMIT 1",
                (entry.id,),
            ).fetchone()
            if question is None:
                raise NotFound(f"Conversation {entry.id} has no question left to remove.")
            (questions_left,) = db.execute(
                "SELECT count(*) FROM messages"
                " WHERE conversation = ? AND role = 'user' AND position < ?",
                (entry.id, question[0]),
            ).fetchone()
        position, text = question
        if questions_left:
            with self._forgetting(entry.id, [text]), self._deleting() as db:
                db.execute(
                    "DELETE FROM messages WHERE conversation = ? AND position >= ?",
                    (entry.id, position),
                )
        else:
            self.remove(entry.id)
        return Undone(entry.id, text, questions_left)

    @contextlib.contextmanager
    def _forgetting(self, name: str | None, prompts: Sequence[str] | None) -> Iterator[None]:
        """Delete what else holds the text of a conversation whose messages the block deletes; None: of all.

        Those are drafts that learned from it, saved states, the log, and the lines that were typed for
        `prompts`. States and log are deleted whole, since each prompt holds those before it.
        """
        # First, so that no draft that learned from the conversation outlives it if the daemon dies now.
        remove_tuned_drafts(self._tuned, name)
        with contextlib.ExitStack() as cleanups:  # a failure of one does not skip the others
            cleanups.callback(self.remove_states, name)
            cleanups.callback(logs.forget_prompts, name)
            cleanups.callback(database.remove_typed_lines, self._typed_lines, prompts)
            yield

    @contextlib.contextmanager
    def _deleting(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, and clean the file afterwards so that no deleted text remains on the disk."""
        with self._db as db:
            yield db
            # The file counts as not clean until `database.clean` has run, if need be in a later process.
            db.execute("PRAGMA application_id = 0")
        if database.size_bytes(db) <= _CLEANED_AT_ONCE_BYTES:
            self._clean()
        else:
            self._clean_later()
            database.empty_log(db, self._file)

    def _clean(self) -> None:
        self._clean_by = None
        database.clean(self._db, self._file)

    def _clean_later(self) -> None:
        if self._clean_by is None:
            self._clean_by = time.monotonic() + _CLEAN_WITHIN_S
        timer = threading.Timer(_CLEAN_AFTER_S, self.submit, [ConversationStore._clean_if_idle])
        timer.daemon = True
        timer.start()

    def _clean_if_idle(self) -> None:
        """Clean the file if that is still to be done and holds nobody back, else try it later."""
        if self._clean_by is None:
            return
        if self._under_way and time.monotonic() < self._clean_by:
            self._clean_later()
        else:
            self._clean()

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = database.open_database(self._file)
            try:
                self._safely(ConversationStore._store_left_turns)
            except LocalspecError as error:  # they are kept for the next daemon
                log.error("a conversation was not stored: %s", error.message)
                self._remember_lost(error.message)
        return self._connection


def _column_values(message: StoredMessage) -> list[Any]:
    values = msgspec.structs.asdict(message)
    calls = values["tool_calls"]
    values["tool_calls"] = json.dumps(calls, ensure_ascii=False) if calls else None
    return list(values.values())


def _last_position(db: sqlite3.Connection, name: str) -> int:
    """Return the position of a conversation's last message, 0 if it has none."""
    (position,) = db.execute(
        "SELECT coalesce(max(position), 0) FROM messages WHERE conversation = ?", (name,)
    ).fetchone()
    return int(position)
