"""Whatever is typed in a chat, its screen, the daemon's history and what the model is asked agree."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from typing import Any

import pytest

from tests.support.daemons import Home, wait_for
from tests.support.terminal import ESCAPES, Terminal, terminal

PROMPT = "\x1b[?2004h"  # prompt_toolkit's first word of every prompt
STEPS = 40


class Person:
    """Somebody who types at random; `turns` are the questions and answers that should be left."""

    def __init__(self, home: Home, shown: Terminal, seed: int, *, kept: bool) -> None:
        self.home, self.shown, self.kept = home, shown, kept
        self.random = random.Random(seed)
        self.turns: list[tuple[str, str]] = []
        self.others: list[list[tuple[str, str]]] = []  # conversations before
        self.system: str | None = None
        self.said_system: str | None = None
        self.seed: int | None = None
        self.lost: set[str] = set()
        self.unkept: tuple[str, str] | None = None  # a turn that goes with the next question
        self.before = {each["id"] for each in self.listed()}
        wait_for(lambda: self._prompts() == 1, "the first prompt")

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.home.request(
            "GET", "/localspec/conversations?limit=10000"
        ).json["conversations"]
        return found

    def _prompts(self) -> int:
        self.shown._read(0.01)
        return self.shown.raw.count(PROMPT)

    def type(self, typed: str, stop_at: str = "") -> str:
        """What is shown for a line until the next prompt; Ctrl-C when `stop_at` is among it."""
        start, prompts = len(self.shown.raw), self._prompts()
        self.shown.send(f"{typed}\r")
        if stop_at:
            wait_for(lambda: self._prompts() and stop_at in self._since(start), stop_at)
            self.shown.interrupt()
        wait_for(lambda: self._prompts() == prompts + 1, f"the prompt after {typed!r}")
        return self._since(start)

    def _since(self, start: int) -> str:
        shown = ESCAPES.sub("", self.shown.raw[start:])
        return shown.replace("^C", "")  # the terminal's echo

    def _word(self) -> str:
        return f"{self.random.getrandbits(32):08x}"

    def _said(self, question: str, answer: str) -> None:
        self._keep()
        self.turns.append((question, answer))
        self.said_system = self.system

    def _keep(self) -> None:
        if self.unkept is not None:
            self.turns.append(self.unkept)
            self.unkept = None

    # ------------------------------------------------------------------ deeds

    def say(self) -> None:
        words = " ".join(self._word() for _ in range(self.random.choice([1, 2, 30])))
        shown = self.type(f"say {words}").replace("\n", "")
        assert re.search(f"(?<!say ){words}", shown)
        self._said(f"say {words}", words)

    def say_what_looks_like_a_command(self) -> None:
        text = self.random.choice(["/undo", "/new now", "exitus", "quit it", "/etc/fstab"])
        text = f"{text} {self._word()}"
        typed = self.random.choice([f" {text}", f'"""{text}"""'])
        assert text in self.type(typed)
        self._said(text, text)

    def say_lines(self) -> None:
        one, two = self._word(), self._word()
        self.type(self.random.choice([f'"""say {one}\r{two}"""', f"say {one}\x1b\r{two}"]))
        self._said(f"say {one}\n{two}", f"{one} {two}")

    def edit(self) -> None:
        assert "› say edited" in self.type("/edit")
        self.type("")
        self._said("say edited", "edited")

    def stop(self) -> None:
        shown = self.type("forever", stop_at="3 4")
        assert "Stopped; the partial answer is part of the conversation." in shown
        numbers = re.findall(r"0 1 2 [0-9 ]*", shown)
        assert numbers, shown
        self._said("forever", numbers[-1].rstrip())

    def stop_early(self) -> None:
        self.shown.send("late 30\r")
        wait_for(lambda: self.home.status()["running"], "the question at the engine")
        prompts = self._prompts()
        self.shown.interrupt()
        wait_for(lambda: self._prompts() == prompts + 1, "the prompt")
        assert "Stopped before the answer began" in self.shown.text

    def think(self) -> None:
        assert "the partial answer is part" in self.type("think", stop_at="3 4")
        self._said("think", "")

    def lose_the_engine(self) -> None:
        """At most once: a pair whose engine died too often is set aside."""
        if "engine" not in self.lost:
            self.lost.add("engine")
            assert "localspec: " in self.type("die SIGKILL")
            self._said("die SIGKILL", "one two")

    def lose_the_daemon(self) -> None:
        """Its answers are kept when they end."""
        if "daemon" not in self.lost:
            self.lost.add("daemon")
            pid = self.home.status()["pid"]
            start, prompts = len(self.shown.raw), self._prompts()
            self.shown.send("forever\r")
            wait_for(lambda: self._prompts() and "3 4" in self._since(start), "the answer")
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: self._prompts() == prompts + 1, "the prompt")
            assert "localspec: " in self._since(start)
            answer = re.findall(r"0 1 2 [0-9 ]*", self._since(start))[-1].rstrip()
            if self.kept:
                self.unkept = "forever", answer
            else:
                self._said("forever", answer)
            self.home.run("start")

    def be_refused(self) -> None:
        assert "Refused as told." in self.type("refuse context_length_exceeded")

    def undo(self) -> None:
        shown = self.type("/undo")
        if self.unkept is not None:
            assert "Removed: forever" in shown
            self.unkept = None
            return
        if not self.turns:
            assert "There is no question to remove." in shown
            return
        question, _ = self.turns.pop()
        assert f"Removed: {question.splitlines()[0][:60]}" in shown
        if not self.turns:
            self.said_system = None

    def regenerate(self) -> None:
        if self.unkept is not None:
            return
        if not self.turns:
            assert "There is no question to answer again." in self.type("/regen")
        elif self.turns[-1][0].startswith(("say", "/", "exit", "quit")):
            question, answer = self.turns.pop()
            if question.startswith("say"):  # it may have been continued
                answer = " ".join(question.split()[1:])
            shown = self.type("/regen").replace("\n", "")
            assert answer.replace("\n", "") in shown
            self._said(question, answer)

    def go_on(self) -> None:
        """The engine goes on from an answer with the same again."""
        if self.unkept is not None:
            return
        if not self.turns:
            assert "There is no answer to continue." in self.type("/continue")
        elif self.turns[-1][0].startswith("say"):
            self.type("/continue")
            question, answer = self.turns.pop()
            self._said(question, answer + answer)

    def begin_anew(self) -> None:
        shown = self.type(self.random.choice(["/new", "/clear", "/reset"]))
        assert "Started a new conversation." in shown
        assert ("is saved" in shown) == bool(self.turns and self.kept)
        if self.turns:
            self.others.append(self.turns)
        self.turns, self.said_system, self.unkept = [], None, None

    def set_system(self) -> None:
        self.system = f"Be {self._word()}."
        self.type(f"/system {self.system}")

    def set_seed(self) -> None:
        self.seed = self.random.randrange(1000)
        assert f"seed is {self.seed} from" in self.type(f"/set seed {self.seed}")

    def look(self) -> None:
        """Markdown may break lines elsewhere."""
        shown, at = "".join(self.type("/history").split()), 0
        for text in (text for turn in self.turns for text in turn):
            compact = "".join(text.split())
            at = shown.index(compact, at) + len(compact)

    def ask_what_is_asked(self) -> None:
        """The engine answers with what it got."""
        self._keep()
        self.type("echo")
        found = self.home.request("GET", "/localspec/conversations/last").json
        if not self.kept:
            found = {"messages": [{"content": self._shown_json()}]}
        answer = found["messages"][-1]["content"]
        frame = json.loads(answer)
        told = [(each["role"], each["content"]) for each in frame["prompt"]["messages"]]
        system = [("system", self.system)] if self.system else []
        turns = [
            pair
            for question, text in self.turns
            for pair in (("user", question), ("assistant", text))
        ]
        assert [(role, text.rstrip()) for role, text in told] == [
            (role, text.rstrip()) for role, text in [*system, *turns, ("user", "echo")]
        ]
        assert frame["sampling"].get("seed") == self.seed
        self._said("echo", answer)

    def _shown_json(self) -> str:
        return str(re.findall(r'\{"type":"Generate".*\}', self.shown.text)[-1])

    # ------------------------------------------------------------------ afterwards

    def check(self) -> None:
        """The history has what was shown, and nothing else."""
        entries = [each for each in self.listed() if each["id"] not in self.before]
        wanted = [each for each in [*self.others, self.turns] if each] if self.kept else []
        assert len(entries) == len(wanted)
        for entry, turns in zip(reversed(entries), wanted, strict=True):
            found = self.home.request("GET", f"/localspec/conversations/{entry['id']}").json
            said = [each for each in found["messages"] if each["role"] != "system"]
            texts = [each["content"].rstrip() for each in said]
            assert texts == [text.rstrip() for turn in turns for text in turn]
            assert entry["title"].split()[0] == turns[0][0].split()[0]
        if self.kept and self.turns:
            found = self.home.request("GET", f"/localspec/conversations/{entries[0]['id']}").json
            system = [each["content"] for each in found["messages"] if each["role"] == "system"]
            assert system == ([self.said_system] if self.said_system else [])


@pytest.mark.parametrize(("seed", "options"), [(1, ()), (2, ()), (3, ("--no-log",))])
def test_screen_history_and_model_agree(home: Home, seed: int, options: tuple[str, ...]) -> None:
    home.use_fake()
    assert home.run("start").returncode == 0
    editor = home.root / "editor"
    editor.write_text('#!/bin/sh\necho "say edited" > "$1"; touch -d "+2 seconds" "$1"\n')
    editor.chmod(0o755)
    environment = {**home.environment, "EDITOR": str(editor), "VISUAL": ""}
    with terminal(environment, "chat", "--plain", *options, columns=400) as shown:
        person = Person(home, shown, seed, kept=not options)
        deeds = [
            *[person.say] * 4,
            *[person.undo, person.regenerate] * 3,
            *[person.stop, person.think, person.ask_what_is_asked, person.look] * 2,
            *[person.go_on, person.begin_anew, person.set_system, person.set_seed, person.edit],
            *[person.say_what_looks_like_a_command, person.say_lines],
            *[person.stop_early, person.be_refused, person.lose_the_engine, person.lose_the_daemon],
        ]
        for _ in range(STEPS):
            deed = person.random.choice(deeds)
            print(deed.__name__)  # pytest shows it of a walk that fails
            deed()
            person.check()
        shown.send("/exit\r")
        assert shown.wait() == 0
