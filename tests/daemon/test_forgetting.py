"""Deleted conversations leave no text in any file, however the daemon ends."""

from __future__ import annotations

import random
import shlex
import signal
import sqlite3
import sys
import threading
from typing import Any

import pytest
from prompt_toolkit.history import FileHistory

from tests.support.daemons import Home, RunningDaemon, real_home, wait_for


def find_words(home: Home, *words: str) -> dict[str, list[str]]:
    """Return the words that are in files of the home, by the path of the file."""
    words_by_file: dict[str, list[str]] = {}
    for path in home.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if held := [word for word in words if word.encode() in data]:
                words_by_file[str(path.relative_to(home.root))] = held
    return words_by_file


class Person:
    """A random user. `kept` has the words that must be in files, `gone` those that must not be."""

    def __init__(self, home: Home, seed: int) -> None:
        self.home = home
        self.random = random.Random(seed)
        self.kept: dict[str, list[str]] = {}  # by conversation, a word for each question
        self.gone: list[str] = []
        self.system: dict[str, str] = {}  # the word of each conversation's system message
        (home.root / "state").mkdir(exist_ok=True)
        self._typed = FileHistory(str(home.root / "state" / "chat_history"))

    def _question(self) -> tuple[str, str]:
        """Return a word and a question in which every part of a database page contains it."""
        word = f"{self.random.getrandbits(64):016x}"
        return word, f"say {' '.join([word] * self.random.choice([1, 3, 40, 300, 2000]))}"

    def _say(self, conversation: str) -> str:
        word, text = self._question()
        if self.random.random() < 0.5:
            self._typed.store_string(text if self.random.random() < 0.5 else f'"""\n{text}\n"""')
        attached = "notes.txt:\n```\nnothing\n```\n\n" if self.random.random() < 0.3 else ""
        messages: list[dict[str, str]] = [{"role": "user", "content": attached + text}]
        system = f"{self.random.getrandbits(64):016x}" if self.random.random() < 0.3 else ""
        if system:
            self._typed.store_string(f"/system {system}")
            messages.insert(0, {"role": "system", "content": system})
        body = {"messages": messages, "localspec": {"conversation": conversation}}
        answer = self.home.request("POST", "/v1/chat/completions", body)
        name: str = answer.json["localspec"]["conversation"]
        self.kept.setdefault(name, []).append(word)
        if system:
            self.system[name] = system
        return name

    def ask(self) -> None:
        self._say("new")

    def go_on(self) -> None:
        if self.kept:
            self._say(self.random.choice(list(self.kept)))

    def take_back(self) -> None:
        name = self.random.choice([each for each in self.kept if self.kept[each]] or [""])
        if name:
            undone = self.home.request("POST", f"/localspec/conversations/{name}/undo")
            assert undone.status == 200
            self.gone.append(self.kept[name].pop())
            if not self.kept[name]:  # the conversation went with its only question
                self._forget(name)

    def remove(self) -> None:
        if self.kept:
            name = self.random.choice(list(self.kept))
            assert self.home.request("DELETE", f"/localspec/conversations/{name}").status == 200
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.gone += [*self.kept.pop(name), *filter(None, [self.system.pop(name, "")])]

    def remove_all(self) -> None:
        removed = self.home.request("DELETE", "/localspec/conversations").json["removed"]
        assert removed == len(self.kept)
        for name in [*self.kept]:
            self._forget(name)

    def check(self) -> None:
        """Check that no deleted word and every kept word is found."""
        assert not find_words(self.home, *self.gone)
        for name, words in self.kept.items():
            conversation = self.home.request("GET", f"/localspec/conversations/{name}").json
            answers = [
                message["content"]
                for message in conversation["messages"]
                if message["role"] == "assistant"
            ]
            assert len(answers) == len(words)
            assert all(word in text for word, text in zip(words, answers, strict=True))


@pytest.mark.parametrize("seed", [1, 2])
def test_deleted_texts_are_in_no_file(home: Home, seed: int) -> None:
    daemon = home.start(log_prompts="true")
    person = Person(home, seed)
    deeds = [person.ask] * 6 + [person.go_on] * 5 + [person.remove] * 4 + [person.take_back]
    for _ in range(60):
        deed = person.random.choice(deeds)
        deed()
        if deed == person.remove:
            person.check()
    assert person.gone
    person.check()
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.communicate()
    assert not find_words(home, *person.gone)
    daemon = RunningDaemon(home)
    person.check()
    person.ask()
    person.remove_all()
    assert not find_words(home, *person.gone)
    person.ask()
    person.check()
    daemon.stop()
    assert not find_words(home, *person.gone)


def test_nothing_of_a_private_question_is_kept_once_it_is_answered() -> None:
    word = f"{random.getrandbits(64):016x}"
    with real_home(log_prompts="true") as home:
        question = f"What is {' '.join([word] * 20)}?"
        assert home.run("ask", "--no-log", "-n", "8", question).returncode == 0
        assert not find_words(home, word)
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
        timings = home.request("POST", "/v1/chat/completions", body).json["timings"]
        assert timings["cache_n"] < 8  # what any question begins with


