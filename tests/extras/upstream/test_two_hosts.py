"""A daemon and a server on two hosts, with a link between them that can be slow or cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon, alive, temporary_home, wait_for
from tests.support.two_hosts import OTHER_REMOTE_ADDRESS, REMOTE_ADDRESS, Host, Link, two_hosts
from tests.support.upstreams import (
    HEAD,
    ReceivedRequest,
    ScriptedServer,
    encode_chat,
    encode_response,
    encode_stream,
    make_tls_context,
    scripted_server,
)

DELAYS = pytest.mark.parametrize("delay", [0.0003, 0.005, 0.03], ids="{:g}".format)
SILENCE_TIMEOUT_S = 0.8  # longer than any round trip over the link
ANSWER = encode_chat("one", " two", " three")


class Hosts:
    """The daemon's host, the other one, and the link between them."""

    def __init__(self, local: Host, remote: Host, link: Link, home: Home) -> None:
        self.local, self.remote, self.link, self.home = local, remote, link, home

    @contextmanager
    def server(self, address: str = REMOTE_ADDRESS, **fields: Any) -> Iterator[ScriptedServer]:
        listening = self.remote.do(lambda: socket.create_server((address, 0)))
        with scripted_server(listening=listening, **fields) as server:
            yield server
        self.link.heal()

    def add(self, url: str, **settings: Any) -> None:
        """Add the pair `big` to models.toml, which has more settings than a request."""
        file = self.home.root / "config" / "models.toml"
        file.parent.mkdir(exist_ok=True)
        fields = {"upstream": url, **settings}
        lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
        file.write_text("\n".join(["[pairs.big]", *lines, ""]))
        wait_for(lambda: url in self.home.request("GET", "/localspec/pairs").body.decode(), "big")

    def ask(self, prompt: str = "say from here", **fields: Any) -> tuple[str, str]:
        """Return the text of an answer and the error that ended it."""
        answer = self.home.chat(prompt, model="big", stream=True, **fields)
        if answer.status != 200:
            return "", answer.error["message"]
        events = [json.loads(event) for event in answer.events if event != "[DONE]"]
        choices = [event["choices"][0]["delta"] for event in events if event.get("choices")]
        errors = [event["error"]["message"] for event in events if "error" in event]
        return "".join(choice.get("content") or "" for choice in choices), " ".join(errors)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            local, remote, link = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"this machine does not let us make two hosts: {error}")
        home = stack.enter_context(temporary_home())
        home.use_fake()
        local.do(lambda: RunningDaemon(home))
        yield Hosts(local, remote, link, home)


def cut_after(
    hosts: Hosts, data: bytes, position: int
) -> Callable[[ReceivedRequest, socket.socket], None]:
    """Return an answer of which `position` bytes arrive before the link is cut."""

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        connection.sendall(data[:position])
        hosts.link.cut()
        connection.sendall(data[position:])
        read_to_the_end(connection)

    def read_to_the_end(connection: socket.socket) -> None:
        while connection.recv(1):
            pass

    return answer


# The number of bytes that arrive, by the place of the cut.
STAGES: dict[str, Callable[[bytes], int]] = {
    "before the head": lambda data: 0,
    "in the head": lambda data: len(HEAD) // 2,
    "between events": lambda data: (
        data.index(b" two") + data[data.index(b" two") :].index(b"\n\n") + 2
    ),
    "in the middle of an event": lambda data: data.index(b" two"),
    "after the last": lambda data: data.index(b"[DONE]\n\n") + len(b"[DONE]\n\n"),
}


@DELAYS
@pytest.mark.parametrize("stage", STAGES)
def test_a_cut_link_ends_only_the_running_answer(hosts: Hosts, delay: float, stage: str) -> None:
    hosts.link.delay = delay
    data = encode_stream(ANSWER)
    position = STAGES[stage](data)
    with hosts.server() as remote:
        streaming = "head" not in stage
        timeouts = {"silence_timeout" if streaming else "first_token_timeout": SILENCE_TIMEOUT_S}
        hosts.add(remote.url, upstream_model="m", upstream_kind="vllm", **timeouts)
        remote.answer = cut_after(hosts, data, position)
        text, error = hosts.ask()
        if stage == "after the last":
            assert (text, error) == ("one two three", "")
        else:
            assert text == {"between events": "one two", "in the middle of an event": "one"}.get(
                stage, ""
            )
            assert "sent nothing for too long" in error
        assert not hosts.home.status()["running"]
        hosts.link.heal()
        remote.answer = None
        assert hosts.ask() == ("hello there", "")


