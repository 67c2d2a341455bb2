"""Conversations that clients asked to keep: SQLite in the data folder, one thread that owns it.

A request says `"localspec": {"conversation": "new" | "last" | ID}`; its messages are added to that
conversation's, and question and answer are stored when the answer ends, however it ends. Nothing is
stored for a request that does not ask. The thread makes the order of writes and reads that of the
requests, so a question that follows at once finds its conversation whole, and no answer waits for
the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from localspec.daemon import logs
from localspec.daemon.history import database, matches, responses, statistics, typed
from localspec.errors import Conflict, InvalidRequest, LocalspecError, NotFound
from localspec.files import write_whole
from localspec.paths import read_file, remove_tree
from localspec.protocol.conversations import (
    Conversation,
    ConversationEntry,
    StoredMessage,
    Undone,
)
from localspec.protocol.frames import ANYONE
from localspec.protocol.statistics import Statistics

if TYPE_CHECKING:
    import sqlite3

log = logging.getLogger("localspec.daemon")
Result = TypeVar("Result")

LAST = "last"
_ENTRY = (
    "SELECT id, title, model, created, updated,"
    " (SELECT count(*) FROM messages WHERE conversation = id AND role != 'system')"
    " FROM conversations "
)
_MESSAGE = (
    "SELECT role, content, created, finish, model, tokens, tokens_per_second, drafted, accepted,"
    " speed_up, reasoning_content, tool_calls, tool_call_id, name, kind,"
    " seconds FROM messages WHERE conversation = ? ORDER BY position"
)

_DELETE_LAST = (
    "DELETE FROM messages WHERE conversation = ?1 AND content = ?2 AND role = 'assistant'"
    " AND position = (SELECT max(position) FROM messages WHERE conversation = ?1)"
)


class Conversations:
    """The store. Every method but `run` blocks: call it through `run`.

    Each of these may raise Conflict: the file is of a newer localspec, cannot be used, or (after
    something was removed) is read by another program.
    """

    def __init__(self, file: Path, states: Path, typed_lines: Path, lost: Path) -> None:
        """`states`: where the engine saves what it remembers, in a folder for each by its id;
        `typed_lines`: what people typed in chats (typed.py); `lost`: that an answer was not stored.
        """
        self._file = file
        self._states = states
        self._typed_lines = typed_lines
        # Called in the thread, for an engine may have begun with a conversation after its removal.
        self.removed_meanwhile: Callable[[str], object] = lambda _: None
        self._under_way: dict[asyncio.Event, str] = {}  # turns that are not stored yet
        self._lost_file = lost
        self._lost = ""  # why the newest turn is not stored, where it is not
        with contextlib.suppress(OSError):
            self._lost = read_file(lost).decode("utf-8", "replace")
        self._opened: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="conversations")

    async def run(self, work: Callable[[Conversations], Result]) -> Result:
        """`work(self)` in the thread, after everything that was asked for before.

        Raises:
            Conflict: the file cannot be used; and whatever `work` raises.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._safely, work)

    def soon(self, work: Callable[[Conversations], object]) -> None:
        """As `run`, with nobody waiting; a failure is in the log."""

        def logged() -> None:
            try:
                self._safely(work)
            except LocalspecError as error:
                log.error("a conversation was not stored: %s", error.message)

        with contextlib.suppress(RuntimeError):  # the daemon has ended
            self._thread.submit(logged)

    def keep(
        self,
        said: Conversation,
        *,
        new: bool,
        cut: StoredMessage | None = None,
        response: responses.Response | None = None,
    ) -> Future[str]:
        """As `add`, with nobody who has to wait: why it could not be done, else nothing."""

        def kept() -> str:
            lost = ""
            try:
                self._safely(lambda each: each.add(said, new=new, cut=cut, response=response))
            except NotFound as error:  # its owner did not want it
                log.info("an answer was not stored: %s", error.message)
            except LocalspecError as error:
                log.error("a conversation was not stored: %s", error.message)
                lost = error.message
            self._remember_lost(lost)
            return lost

        try:
            return self._thread.submit(kept)
        except RuntimeError:  # the daemon has ended
            ended: Future[str] = Future()
            ended.set_result("")
            return ended

    def _remember_lost(self, why: str) -> None:
        """Beyond the daemon's end, too, where that can be."""
        if why != self._lost:
            self._lost = why
            with contextlib.suppress(OSError):
                self._lost_file.unlink(missing_ok=True)
                if why:
                    write_whole(self._lost_file, why.encode())

    @contextlib.asynccontextmanager
    async def answering(self, name: str) -> AsyncIterator[None]:
        """A turn of conversation `name` is under way meanwhile; at the end it is stored or dropped."""
        over = asyncio.Event()
        self._under_way[over] = name
        try:
            yield
        finally:
            del self._under_way[over]
            over.set()

    async def settled(self, name: str) -> None:
        """Wait for the turns under way of the conversation that `name` is, or is the beginning, of.

        A client knows the name with the first word of an answer. It may leave and ask again before
        the daemon has seen it leave and stored what it got.
        """
        while turns := [over for over, each in self._under_way.items() if each.startswith(name)]:
            await turns[0].wait()

    def _safely(self, work: Callable[[Conversations], Result]) -> Result:
        """SQLite's errors as one of ours; a full disk must not look like a bug."""
        import sqlite3

        try:
            return work(self)
        except sqlite3.Error as error:
            raise Conflict(f"The history {self._file} cannot be used: {error}.") from error
        except OSError as error:
            file = error.filename or self._file
            raise Conflict(f"The history cannot be used: {file}: {error.strerror}.") from error

    def close(self) -> None:
        """Store what is still to be stored, and close the file."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    # ------------------------------------------------------------------ reading

    def listing(self, limit: int = 50, search: str = "") -> list[ConversationEntry]:
        """The newest first; with `search` those that have that text, in any case, and where."""
        if not self._file.exists():
            return []
        wanted = search.casefold()
        rows = self._db.execute(
            f"{_ENTRY}WHERE ?1 = '' OR {matches.SAID} ORDER BY updated DESC, rowid DESC LIMIT ?2",
            (wanted, limit),
        )
        entries = [ConversationEntry(*row) for row in rows]
        if wanted:
            for entry in entries:
                entry.match = matches.first(self._db, entry, wanted)
        return entries

    def get(self, name: str) -> Conversation:
        """One conversation by its id, the beginning of it, or "last".

        Raises:
            NotFound: there is none of that name.
            InvalidRequest: more than one begins so.
            Conflict: "last" was not stored, so that another one would be taken for it.
        """
        entry = self._find(name)
        messages = [_from_row(row) for row in self._db.execute(_MESSAGE, (entry.id,))]
        return Conversation(
            entry.id, entry.title, entry.model, entry.created, entry.updated, messages
        )

    def _find(self, name: str) -> ConversationEntry:
        if not self._file.exists():
            raise NotFound("There are no conversations yet; `localspec ask` starts one.")
        if name == LAST:
            if self._lost:
                raise Conflict(
                    f"The last answer was not saved, so there is no 'last' conversation: {self._lost} "
                    "Name an earlier one by its id (--cid ID). See: localspec history"
                )
            rows = self._db.execute(f"{_ENTRY}ORDER BY updated DESC, rowid DESC LIMIT 1").fetchall()
        else:
            begins = f"{_ENTRY}WHERE substr(id, 1, length(?)) = ? LIMIT 2"
            rows = self._db.execute(begins, (name, name)).fetchall()
        if not rows and name == LAST:
            raise NotFound("There are no conversations yet; `localspec ask` starts one.")
        if not rows or not name:
            raise NotFound(f"There is no conversation '{name}'. See: localspec history")
        if len(rows) > 1:
            raise InvalidRequest(f"More than one conversation ID starts with '{name}'.")
        return ConversationEntry(*rows[0])

    async def kept_response(self, name: str) -> responses.Kept:
        """Return a kept response by its id, also one whose answer is only now ending.

        Raises:
            NotFound: there is none.
        """
        await self.settled(name)
        return await self.run(lambda each: each.response(name))

    def response(self, name: str) -> responses.Kept:
        """A kept response by its id.

        Raises:
            NotFound: there is none.
        """
        _, conversation, *_ = where = self._place(name)
        found = self.get(conversation)
        return responses.kept(self._db, name, where, found.model, found.messages)

    def _place(self, name: str) -> tuple[str, str, int, int]:
        where = responses.place(self._db, name) if self._file.exists() else None
        if where is None:
            raise NotFound(f"There is no response '{name[:80]}': it was not kept, or was deleted.")
        return where

    def statistics(self, days: int, pair: str) -> Statistics:
        """Kept answers of the `days` that end today added up; with `pair` of that pair alone."""
        return statistics.statistics(self._db if self._file.exists() else None, days, pair)

    # ------------------------------------------------------------------ writing

    def add_figures(self, answer: StoredMessage) -> None:
        """Keep an answer's figures alone."""
        with self._db as db:
            db.execute(
                "INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(answer.created, answer.model, answer.kind, answer.tokens, answer.seconds),
                    *(answer.drafted, answer.accepted, answer.speed_up),
                ),
            )

    def add(
        self,
        said: Conversation,
        *,
        new: bool,
        cut: StoredMessage | None = None,
        response: responses.Response | None = None,
    ) -> None:
        """Store messages of a conversation, whose model is from now on that of `said`. They take the
        place of `cut`, its last message. `response`: what the last of them answers; where the conversation
        has gone on without that, they go into one that begins like it.

        Raises:
            NotFound: the conversation, the answer that `response` continues, or `cut` was removed while
                the answer was being written.
        """
        with self._db as db:
            continues = response and response.continues
            continued = responses.place(db, continues) if continues else None
            known = continued if continues else _is_known(db, said.id)
            if not (new or known):
                self._forget_traces(said.id)
                raise NotFound(f"Conversation {said.id} was removed in the meantime.")
            if continued:
                said = msgspec.structs.replace(said, id=self._branch(db, said.id, continued))
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET updated = excluded.updated, model = excluded.model",
                (said.id, said.created, said.updated, said.model, said.title),
            )
            if any(message.role == "system" for message in said.messages):
                db.execute(
                    "DELETE FROM messages WHERE conversation = ? AND role = 'system'", (said.id,)
                )
            if cut is not None and not db.execute(_DELETE_LAST, (said.id, cut.content)).rowcount:
                raise NotFound(f"the answer to be continued in {said.id} was removed meanwhile.")
            last = _last(db, said.id)
            for position, message in enumerate(said.messages, last + 1):
                # The system message comes first, whenever it was said.
                place = 0 if message.role == "system" else position
                values = _to_row(message)
                marks = ", ".join("?" * (len(values) + 2))
                db.execute(f"INSERT INTO messages VALUES ({marks})", (said.id, place, *values))
            if response is not None:
                responses.insert(db, said.id, last + 1, last + len(said.messages), response)

    def _branch(
        self, db: sqlite3.Connection, name: str, continued: tuple[str, str, int, int]
    ) -> str:
        """Return the conversation for a turn that goes on from `continued`; create it if it is a branch.

        `name` is the conversation under which the turn was answered.
        """
        _, conversation, _, position = continued
        if name != conversation:
            responses.branch(db, conversation, position, name)
        elif position != _last(db, name):
            # Another turn was stored while this one was answered. The prompt was logged, and its state may
            # be saved, under a conversation that the turn will not be part of and not be removed with.
            self._forget_traces(name)
            name = secrets.token_hex(4)
            responses.branch(db, conversation, position, name)
        return name

    def _forget_traces(self, name: str) -> None:
        """Remove what the log and the engine hold of a conversation's prompts."""
        logs.forget_prompts(name)
        self.removed_meanwhile(name)

    def remove(self, name: str) -> str:
        """Forget one, with all that was written of it; its id. The engine is told apart.

        Raises:
            NotFound, InvalidRequest: as `get`.
        """
        entry = self._find(name)
        asked = self._asked(entry.id)
        with contextlib.ExitStack() as also:  # each is tried, whatever goes wrong with another
            also.callback(self.remove_states, entry.id)
            also.callback(logs.forget_prompts, entry.id)
            also.callback(typed.forget, self._typed_lines, asked)
            with self._deleting() as db:
                db.execute("DELETE FROM conversations WHERE id = ?", (entry.id,))
        return entry.id

    def remove_response(self, name: str) -> str:
        """Forget a kept response with what was asked for it; the id of its conversation, which goes too
        where nothing else is in it. The engine is told apart.

        Raises:
            NotFound: there is none.
        """
        _, conversation, first, last = self._place(name)
        turn = (conversation, first, last)
        (others,) = self._db.execute(
            "SELECT count(*) FROM messages WHERE conversation = ? AND role != 'system'"
            " AND position NOT BETWEEN ? AND ?",
            turn,
        ).fetchone()
        if not others:
            return self.remove(conversation)
        self.remove_states(conversation)
        with self._deleting() as db:
            db.execute(
                "DELETE FROM messages WHERE conversation = ? AND position BETWEEN ? AND ?", turn
            )
        return conversation

    def remove_all(self) -> int:
        """Forget everything; how many there were. The engine is told apart."""
        count = 0
        with contextlib.ExitStack() as also:
            also.callback(self.remove_states, None)
            also.callback(logs.forget_prompts, None)
            also.callback(typed.forget_all, self._typed_lines)
            if self._file.exists():
                with self._deleting() as db:
                    count = db.execute("DELETE FROM conversations").rowcount
                    db.execute("DELETE FROM figures")
        return count

    def remove_states(self, name: str | None) -> None:
        """Delete what the engine saved of a conversation, with None of all."""
        for each in [self._states / name] if name else self._states.glob("*"):
            remove_tree(each)

    def collect(self, *, dry_run: bool) -> list[tuple[str, int]]:
        """Delete saved states of conversations that are gone; names and bytes."""
        known = {ANYONE}
        if self._file.exists():
            known |= {row[0] for row in self._db.execute("SELECT id FROM conversations")}
        found = []
        for path in sorted(self._states.glob("*/*")):
            if path.parent.name not in known:
                found.append((f"{path.parent.name}/{path.name}", path.lstat().st_size))
                if not dry_run:
                    path.unlink(missing_ok=True)
        return found

    def undo(self, name: str) -> Undone:
        """Take back the last question and all that came after it; with the only one the conversation.

        Raises:
            NotFound, InvalidRequest: as `get`; NotFound also where no question is left.
        """
        entry = self._find(name)
        with self._db as db:
            row = db.execute(
                "SELECT position, content FROM messages WHERE conversation = ? AND role = 'user'"
                " ORDER BY position DESC LIMIT 1",
                (entry.id,),
            ).fetchone()
            if row is None:
                raise NotFound(f"Conversation {entry.id} has no question left to remove.")
            (left,) = db.execute(
                "SELECT count(*) FROM messages"
                " WHERE conversation = ? AND role = 'user' AND position < ?",
                (entry.id, row[0]),
            ).fetchone()
        if left:
            with self._deleting() as db:
                db.execute(
                    "DELETE FROM messages WHERE conversation = ? AND position >= ?",
                    (entry.id, row[0]),
                )
            typed.forget(self._typed_lines, [row[1]])
        else:
            self.remove(entry.id)
        return Undone(entry.id, row[1], left)

    def _asked(self, name: str) -> list[str]:
        """What people said in a conversation."""
        rows = self._db.execute(
            "SELECT content FROM messages WHERE conversation = ? AND role != 'assistant'", (name,)
        )
        return [row[0] for row in rows]

    @contextlib.contextmanager
    def _deleting(self) -> Iterator[sqlite3.Connection]:
        """A transaction after which what it deletes is in no page of the file nor beside it."""
        with self._db as db:
            yield db
            db.execute("PRAGMA application_id = 0")  # until it is clean again, also by the next run
        database.clean(db, self._file)

    # ------------------------------------------------------------------ the file

    @property
    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = database.opened(self._file)
        return self._opened


def _is_known(db: sqlite3.Connection, name: str) -> bool:
    return bool(db.execute("SELECT 1 FROM conversations WHERE id = ?", (name,)).fetchone())


def _last(db: sqlite3.Connection, name: str) -> int:
    """The position of a conversation's last message."""
    (last,) = db.execute(
        "SELECT coalesce(max(position), 0) FROM messages WHERE conversation = ?", (name,)
    ).fetchone()
    return int(last)


def _to_row(message: StoredMessage) -> list[Any]:
    calls = message.tool_calls
    message = msgspec.structs.replace(message, tool_calls=None)
    values = msgspec.structs.asdict(message)
    values["tool_calls"] = json.dumps(calls, ensure_ascii=False) if calls else None
    return list(values.values())


def _from_row(row: Sequence[Any]) -> StoredMessage:
    message = StoredMessage(*row)
    if isinstance(message.tool_calls, str):
        message.tool_calls = json.loads(message.tool_calls)
    return message