def test_typed_lines_of_other_conversations_stay(home: Home, daemon: RunningDaemon) -> None:
    file = home.root / "state" / "chat_history"
    typed = FileHistory(str(file))
    file.touch(mode=0o600)
    for line in ("say first", "two\nlines", "/system be brief", "say second", "/help"):
        typed.store_string(line)
    name = home.chat("say first", localspec={"conversation": "new"}).json["localspec"]
    home.request("DELETE", f"/localspec/conversations/{name['conversation']}")
    remaining = list(FileHistory(str(file)).load_history_strings())
    assert remaining == ["/help", "say second", "/system be brief", "two\nlines"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_lines_and_states_behind_symbolic_links_are_deleted(
    home: Home, daemon: RunningDaemon
) -> None:
    for target, link in (("lines", "state/chat_history"), ("saved", "cache/conversations")):
        (home.root / link).parent.mkdir(exist_ok=True)
        (home.root / link).symlink_to(home.root / target)
    (home.root / "saved/ab12").mkdir(parents=True)
    (home.root / "saved/ab12/x.state").write_text("sesame")
    (home.root / "lines").write_text("\n# now\n+say sesame\n+say more\n")
    name = home.chat("say sesame\nsay more", localspec={"conversation": "new"}).json["localspec"]
    home.request("DELETE", f"/localspec/conversations/{name['conversation']}")
    assert (home.root / "lines").read_text() == ""
    (home.root / "lines").write_text("\n# now\n+say sesame\n")
    assert home.request("DELETE", "/localspec/conversations").status == 200
    assert not find_words(home, "sesame")


def test_a_running_answer_does_not_restore_a_deleted_conversation(
    home: Home, daemon: RunningDaemon
) -> None:
    name = home.chat("say secret", localspec={"conversation": "new"}).json["localspec"]
    with home.streaming("slow 20", localspec=name) as stream:
        stream.readline()
        assert home.request("DELETE", f"/localspec/conversations/{name['conversation']}").json
        stream.read()
    assert home.request("GET", "/localspec/conversations").json["conversations"] == []
    assert not find_words(home, "secret", "slow 20")


def test_remains_in_a_file_of_an_older_version_are_cleaned(
    home: Home, daemon: RunningDaemon
) -> None:
    home.chat("say hello", localspec={"conversation": "new"})
    daemon.stop()
    file = home.root / "data" / "conversations.sqlite"
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA secure_delete = OFF")
        db.execute("PRAGMA application_id = 0")
        db.execute("CREATE TABLE scratch (text TEXT)")
        db.execute("INSERT INTO scratch VALUES (?)", ("sesame " * 5000,))
        db.execute("DROP TABLE scratch")
    db.close()
    assert find_words(home, "sesame")
    running = RunningDaemon(home)
    assert len(home.request("GET", "/localspec/conversations").json["conversations"]) == 1
    assert not find_words(home, "sesame")
    running.stop()


def test_an_interrupted_deletion_is_finished_at_the_next_start(home: Home) -> None:
    """The daemon exits between the deletion and the cleaning of the file."""
    program = (
        "import os, sys\n"
        "from localspec.daemon.history import database\n"
        "database.clean = lambda db, file: os._exit(9)\n"
        "from localspec.daemon.__main__ import main\n"
        "sys.exit(main())"
    )
    daemon = home.start(program=program)
    name: Any = home.chat("say sesame", localspec={"conversation": "new"}).json["localspec"]
    with pytest.raises((OSError, ValueError, EOFError)):
        home.request("DELETE", f"/localspec/conversations/{name['conversation']}")
    daemon.process.communicate()
    assert find_words(home, "sesame")
    daemon = RunningDaemon(home)
    assert home.request("GET", "/localspec/conversations").json["conversations"] == []
    assert not find_words(home, "sesame")


# An engine that creates a file when it starts to save, and goes on once that file is removed.
SLOW_SAVING = """
import sys, time
from pathlib import Path
from localspec.engine.cache import sessions as states
real, mark = states.SessionStore._write_file, Path({mark!r})
def slowly(self, file, prefix, deadline):
    mark.touch()
    while mark.exists():
        time.sleep(0.01)
    real(self, file, prefix, None)
states.SessionStore._write_file = slowly
from localspec.engine.worker import main
main(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("all_of_them", [False, True])
def test_an_unloading_engine_saves_nothing_that_was_deleted(home: Home, all_of_them: bool) -> None:
    mark = home.root / "saving"
    command = [sys.executable, "-c", SLOW_SAVING.format(mark=str(mark))]
    home.environment["LOCALSPEC_ENGINE"] = shlex.join(command)
    daemon = RunningDaemon(home)
    question = " ".join(f"copy(a{at}, b{at})" for at in range(80))
    fields: Any = {"max_tokens": 4, "localspec": {"conversation": "new"}}
    names = [
        home.chat(f"{at} {question}", **fields).json["localspec"]["conversation"] for at in range(2)
    ]
    unloading = threading.Thread(target=lambda: home.request("POST", "/localspec/unload", {}))
    unloading.start()
    wait_for(mark.exists, "the engine to save")
    targets = [""] if all_of_them else [f"/{name}" for name in names]
    answers: list[Any] = []
    removing = threading.Thread(
        target=lambda: answers.extend(
            home.request("DELETE", f"/localspec/conversations{target}").status for target in targets
        )
    )
    removing.start()
    wait_for(
        lambda: not home.request("GET", "/localspec/conversations").json["conversations"], "it"
    )
    mark.unlink()
    removing.join()
    assert answers == [200] * len(targets)
    saved = home.root / "cache" / "conversations"
    assert not list(saved.glob("*/*"))
    unloading.join()
    assert not list(saved.glob("*/*"))
    daemon.stop()
    assert not list(saved.glob("*/*"))


def test_what_cannot_be_deleted_is_reported(home: Home) -> None:
    home.start(log_prompts="true")
    name: Any = home.chat("say sesame", localspec={"conversation": "new"}).json["localspec"]
    (home.root / "state" / "chat_history").mkdir()
    answer = home.request("DELETE", f"/localspec/conversations/{name['conversation']}")
    assert answer.status >= 400
    assert "chat_history" in answer.error["message"]
    assert not find_words(home, "sesame")
