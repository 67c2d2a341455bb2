"""Test random chats: the screen, the stored history and the requests to the model must agree."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from typing import Any

import pytest

from tests.support.daemons import Home, alive, wait_for
from tests.support.terminal import ESCAPES, Terminal, terminal

PROMPT = "\x1b[?2004h"  # prompt_toolkit writes this at the start of every prompt.
STEPS = 40


class RandomUser:
    """A user who types at random; `turns` are the questions and answers that should be stored."""

    def __init__(self, home: Home, session: Terminal, seed: int, *, saved: bool) -> None:
        self.home, self.session, self.saved = home, session, saved
        self.random = random.Random(seed)
        self.turns: list[tuple[str, str]] = []
        self.other_conversations: list[list[tuple[str, str]]] = []  # earlier conversations
        self.system: str | None = None
        self.recorded_system: str | None = None
        self.seed: int | None = None
        self.crashed: set[str] = set()
        self.known_ids = {conversation["id"] for conversation in self.list_conversations()}
        wait_for(lambda: self._prompts() == 1, "the first prompt")

    def list_conversations(self) -> list[dict[str, Any]]:
        conversations: list[dict[str, Any]] = self.home.request(
            "GET", "/localspec/conversations?limit=10000"
        ).json["conversations"]
        return conversations

    def _prompts(self) -> int:
        self.session._read(0.01)
        return self.session.raw.count(PROMPT)

    def type(self, line: str, stop_at: str = "") -> str:
        """Type a line and return the output up to the next prompt; press Ctrl-C at `stop_at`."""
        start, prompts = len(self.session.raw), self._prompts()
        self.session.send(f"{line}\r")
        if stop_at:
            wait_for(lambda: self._prompts() and stop_at in self._since(start), stop_at)
            self.session.interrupt()
        wait_for(lambda: self._prompts() == prompts + 1, f"the prompt after {line!r}")
        return self._since(start)

    def _since(self, start: int) -> str:
        output = ESCAPES.sub("", self.session.raw[start:])
        return output.replace("^C", "")  # the echo of the terminal

    def _word(self) -> str:
        return f"{self.random.getrandbits(32):08x}"

    def _record_turn(self, question: str, answer: str) -> None:
        self.turns.append((question, answer))
        self.recorded_system = self.system

    def say(self) -> None:
        words = " ".join(self._word() for _ in range(self.random.choice([1, 2, 30])))
        output = self.type(f"say {words}").replace("\n", "")
        assert re.search(f"(?<!say ){words}", output)
        self._record_turn(f"say {words}", words)

    def say_like_a_command(self) -> None:
        text = self.random.choice(["/undo", "/new now", "exitus", "quit it", "/etc/fstab"])
        text = f"{text} {self._word()}"
        typed = self.random.choice([f" {text}", f'"""{text}"""'])
        assert text in self.type(typed)
        self._record_turn(text, text)

    def say_lines(self) -> None:
        word_a, word_b = self._word(), self._word()
        self.type(
            self.random.choice([f'"""say {word_a}\r{word_b}"""', f"say {word_a}\x1b\r{word_b}"])
        )
        self._record_turn(f"say {word_a}\n{word_b}", f"{word_a} {word_b}")

    def edit(self) -> None:
        assert "› say edited" in self.type("/edit")
        self.type("")
        self._record_turn("say edited", "edited")

    def stop(self) -> None:
        output = self.type("forever", stop_at="3 4")
        assert "Stopped; the partial answer is part of the conversation." in output
        numbers = re.findall(r"0 1 2 [0-9 ]*", output)
        assert numbers, output
        self._record_turn("forever", numbers[-1].rstrip())

    def stop_early(self) -> None:
        self.session.send("late 30\r")
        wait_for(lambda: self.home.status()["running"], "the question at the engine")
        prompts = self._prompts()
        self.session.interrupt()
        wait_for(lambda: self._prompts() == prompts + 1, "the prompt")
        assert "Stopped before the answer began" in self.session.text

    def think(self) -> None:
        assert "the partial answer is part" in self.type("think", stop_at="3 4")
        self._record_turn("think", "")

    def kill_the_engine(self) -> None:
        """Kill the engine, at most once, because a pair that crashes too often is set aside."""
        if "engine" not in self.crashed:
            self.crashed.add("engine")
            assert "localspec: " in self.type("die SIGKILL")
            self._record_turn("die SIGKILL", "one two")

    def kill_the_daemon(self) -> None:
        """Kill the daemon during an answer, of which the next one has what was saved a moment before."""
        if "daemon" not in self.crashed:
            self.crashed.add("daemon")
            pid = self.home.status()["pid"]
            start, prompts = len(self.session.raw), self._prompts()
            self.session.send("forever\r")
            wait_for(lambda: self._prompts() and "3 4" in self._since(start), "the answer")
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: self._prompts() == prompts + 1, "the prompt")
            wait_for(lambda: not alive(pid), "the end")
            assert "localspec: " in self._since(start)
            answer = re.findall(r"0 1 2 [0-9 ]*", self._since(start))[-1].rstrip()
            self.home.run("start")
            if self.saved:
                conversation = self.home.request("GET", "/localspec/conversations/last").json
                stored = conversation["messages"][-1]["content"].rstrip()
                assert answer.startswith(stored)
                answer = stored
            self._record_turn("forever", answer)

    def be_refused(self) -> None:
        assert "Refused as told." in self.type("refuse context_length_exceeded")

    def undo(self) -> None:
        output = self.type("/undo")
        if not self.turns:
            assert "There is no question to remove." in output
            return
        question, _ = self.turns.pop()
        assert f"Removed: {question.splitlines()[0][:60]}" in output
        if not self.turns:
            self.recorded_system = None

    def regenerate(self) -> None:
        if not self.turns:
            assert "There is no question to answer again." in self.type("/regen")
        elif self.turns[-1][0].startswith(("say", "/", "exit", "quit")):
            question, answer = self.turns.pop()
            if question.startswith("say"):  # The answer may have been continued.
                answer = " ".join(question.split()[1:])
            output = self.type("/regen").replace("\n", "")
            assert answer.replace("\n", "") in output
            self._record_turn(question, answer)

    def continue_answer(self) -> None:
        """Continue the last answer; the scripted engine repeats it."""
        if not self.turns:
            assert "There is no answer to continue." in self.type("/continue")
        elif self.turns[-1][0].startswith("say"):
            self.type("/continue")
            question, answer = self.turns.pop()
            self._record_turn(question, answer + answer)

    def start_conversation(self) -> None:
        output = self.type(self.random.choice(["/new", "/clear", "/reset"]))
        assert "Started a new conversation." in output
        assert ("is saved" in output) == bool(self.turns and self.saved)
        if self.turns:
            self.other_conversations.append(self.turns)
        self.turns, self.recorded_system = [], None

    def set_system(self) -> None:
        self.system = f"Be {self._word()}."
        self.type(f"/system {self.system}")

    def set_seed(self) -> None:
        self.seed = self.random.randrange(1000)
        assert f"seed is {self.seed} from" in self.type(f"/set seed {self.seed}")

    def show_history(self) -> None:
        """Show the history and compare it without blanks, because Markdown may break lines elsewhere."""
        output, position = "".join(self.type("/history").split()), 0
        for text in (text for turn in self.turns for text in turn):
            compact = "".join(text.split())
            position = output.index(compact, position) + len(compact)

    def echo_request(self) -> None:
        """Let the engine echo its request, and compare that with the turns."""
        self.type("echo")
        conversation = self.home.request("GET", "/localspec/conversations/last").json
        if not self.saved:
            conversation = {"messages": [{"content": self._last_frame()}]}
        answer = conversation["messages"][-1]["content"]
        frame = json.loads(answer)
        messages = [
            (message["role"], message["content"]) for message in frame["prompt"]["messages"]
        ]
        system = [("system", self.system)] if self.system else []
        turns = [
            pair
            for question, text in self.turns
            for pair in (("user", question), ("assistant", text))
        ]
        assert [(role, text.rstrip()) for role, text in messages] == [
            (role, text.rstrip()) for role, text in [*system, *turns, ("user", "echo")]
        ]
        assert frame["sampling"].get("seed") == self.seed
        self._record_turn("echo", answer)

    def _last_frame(self) -> str:
        return str(re.findall(r'\{"type":"Generate".*\}', self.session.text)[-1])

    def check(self) -> None:
        """Check that the history contains exactly the turns that were shown."""
        conversations = [
            item for item in self.list_conversations() if item["id"] not in self.known_ids
        ]
        expected = (
            [item for item in [*self.other_conversations, self.turns] if item] if self.saved else []
        )
        assert len(conversations) == len(expected)
        for entry, turns in zip(reversed(conversations), expected, strict=True):
            stored = self.home.request("GET", f"/localspec/conversations/{entry['id']}").json
            messages = [item for item in stored["messages"] if item["role"] != "system"]
            texts = [item["content"].rstrip() for item in messages]
            assert texts == [text.rstrip() for turn in turns for text in turn]
            assert entry["title"].split()[0] == turns[0][0].split()[0]
        if self.saved and self.turns:
            stored = self.home.request(
                "GET", f"/localspec/conversations/{conversations[0]['id']}"
            ).json
            system = [item["content"] for item in stored["messages"] if item["role"] == "system"]
            assert system == ([self.recorded_system] if self.recorded_system else [])


@pytest.mark.parametrize(("seed", "options"), [(1, ()), (2, ()), (3, ("--no-log",))])
def test_screen_history_and_model_agree(home: Home, seed: int, options: tuple[str, ...]) -> None:
    home.use_fake()
    assert home.run("start").returncode == 0
    editor = home.root / "editor"
    editor.write_text('#!/bin/sh\necho "say edited" > "$1"; touch -d "+2 seconds" "$1"\n')
    editor.chmod(0o755)
    environment = {**home.environment, "EDITOR": str(editor), "VISUAL": ""}
    with terminal(environment, "chat", "--plain", *options, columns=400) as session:
        user = RandomUser(home, session, seed, saved=not options)
        actions = [
            *[user.say] * 4,
            *[user.undo, user.regenerate] * 3,
            *[user.stop, user.think, user.echo_request, user.show_history] * 2,
            *[
                user.continue_answer,
                user.start_conversation,
                user.set_system,
                user.set_seed,
                user.edit,
            ],
            *[user.say_like_a_command, user.say_lines],
            *[user.stop_early, user.be_refused, user.kill_the_engine, user.kill_the_daemon],
        ]
        for _ in range(STEPS):
            action = user.random.choice(actions)
            print(action.__name__)  # pytest shows this output when a walk fails.
            action()
            user.check()
        session.send("/exit\r")
        assert session.wait() == 0
