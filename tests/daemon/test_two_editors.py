"""Several editors of one program with the same headers and slot do not disturb each other."""

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

from tests.support.daemons import (
    Answer,
    Home,
    RunningDaemon,
    scripted_home,
    wait_for,
)
from tests.support.patience import PATIENCE

# A daemon with a shorter timeout for requests whose editor is not certain.
SHORT_TIMEOUT_DAEMON = """
import sys
from localspec.daemon.completion import llama_server
llama_server.UNSURE_TIMEOUT_S = 0.2
from localspec.daemon.__main__ import main
sys.exit(main())
"""
Connect = Callable[[], "EditorRequest"]


class EditorRequest:
    """A completion request like llama.vim's, over TCP and on a connection of its own."""

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


class DelayedRequest(EditorRequest):
    """A request of which only the head is sent at first."""

    def go(self) -> None:
        """Send nothing yet."""

    def send(self) -> None:
        super().go()


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with scripted_home("--pace", "0.004", listen="127.0.0.1:0") as home:
        yield home


def type_text(home: Home, seed: int, above: str) -> list[str]:
    """Type in one editor and return the wrong answers.

    The editor waits for some answers and hangs up on others. The scripted engine answers with the
    text around the cursor.
    """
    rng = random.Random(seed)
    failures = []
    for stroke in range(12):
        below = f"below {stroke} " + " ".join(f"w{n}" for n in range(rng.randrange(12)))
        request = EditorRequest(
            home, input_prefix=above, input_suffix=below, prompt="def f" + "x" * stroke
        )
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
            request.leave()
            continue
        answer = request.read()
        if answer.status != 200 or answer.json.get("content") != f"{above}|{below}".strip():
            failures.append(f"{answer.status} {answer.body!r:.200}")
    return failures


@pytest.mark.parametrize("documents", ["different", "the same"])
def test_editors_with_the_same_headers_get_their_own_answers(served: Home, documents: str) -> None:
    same = documents == "the same"
    with ThreadPoolExecutor(4) as pool:
        tasks = [
            pool.submit(
                type_text, served, 7 if same else seed, "a file" if same else f"file {seed}"
            )
            for seed in range(4)
        ]
    assert [task.result() for task in tasks] == [[]] * 4


def test_identical_requests_are_all_answered(served: Home) -> None:
    hole = {
        "input_prefix": "the file",
        "input_suffix": " ".join(map(str, range(30))),
        "prompt": "x",
    }
    requests = [EditorRequest(served, **hole) for _ in range(4)]
    contents = [request.read().json["content"] for request in requests]
    assert contents == [f"the file|{hole['input_suffix']}"] * 4


def test_a_newer_completion_cancels_the_older_one(home: Home) -> None:
    home.use_fake(listen="127.0.0.1:0")
    for program, fields in ((SHORT_TIMEOUT_DAEMON, {}), ("", {"user": "me"})):
        daemon = RunningDaemon(home, program=program)
        older = EditorRequest(home, input_prefix="p", prompt="!forever", n_predict=-1, **fields)
        wait_for(lambda: home.status()["running"] == 1, "the older completion")
        elsewhere = EditorRequest(home, input_prefix="q", prompt="!forever", n_predict=-1)
        wait_for(lambda: home.status()["running"] == 2, "that of another editor")
        newer = EditorRequest(home, input_prefix="p", prompt="!say new", **fields).read()
        assert (newer.status, newer.json["content"]) == (200, "new")
        ended = older.read()
        assert (ended.status, ended.error["code"]) == (499, "cancelled")
        assert "content" not in ended.json
        assert home.status()["running"] == 1
        elsewhere.leave()
        daemon.stop()


@pytest.mark.parametrize("seed", range(3))
def test_the_newest_request_wins_in_any_order_of_bodies(served: Home, seed: int) -> None:
    """An editor may close a request and send the next one, and the daemon may read that one first."""
    hole = {"input_prefix": "p", "prompt": "!forever", "n_predict": -1, "user": "me"}
    bystander = EditorRequest(served, input_prefix="q", prompt="!forever", n_predict=-1, user="you")
    requests = [DelayedRequest(served, **hole) for _ in range(5)]
    for request in random.Random(seed).sample(requests, len(requests)):
        request.send()
    for older in requests[:-1]:
        answer = older.read()
        assert (answer.status, answer.error["code"]) == (499, "cancelled")
    assert served.status()["running"] == 2
    for remaining in (requests[-1], bystander):
        remaining.leave()
    wait_for(lambda: served.status()["running"] == 0, "the end of both")
