"""Editors of one program, which send the same headers and the same slot: none takes from another."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import PATIENCE, Answer, Home, RunningDaemon, temporary_home, wait_for

# The daemon, with less time for those of whom it is not sure.
HURRIED = """
import sys
from localspec.daemon.completion import llama_server
llama_server.UNSURE_TIMEOUT_S = 0.2
from localspec.daemon.__main__ import main
sys.exit(main())
"""
Connect = Callable[[], "Asked"]


class Asked:
    """A completion that was asked for over TCP as llama.vim does, each on its own connection."""

    def __init__(self, home: Home, **fields: Any) -> None:
        status = home.status()
        port = int(status["listen"].rpartition(":")[2])
        token = Path(status["token_file"]).read_text().strip()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        headers = {"authorization": f"Bearer {token}", "user-agent": "curl/7.88.1"}
        fields = {"id_slot": 0, "n_predict": 64, "response_fields": ["content"], **fields}
        self._body = json.dumps(fields).encode()
        self._connection.putrequest("POST", "/infill")
        for name, value in {**headers, "content-length": str(len(self._body))}.items():
            self._connection.putheader(name, value)
        self._connection.endheaders()
        self.go()

    def go(self) -> None:
        self._connection.send(self._body)

    def read(self) -> Answer:
        answer = Answer(self._connection.getresponse())
        self._connection.close()
        return answer

    def leave(self) -> None:
        self._connection.close()


class Slow(Asked):
    """One of which only the head is sent at first."""

    def go(self) -> None:
        """Not yet."""

    def send(self) -> None:
        super().go()


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake("--pace", "0.004", listen="127.0.0.1:0")
        daemon = RunningDaemon(home)
        yield home
        daemon.stop()


def typing(home: Home, seed: int, above: str) -> list[str]:
    """One editor's keystrokes. Before some it waits for its answer, before others it hangs up.

    The scripted engine answers with the text around the cursor; what is wrong is returned.
    """
    chosen = random.Random(seed)
    wrong = []
    for stroke in range(12):
        below = f"below {stroke} " + " ".join(f"w{n}" for n in range(chosen.randrange(12)))
        asked = Asked(home, input_prefix=above, input_suffix=below, prompt="def f" + "x" * stroke)
        if chosen.random() < 0.3:
            time.sleep(chosen.random() * 0.02)
            asked.leave()
            continue
        answer = asked.read()
        if answer.status != 200 or answer.json.get("content") != f"{above}|{below}".strip():
            wrong.append(f"{answer.status} {answer.body!r:.200}")
    return wrong


@pytest.mark.parametrize("documents", ["different", "the same"])
def test_editors_of_one_program_all_get_their_own_answers(served: Home, documents: str) -> None:
    same = documents == "the same"
    with ThreadPoolExecutor(4) as pool:
        tasks = [
            pool.submit(typing, served, 7 if same else seed, "a file" if same else f"file {seed}")
            for seed in range(4)
        ]
    assert [task.result() for task in tasks] == [[]] * 4


def test_two_that_ask_for_the_very_same_are_both_answered(served: Home) -> None:
    hole = {
        "input_prefix": "the file",
        "input_suffix": " ".join(map(str, range(30))),
        "prompt": "x",
    }
    asked = [Asked(served, **hole) for _ in range(4)]
    contents = [each.read().json["content"] for each in asked]
    assert contents == [f"the file|{hole['input_suffix']}"] * 4


def test_an_editors_own_older_completion_is_ended_soon_over_tcp_and_at_once_by_its_name(
    home: Home,
) -> None:
    home.use_fake(listen="127.0.0.1:0")
    for program, fields in ((HURRIED, {}), ("", {"user": "me"})):
        daemon = RunningDaemon(home, program=program)
        older = Asked(home, input_prefix="p", prompt="!forever", n_predict=-1, **fields)
        wait_for(lambda: home.status()["running"] == 1, "the older completion")
        elsewhere = Asked(home, input_prefix="q", prompt="!forever", n_predict=-1)
        wait_for(lambda: home.status()["running"] == 2, "that of another editor")
        newer = Asked(home, input_prefix="p", prompt="!say new", **fields).read()
        assert (newer.status, newer.json["content"]) == (200, "new")
        ended = older.read()
        assert (ended.status, ended.error["code"]) == (499, "cancelled")
        assert "content" not in ended.json
        assert home.status()["running"] == 1
        elsewhere.leave()
        daemon.stop()


@pytest.mark.parametrize("seed", range(3))
def test_the_request_that_came_last_is_answered_in_whatever_order_the_bodies_come(
    served: Home, seed: int
) -> None:
    """An editor that types fast closes a request and sends the next: the daemon may read that one first."""
    hole = {"input_prefix": "p", "prompt": "!forever", "n_predict": -1, "user": "me"}
    bystander = Asked(served, input_prefix="q", prompt="!forever", n_predict=-1, user="you")
    asked = [Slow(served, **hole) for _ in range(5)]
    for each in random.Random(seed).sample(asked, len(asked)):
        each.send()
    for older in asked[:-1]:
        answer = older.read()
        assert (answer.status, answer.error["code"]) == (499, "cancelled")
    assert served.status()["running"] == 2
    for left in (asked[-1], bystander):
        left.leave()
    wait_for(lambda: served.status()["running"] == 0, "the end of both")
