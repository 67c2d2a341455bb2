"""A thousand requests of all kinds through a server, eight at a time, without losses or leaks."""

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

COUNT, CONCURRENCY = 1000, 8
MAX_GROWTH_KIB = 6 << 10  # growth of the daemon from the first quarter to the end


@dataclass
class Hosts:
    """Two daemons with scripted engines; the first is `big` of the second."""

    remote: Home
    local: Home
    pid: int
    key: str

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        answer = self.local.request(method, path, body)
        assert self.key.encode() not in answer.body
        assert self.key not in str(answer.headers)
        return answer


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with temporary_home() as remote, temporary_home() as local:
        remote.use_fake(listen="127.0.0.1:0", parallel=CONCURRENCY)
        local.use_fake()
        daemons = [RunningDaemon(remote), RunningDaemon(local)]
        status = remote.status()
        file = Path(status["token_file"])
        local.must_run(
            *("add", "big", "--upstream", f"{status['listen']}/v1", "--key-file", str(file)),
            *("--upstream-model", status["pair"]["name"], "--role", "chat", "--role", "fim"),
        )
        yield Hosts(remote, local, daemons[1].pid, file.read_text().strip())
        for daemon in daemons:
            daemon.stop()


def _send_chat(hosts: Hosts, text: str) -> None:
    body = {"messages": [{"role": "user", "content": f"say {text}"}], "model": "big"}
    answer = hosts.request("POST", "/v1/chat/completions", body)
    assert answer.text == text
    assert answer.json["usage"]["completion_tokens"] == len(text.split())


def _send_stream(hosts: Hosts, text: str) -> None:
    body = {
        "messages": [{"role": "user", "content": f"say {text}"}],
        "model": "big",
        "stream": True,
    }
    events = hosts.request("POST", "/v1/chat/completions", body).events
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(chunk.get("content") or "" for chunk in chunks) == text


def _send_completion(hosts: Hosts, text: str) -> None:
    body = {"prompt": f"say {text}", "model": "big", "logprobs": 1}
    (choice,) = hosts.request("POST", "/v1/completions", body).json["choices"]
    assert choice["text"] == text
    assert len(choice["logprobs"]["tokens"]) == len(text.split())


def _send_native_completion(hosts: Hosts, text: str) -> None:
    body = {"prompt": f"say {text}", "model": "big", "return_tokens": True, "n_predict": 2}
    answer = hosts.request("POST", "/completion", body).json
    assert (answer["content"], answer["tokens"]) == (" ".join(text.split()[:2]), [7, 7])
    assert answer["stop_type"] == "limit"


def _send_infill(hosts: Hosts, text: str) -> None:
    """Each request is for a text of its own, so that none cancels another."""
    body = {"input_prefix": text, "input_suffix": "", "prompt": f"!say {text}", "model": "big"}
    answer = hosts.request("POST", "/infill", body)
    assert answer.json.get("content") == text, answer.body


def _send_message(hosts: Hosts, text: str) -> None:
    body = {"messages": [{"role": "user", "content": f"say {text}"}], "model": "big"}
    answer = hosts.request("POST", "/v1/messages", {**body, "max_tokens": 99})
    assert answer.json["content"][0]["text"] == text


def _send_refused_by_server(hosts: Hosts, text: str) -> None:
    body = {"messages": [{"role": "user", "content": "refuse bad_thing"}], "model": "big"}
    answer = hosts.request("POST", "/v1/chat/completions", body)
    assert answer.status >= 400
    assert "Refused as told." in answer.error["message"]


def _send_refused_locally(hosts: Hosts, text: str) -> None:
    answer = hosts.request("POST", "/v1/embeddings", {"model": "big", "input": text})
    assert (answer.status, answer.error["param"]) == (400, "model")


def _disconnect(hosts: Hosts, text: str) -> None:
    with hosts.local.streaming("forever", model="big") as stream:
        stream.await_text()


def _send_to_local_pair(hosts: Hosts, text: str) -> None:
    """Send a chat to the local pair."""
    assert hosts.local.chat(f"say {text}").text == text


KINDS: list[Callable[[Hosts, str], None]] = [
    *(
        _send_chat,
        _send_stream,
        _send_stream,
        _send_completion,
        _send_native_completion,
        _send_infill,
        _send_message,
    ),
    *(_send_refused_by_server, _send_refused_locally, _disconnect, _send_to_local_pair),
]
REMOTE_KINDS = {
    _send_chat,
    _send_stream,
    _send_completion,
    _send_native_completion,
    _send_infill,
    _send_message,
    _send_refused_by_server,
    _disconnect,
}


def send_all(hosts: Hosts, kinds: list[Callable[[Hosts, str], None]], seed: int) -> None:
    """Send all requests with `CONCURRENCY` threads, and stop at the first failure."""
    rng = random.Random(seed)
    requests = [(kind, " ".join(f"{seed}w{rng.randrange(10**6)}" for _ in range(rng.randint(3, 9))))
            for kind in kinds]  # fmt: skip
    failures: list[str] = []

    def work() -> None:
        while requests and not failures:
            try:
                kind, text = requests.pop()
            except IndexError:
                return
            try:
                kind(hosts, text)
            except Exception as error:
                failures.append(f"{kind.__name__} of '{text}': {error!r}")

    threads = [threading.Thread(target=work) for _ in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def wait_until_idle(home: Home) -> None:
    wait_for(lambda: not home.status()["running"], "the end of what was left")


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_requests_through_a_server(hosts: Hosts) -> None:
    draw = random.Random(22)
    kinds = [draw.choice(KINDS) for _ in range(COUNT)]
    send_all(hosts, kinds[: COUNT // 4], 1)
    before = resident_kib(hosts.pid)
    send_all(hosts, kinds[COUNT // 4 :], 2)
    for home in (hosts.remote, hosts.local):
        wait_until_idle(home)
    assert resident_kib(hosts.pid) - before < MAX_GROWTH_KIB

    counts = Counter(kinds)
    (status,) = hosts.local.status()["upstreams"]
    assert status["requests"] == sum(counts[send] for send in REMOTE_KINDS)
    assert (status["running"], status["away"]) == (0, False)
    assert status["failed"] == counts[_send_refused_by_server]
    metrics = hosts.request("GET", "/metrics").body.decode()
    assert f'localspec_upstream_requests_total{{pair="big"}} {status["requests"]}' in metrics
    for words in (["status"], ["stats"], ["list"], ["show", "big"], ["doctor"], ["history"]):
        run = hosts.local.run(*words)
        assert hosts.key not in run.stdout + run.stderr
    hosts.request("GET", "/localspec/status")
    files = [path for path in hosts.local.root.rglob("*") if path.is_file()]
    assert hosts.local.log in files
    assert not [file for file in files if hosts.key.encode() in file.read_bytes()]
