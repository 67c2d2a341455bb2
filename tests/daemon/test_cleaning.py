"""Test that deleted text leaves a large history soon, without holding questions back."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.daemon.history import database
from localspec.daemon.history import store as store_module
from localspec.daemon.history.store import ConversationStore
from localspec.daemon.history.unfinished import Turn
from localspec.paths import Paths
from localspec.protocol.conversations import Conversation, StoredMessage
from tests.support.daemons import wait_for

WORD = "a-word-that-nobody-writes"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConversationStore]:
    """Yield a store that takes its history for a large one."""
    monkeypatch.setattr(store_module, "_CLEANED_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(store_module, "_CLEAN_AFTER_S", 0.05)
    store = ConversationStore(Paths(*[tmp_path] * 5))
    for number in range(50):
        text = f"{WORD if number == 20 else number} " * 500
        messages = [StoredMessage("user", text, 1.0), StoredMessage("assistant", text, 1.0)]
        turn = Turn(Conversation(f"{number:04}", "", "pair", 1.0, 1.0, messages), True)
        store._thread.submit(store.add, turn).result()
    yield store
    store.close()


def is_clean(folder: Path) -> bool:
    with sqlite3.connect(folder / "conversations.sqlite") as db:
        (mark,) = db.execute("PRAGMA application_id").fetchone()
    db.close()
    return bool(mark == database._CLEAN_APPLICATION_ID)


def holds_word(folder: Path) -> bool:
    return any(WORD.encode() in path.read_bytes() for path in folder.glob("conversations.sqlite*"))


def remove(store: ConversationStore) -> None:
    """Remove the conversation in the store's thread, as requests do."""
    store._thread.submit(store.remove, "0020").result()


def test_a_large_history_is_cleaned_soon(store: ConversationStore, tmp_path: Path) -> None:
    assert holds_word(tmp_path)
    remove(store)
    wait_for(lambda: is_clean(tmp_path), "the cleaning")
    assert not holds_word(tmp_path)


def test_questions_are_answered_first(
    store: ConversationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    store._under_way[asked] = "other"
    remove(store)
    for _ in range(5):
        store._thread.submit(store._clean_if_idle).result()
        assert not is_clean(tmp_path)
    monkeypatch.setattr(store, "_clean_by", 0.0)  # the time is over
    wait_for(lambda: is_clean(tmp_path), "the cleaning")
    del store._under_way[asked]


def test_a_store_that_closes_is_cleaned(store: ConversationStore, tmp_path: Path) -> None:
    store._under_way[asyncio.Event()] = "other"
    remove(store)
    store._thread.submit(store._close).result()
    assert is_clean(tmp_path)
    assert not holds_word(tmp_path)
    store._connection = None


def test_a_refused_question_is_cleaned_away(store: ConversationStore, tmp_path: Path) -> None:
    question = [StoredMessage("user", f"refused {WORD}", 1.0), StoredMessage("assistant", "", 1.0)]
    turn = Turn(Conversation("new", "", "pair", 1.0, 1.0, question), True)
    remove(store)
    store._thread.submit(store.begin_turn, "key", turn).result()
    store._thread.submit(store.drop_turn, "key").result()
    wait_for(lambda: is_clean(tmp_path), "the cleaning")
    assert not holds_word(tmp_path)