@DELAYS
def test_a_fallback_continues_the_conversation_while_the_link_is_cut(
    hosts: Hosts, delay: float
) -> None:
    hosts.link.delay = delay
    home = hosts.home
    with hosts.server(stream=encode_chat("from afar")) as remote:
        hosts.add(remote.url, fallback=str(home.model))
        first = home.chat("say one", model="big", localspec={"conversation": "new"})
        assert first.text == "from afar"
        talk = {"conversation": first.json["localspec"]["conversation"]}
        for cut in (hosts.link.cut, lambda: None):  # a new cut, and a cut that is already noticed
            cut()
            began = time.monotonic()
            answer = home.chat("say from here", model="big", localspec=talk)
            assert answer.text == "from here"
            assert answer.json["localspec"]["news"].endswith("answers in its place.")
            assert time.monotonic() - began < 10  # much less than the system's own timeout
        hosts.link.heal()
        wait_for(lambda: not home.status()["upstreams"][0]["away"], "it to be tried again")
        assert home.chat("say two", model="big", localspec=talk).text == "from afar"
        # Requests without a body only check that the server is alive.
        bodies = [request.body for request in remote.requests if request.body]
    contents = [message["content"] for message in bodies[-1]["messages"]]
    assert contents == [
        *("say one", "from afar", "say from here", "from here", "say from here", "from here"),
        "say two",
    ]


def test_a_slow_server_that_is_alive_is_waited_for(hosts: Hosts) -> None:
    """The server answers health checks meanwhile, so that no fallback is used."""
    hosts.link.delay = 0.03

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        time.sleep(1.5)  # longer than a server without health checks is waited for
        connection.sendall(encode_stream(ANSWER))

    with hosts.server(answer=answer) as remote:
        hosts.add(remote.url, fallback=str(hosts.home.model))
        assert hosts.ask() == ("one two three", "")


def test_a_redirect_to_another_host_is_not_followed(hosts: Hosts) -> None:
    hosts.link.delay = 0.005
    key = hosts.home.root / "key"
    key.write_text("sk-of-this-host-alone")
    key.chmod(0o600)
    with hosts.server(OTHER_REMOTE_ADDRESS) as elsewhere, hosts.server() as remote:
        remote.answer = lambda request, connection: connection.sendall(
            encode_response({}, "307 There", f"location: {elsewhere.url}/chat/completions\r\n")
        )
        hosts.add(remote.url, upstream_model="m", upstream_kind="vllm", key_file=str(key))
        text, error = hosts.ask()
        assert not text
        assert f"redirects to {OTHER_REMOTE_ADDRESS}" in error
        assert remote.requests[-1].headers["authorization"] == "Bearer sk-of-this-host-alone"
        assert not elsewhere.requests
        assert not elsewhere.connections


def test_a_certificate_of_another_host_is_not_trusted(hosts: Hosts, tmp_path: Path) -> None:
    """The certificate of the right host is trusted if it is named."""
    hosts.link.delay = 0.005
    for address, trusted in ((OTHER_REMOTE_ADDRESS, False), (REMOTE_ADDRESS, True)):
        context, certificate = make_tls_context(tmp_path, address)
        with hosts.server(tls=context) as remote:
            hosts.add(remote.url, upstream_model="m", upstream_kind="vllm", ca=str(certificate))
            text, error = hosts.ask()
            assert text == "hello there" * trusted
            assert ("is not trusted" in error) != trusted
            assert bool(remote.requests) == trusted


@pytest.fixture
def remote_daemon(hosts: Hosts) -> Iterator[tuple[Home, RunningDaemon]]:
    """Run a localspec on the other host as the pair `big`, with a local pair as its fallback."""
    hosts.link.delay = 0.005
    with temporary_home() as home:
        home.use_fake(listen=f"{REMOTE_ADDRESS}:0", listen_anywhere="true")
        daemon = hosts.remote.do(lambda: RunningDaemon(home))
        status = home.status()
        hosts.add(
            f"{status['listen']}/v1",
            key_file=status["token_file"],
            upstream_model=status["pair"]["name"],
            fallback=str(hosts.home.model),
        )
        yield home, daemon
        if daemon.process.poll() is None:
            daemon.stop()


def test_a_disconnect_ends_the_request_on_the_other_host(
    hosts: Hosts, remote_daemon: tuple[Home, RunningDaemon]
) -> None:
    remote, _ = remote_daemon
    with hosts.home.streaming("forever", model="big") as stream:
        stream.await_text()
        assert remote.status()["running"] == 1
    wait_for(lambda: not remote.status()["running"], "the request's end on the other host")


def test_a_fallback_answers_after_a_server_is_killed(
    hosts: Hosts, remote_daemon: tuple[Home, RunningDaemon]
) -> None:
    _, daemon = remote_daemon
    with hosts.home.streaming("forever", model="big") as stream:
        stream.await_text()
        worker = daemon.worker_pid()
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.communicate()
        rest = stream.read()
    assert b"broke the connection" in rest
    answer = hosts.home.chat("say from here", model="big")
    assert answer.text == "from here"
    assert "answers in its place" in answer.json["localspec"]["news"]
    wait_for(lambda: not alive(worker), "the end of its engine")
