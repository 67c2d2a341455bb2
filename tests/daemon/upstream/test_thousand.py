"""A thousand requests of all kinds through a server, eight at once: none is lost, nothing grows or leaks."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Answer, Home, RunningDaemon, temporary_home, wait_for

COUNT, AT_ONCE = 1000, 8
GROWTH = 6 << 10  # KiB that the daemon may grow by from the first quarter to the end


@dataclass
class Both:
    """Two daemons with scripted engines; the first is `big` of the second."""

    there: Home
    here: Home
    pid: int
    key: str

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        answer = self.here.request(method, path, body)
        assert self.key.encode() not in answer.body
        assert self.key not in str(answer.headers)
        return answer


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with temporary_home() as there, temporary_home() as here:
        there.use_fake(listen="127.0.0.1:0", parallel=AT_ONCE)
        here.use_fake()
        daemons = [RunningDaemon(there), RunningDaemon(here)]
        status = there.status()
        file = Path(status["token_file"])
        added = here.run(
            *("add", "big", "--upstream", f"{status['listen']}/v1", "--key-file", str(file)),
            *("--upstream-model", status["pair"]["name"], "--role", "chat", "--role", "fim"),
        )
        assert added.returncode == 0, added.stderr
        yield Both(there, here, daemons[1].pid, file.read_text().strip())
        for daemon in daemons:
            daemon.stop()


def _chat(both: Both, text: str) -> None:
    body = {"messages": [{"role": "user", "content": f"say {text}"}], "model": "big"}
    answer = both.request("POST", "/v1/chat/completions", body)
    assert answer.text == text
    assert answer.json["usage"]["completion_tokens"] == len(text.split())


def _stream(both: Both, text: str) -> None:
    body = {
        "messages": [{"role": "user", "content": f"say {text}"}],
        "model": "big",
        "stream": True,
    }
    events = both.request("POST", "/v1/chat/completions", body).events
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(chunk.get("content") or "" for chunk in chunks) == text


def _text(both: Both, text: str) -> None:
    body = {"prompt": f"say {text}", "model": "big", "logprobs": 1}
    (choice,) = both.request("POST", "/v1/completions", body).json["choices"]
    assert choice["text"] == text
    assert len(choice["logprobs"]["tokens"]) == len(text.split())


def _native(both: Both, text: str) -> None:
    body = {"prompt": f"say {text}", "model": "big", "return_tokens": True, "n_predict": 2}
    answer = both.request("POST", "/completion", body).json
    assert (answer["content"], answer["tokens"]) == (" ".join(text.split()[:2]), [7, 7])
    assert answer["stop_type"] == "limit"


def _infill(both: Both, text: str) -> None:
    """Each in a file of its own, or one took over from another."""
    body = {"input_prefix": text, "input_suffix": "", "prompt": f"!say {text}", "model": "big"}
    answer = both.request("POST", "/infill", body)
    assert answer.json.get("content") == text, answer.body


def _message(both: Both, text: str) -> None:
    body = {"messages": [{"role": "user", "content": f"say {text}"}], "model": "big"}
    answer = both.request("POST", "/v1/messages", {**body, "max_tokens": 99})
    assert answer.json["content"][0]["text"] == text


def _refused_there(both: Both, text: str) -> None:
    body = {"messages": [{"role": "user", "content": "refuse bad_thing"}], "model": "big"}
    answer = both.request("POST", "/v1/chat/completions", body)
    assert answer.status >= 400
    assert "Refused as told." in answer.error["message"]


def _refused_here(both: Both, text: str) -> None:
    answer = both.request("POST", "/v1/embeddings", {"model": "big", "input": text})
    assert (answer.status, answer.error["param"]) == (400, "model")


def _left(both: Both, text: str) -> None:
    with both.here.streaming("forever", model="big") as stream:
        stream.await_text()


def _bystander(both: Both, text: str) -> None:
    """Asks the pair of this machine."""
    assert both.here.chat(f"say {text}").text == text


KINDS: list[Callable[[Both, str], None]] = [
    *(_chat, _stream, _stream, _text, _native, _infill, _message),
    *(_refused_there, _refused_here, _left, _bystander),
]
ASKED_THERE = {_chat, _stream, _text, _native, _infill, _message, _refused_there, _left}


def ask(both: Both, kinds: list[Callable[[Both, str], None]], seed: int) -> None:
    """All of these, so many at once; the first that goes wrong ends it."""
    draw = random.Random(seed)
    todo = [(kind, " ".join(f"{seed}w{draw.randrange(10**6)}" for _ in range(draw.randint(3, 9))))
            for kind in kinds]  # fmt: skip
    wrong: list[str] = []

    def work() -> None:
        while todo and not wrong:
            try:
                kind, text = todo.pop()
            except IndexError:
                return
            try:
                kind(both, text)
            except Exception as error:
                wrong.append(f"{kind.__name__} of '{text}': {error!r}")

    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def rest(home: Home) -> None:
    wait_for(lambda: not home.status()["running"], "the end of what was left")


def resident(pid: int) -> int:
    """In KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_requests_through_a_server(both: Both) -> None:
    draw = random.Random(22)
    kinds = [draw.choice(KINDS) for _ in range(COUNT)]
    ask(both, kinds[: COUNT // 4], 1)
    before = resident(both.pid)
    ask(both, kinds[COUNT // 4 :], 2)
    for home in (both.there, both.here):
        rest(home)
    assert resident(both.pid) - before < GROWTH

    asked = Counter(kinds)
    (status,) = both.here.status()["upstreams"]
    assert status["requests"] == sum(asked[each] for each in ASKED_THERE)
    assert (status["running"], status["away"]) == (0, False)
    assert status["failed"] == asked[_refused_there]
    metrics = both.request("GET", "/metrics").body.decode()
    assert f'localspec_upstream_requests_total{{pair="big"}} {status["requests"]}' in metrics
    for words in (["status"], ["stats"], ["list"], ["show", "big"], ["doctor"], ["history"]):
        run = both.here.run(*words)
        assert both.key not in run.stdout + run.stderr
    both.request("GET", "/localspec/status")
    files = [each for each in both.here.root.rglob("*") if each.is_file()]
    assert both.here.log in files
    assert not [file for file in files if both.key.encode() in file.read_bytes()]
