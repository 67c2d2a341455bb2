"""Test that a daemon that is killed loses neither the question nor most of the answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.daemon.history.store import ConversationStore
from localspec.daemon.history.unfinished import Turn
from localspec.errors import NotFound
from localspec.paths import Paths
from localspec.protocol.conversations import Conversation, StoredMessage
from tests.support.daemons import Home, RunningDaemon, Stream, temporary_home, wait_for

NEW = {"conversation": "new"}


@pytest.fixture
def started() -> Iterator[tuple[Home, RunningDaemon]]:
    with temporary_home() as home:
        home.use_fake()
        yield home, RunningDaemon(home)


def kill(daemon: RunningDaemon) -> None:
    daemon.process.kill()
    daemon.process.communicate()


def read_rest(stream: Stream) -> str:
    """Return the text of a stream from which nothing was read, up to where its daemon was killed."""
    lines = []
    with contextlib.suppress(OSError, http.client.HTTPException):
        while line := stream.readline():
            lines.append(line)
    text = ""
    for line in lines:
        if line.endswith(b"\n") and line.startswith(b"data: {"):
            [choice] = json.loads(line[6:])["choices"] or [{"delta": {}}]
            text += choice["delta"].get("content") or ""
    return text


def list_conversations(home: Home) -> list[list[tuple[str, str]]]:
    """Return the texts of all conversations, the newest first."""
    entries = home.request("GET", "/localspec/conversations").json["conversations"]
    return [
        [(message["content"], message.get("finish", "")) for message in stored["messages"]]
        for stored in (
            home.request("GET", f"/localspec/conversations/{entry['id']}").json for entry in entries
        )
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_daemon_leaves_the_question_and_a_part_of_the_answer(
    started: tuple[Home, RunningDaemon], seed: int
) -> None:
    """It is the last conversation, and `ask -c` goes on with it."""
    home, daemon = started
    draws = random.Random(seed)
    home.chat("say older", localspec=NEW)
    for _ in range(2):
        where = draws.choice(["new", "last"])
        before = list_conversations(home)
        with home.streaming("slow 500", localspec={"conversation": where}) as stream:
            wait_for(lambda: home.status()["running"], "the question at the engine")
            time.sleep(draws.choice([0.0, 0.1, 0.7, 2.0]))
            kill(daemon)
            seen = read_rest(stream)
        daemon = RunningDaemon(home)
        earlier, *rest = [[], *before] if where == "new" else before
        *kept, question, (answer, finish) = list_conversations(home)[0]
        assert (kept, question, finish) == (earlier, ("slow 500", ""), "interrupted")
        assert list_conversations(home)[1:] == rest
        assert seen.startswith(answer)
        assert len(answer) >= len(seen) / 4 - 30
        home.must_run("ask", "-c", "-n", "5")
        *_, question, (longer, _) = list_conversations(home)[0]
        assert question == ("slow 500", "")
        assert longer.startswith(answer)
        assert len(longer) > len(answer)
    kill(daemon)


def test_a_question_is_kept_before_its_answer_begins(started: tuple[Home, RunningDaemon]) -> None:
    home, daemon = started
    home.chat("say older", localspec=NEW)
    with home.streaming("late 60", localspec=NEW):
        wait_for(lambda: home.status()["running"], "the question at the engine")
        kill(daemon)
    daemon = RunningDaemon(home)
    assert list_conversations(home)[0] == [("late 60", ""), ("", "interrupted")]
    # Nothing was answered, so the question is asked again as it was.
    run = home.run("ask", "-c", "echo")
    assert '"content":"late 60"' in run.stdout
    kill(daemon)


def ask(home: Home, prompt: str, until: str = "", **fields: Any) -> None:
    """Ask, and leave at the first line of the answer that contains `until`."""
    with home.streaming(prompt, localspec={**NEW, **fields}) as stream:
        while until.encode() not in (line := stream.readline()) or not until:
            if not line:
                return


def remove_under_way(home: Home) -> None:
    """Remove a new conversation while its first answer is written, by the id that the client knows."""
    with home.streaming("slow 100", localspec=NEW) as stream:
        line = next(line for line in iter(stream.readline, b"") if b'"conversation":' in line)
        name = json.loads(line[6:])["localspec"]["conversation"]
        assert home.request("DELETE", f"/localspec/conversations/{name}").status == 200
        stream.read()


def remove_all_under_way(home: Home) -> None:
    with home.streaming("slow 100", localspec=NEW) as stream:
        stream.await_text()
        assert home.request("DELETE", "/localspec/conversations").status == 200
        stream.read()


# How answers end, and what the history keeps of each: the beginning of the answer's text, and its end.
ENDS: dict[str, tuple[Callable[[Home], object], list[tuple[str, str]]]] = {
    "all removed": (remove_all_under_way, []),  # first, since it removes what others leave
    "complete": (lambda home: ask(home, "say it"), [("it", "stop")]),
    "left": (lambda home: ask(home, "forever", until="5 "), [("0 1 2 3", "interrupted")]),
    "dead engine": (lambda home: ask(home, "die SIGKILL"), [("one two", "failed")]),
    "dead engine before a token": (lambda home: ask(home, "deadly SIGKILL"), [("", "failed")]),
    "refused": (lambda home: ask(home, "refuse context_length_exceeded"), []),
    "not understood": (lambda home: home.chat("x", localspec=NEW, top_p=7), []),
    "private": (lambda home: home.chat("x", localspec={"private": True}), []),
    "removed": (remove_under_way, []),
}


def test_what_has_ended_leaves_nothing_unfinished(started: tuple[Home, RunningDaemon]) -> None:
    home, daemon = started
    expected: list[tuple[str, str]] = []
    for act, kept in ENDS.values():
        act(home)
        wait_for(lambda: not home.status()["running"], "its end")
        expected = kept + expected
    for _ in range(3):
        conversations = list_conversations(home)
        assert len(conversations) == len(expected)
        for [_, (answer, finish)], (beginning, end) in zip(conversations, expected, strict=True):
            assert answer.startswith(beginning)
            assert bool(answer) == bool(beginning)
            assert finish == end
        kill(daemon)
        daemon = RunningDaemon(home)
    kill(daemon)


def test_private_questions_are_not_kept(started: tuple[Home, RunningDaemon]) -> None:
    home, daemon = started
    with (
        home.streaming("late 60 SECRETWORD", localspec={"private": True}),
        home.streaming("late 60 SECRETWORD"),
    ):
        wait_for(lambda: home.status()["running"] == 2, "the questions at the engine")
        kill(daemon)
    files = [path for path in home.root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"SECRETWORD" in path.read_bytes()]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["new", "go on", "write", "end", "drop", "remove", "remove all", "undo", "kill"]
        ),
        st.integers(0, 3),
    ),
    max_size=30,
)


@dataclass
class Answering:
    """A turn that is being answered. It is `gone` if its conversation was removed meanwhile."""

    name: str
    turn: Turn
    saved: int = 0  # the number of the event that saved it last
    gone: bool = False

    @property
    def texts(self) -> list[str]:
        return [message.content for message in self.turn.addition.messages]


class Model:
    """A store, and what it should hold: the texts of each conversation, and what is being answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, list[str]] = {}
        self.answering: dict[str, Answering] = {}
        self.count = 0
        self.store = self.open()

    def open(self) -> ConversationStore:
        return ConversationStore(Paths(*[self.folder] * 5))

    def act(self, event: str, number: int) -> None:
        self.count += 1
        names, keys = sorted(self.stored), sorted(self.answering)
        if event == "new":
            self.begin(f"{self.count:04}", new=True)
        elif event == "remove all":
            self.store.remove_all()
            self.forget(*names, *(each.name for each in self.answering.values()))
        elif event == "kill":
            self.store._close()
            self.store = self.open()
            for key in sorted(keys, key=lambda key: (self.answering[key].saved, key)):
                self.keep(self.answering.pop(key))
        elif event in ("write", "end", "drop"):
            if keys:
                self.go_on(event, keys[number % len(keys)])
        elif names:
            self.change(event, names[number % len(names)])

    def change(self, event: str, name: str) -> None:
        if event == "go on":
            self.begin(name, new=False)
        elif event == "remove":
            self.store.remove(name)
            self.forget(name)
        else:
            self.store.undo(name)
            del self.stored[name][-2:]
            if not self.stored[name]:
                self.forget(name)

    def go_on(self, event: str, key: str) -> None:
        answering = self.answering[key]
        if event == "write":
            answering.saved = self.count
            answer = answering.turn.addition.messages[-1]
            answer.content += "more "
            self.store.update_turn(key, answer)
            return
        del self.answering[key]
        if event == "drop":
            self.store.drop_turn(key)
        elif answering.gone:
            with pytest.raises(NotFound):
                self.store.add(answering.turn, key)
            self.store.drop_turn(key)
        else:
            self.store.add(answering.turn, key)
            self.keep(answering)

    def begin(self, name: str, *, new: bool) -> None:
        key = f"{self.count:04}"
        question = StoredMessage("user", f"question {key}", 1.0)
        messages = [question, StoredMessage("assistant", "", 1.0, finish="interrupted")]
        turn = Turn(Conversation(name, "", "pair", 1.0, float(self.count), messages), new)
        self.store.begin_turn(key, turn)
        self.answering[key] = Answering(name, turn)

    def keep(self, answering: Answering) -> None:
        if not answering.gone:
            self.stored.setdefault(answering.name, []).extend(answering.texts)

    def forget(self, *names: str) -> None:
        for name in names:
            self.stored.pop(name, None)
        for answering in self.answering.values():
            answering.gone = answering.gone or answering.name in names

    def check(self) -> None:
        found = {
            entry.id: [message.content for message in self.store.get(entry.id).messages]
            for entry in self.store.list_entries(1000)
        }
        assert found == self.stored


@given(EVENTS)
@settings(max_examples=40)
def test_any_sequence_of_events_leaves_what_was_not_removed(events: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder))
        for event, number in events:
            model.act(event, number)
            model.check()
        model.act("kill", 0)
        model.check()
        last = model.store.list_entries(1)
        newest = model.store.get("last") if last else None
        assert newest is None or newest.id == last[0].id
        model.store._close()
