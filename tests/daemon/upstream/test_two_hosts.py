"""A server on another host, the daemon on this one, and between them a link that is cut without a word."""

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
from tests.support.two_hosts import ELSEWHERE, THERE, Host, Link, two_hosts
from tests.support.upstreams import (
    HEAD,
    ScriptedServer,
    Seen,
    certified,
    said,
    scripted_server,
    streamed,
    whole,
)

DELAYS = pytest.mark.parametrize("delay", [0.0003, 0.005, 0.03], ids="{:g}".format)
SOON = 0.8  # seconds of silence that are too many; no journey takes so long
ANSWER = said("one", " two", " three")


class Hosts:
    """The daemon's host, the other one, and the link between them."""

    def __init__(self, here: Host, there: Host, link: Link, home: Home) -> None:
        self.here, self.there, self.link, self.home = here, there, link, home

    @contextmanager
    def server(self, address: str = THERE, **fields: Any) -> Iterator[ScriptedServer]:
        listening = self.there.do(lambda: socket.create_server((address, 0)))
        with scripted_server(listening=listening, **fields) as server:
            yield server
        self.link.heal()

    def add(self, url: str, **said_: Any) -> None:
        """As the pair `big`; models.toml has more of it than a request may say."""
        file = self.home.root / "config" / "models.toml"
        file.parent.mkdir(exist_ok=True)
        fields = {"upstream": url, **said_}
        lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
        file.write_text("\n".join(["[pairs.big]", *lines, ""]))
        wait_for(lambda: url in self.home.request("GET", "/localspec/pairs").body.decode(), "big")

    def ask(self, prompt: str = "say from here", **fields: Any) -> tuple[str, str]:
        """What was written, and the error that it ended with."""
        answer = self.home.chat(prompt, model="big", stream=True, **fields)
        if answer.status != 200:
            return "", answer.error["message"]
        found = [json.loads(event) for event in answer.events if event != "[DONE]"]
        choices = [each["choices"][0]["delta"] for each in found if each.get("choices")]
        errors = [each["error"]["message"] for each in found if "error" in each]
        return "".join(choice.get("content") or "" for choice in choices), " ".join(errors)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            here, there, link = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"this machine does not let us make two hosts: {error}")
        home = stack.enter_context(temporary_home())
        home.use_fake()
        daemon = here.do(lambda: RunningDaemon(home))
        yield Hosts(here, there, link, home)
        daemon.stop()


def cut_after(hosts: Hosts, data: bytes, at: int) -> Callable[[Seen, socket.socket], None]:
    """An answer of which so many bytes arrive, and then nothing ever."""

    def answer(seen: Seen, connection: socket.socket) -> None:
        connection.sendall(data[:at])
        hosts.link.cut()
        connection.sendall(data[at:])
        there_is_nothing_more(connection)

    def there_is_nothing_more(connection: socket.socket) -> None:
        while connection.recv(1):
            pass

    return answer


# Where in an answer, by what of it arrives.
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
def test_a_link_that_is_cut_in_a_stream_ends_that_answer_alone(
    hosts: Hosts, delay: float, stage: str
) -> None:
    hosts.link.delay = delay
    data = streamed(ANSWER)
    at = STAGES[stage](data)
    with hosts.server() as there:
        begun = "head" not in stage
        times = {"silence_timeout" if begun else "first_token_timeout": SOON}
        hosts.add(there.url, upstream_model="m", upstream_kind="vllm", **times)
        there.answer = cut_after(hosts, data, at)
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
        there.answer = None
        assert hosts.ask() == ("hello there", "")


@DELAYS
def test_another_pair_answers_at_once_while_the_link_is_cut_and_a_conversation_goes_on(
    hosts: Hosts, delay: float
) -> None:
    hosts.link.delay = delay
    home = hosts.home
    with hosts.server(stream=said("from afar")) as there:
        hosts.add(there.url, fallback=str(home.model))
        first = home.chat("say one", model="big", localspec={"conversation": "new"})
        assert first.text == "from afar"
        talk = {"conversation": first.json["localspec"]["conversation"]}
        for cut in (hosts.link.cut, lambda: None):  # just after an answer, and when it is known
            cut()
            began = time.monotonic()
            answer = home.chat("say from here", model="big", localspec=talk)
            assert answer.text == "from here"
            assert answer.json["localspec"]["news"].endswith("answers in its place.")
            assert time.monotonic() - began < 10  # by far less than a time-out of the system's
        hosts.link.heal()
        wait_for(lambda: not home.status()["upstreams"][0]["away"], "it to be tried again")
        assert home.chat("say two", model="big", localspec=talk).text == "from afar"
        asked = [
            request.body for request in there.seen if request.body
        ]  # others are for a sign of life
    contents = [message["content"] for message in asked[-1]["messages"]]
    assert contents == [
        *("say one", "from afar", "say from here", "from here", "say from here", "from here"),
        "say two",
    ]


def test_one_that_is_slow_to_begin_is_waited_for(hosts: Hosts) -> None:
    """It gives a sign of life meanwhile, so that nobody answers in its place."""
    hosts.link.delay = 0.03

    def answer(seen: Seen, connection: socket.socket) -> None:
        time.sleep(1.5)  # longer than one that gives none
        connection.sendall(streamed(ANSWER))

    with hosts.server(answer=answer) as there:
        hosts.add(there.url, fallback=str(hosts.home.model))
        assert hosts.ask() == ("one two three", "")


def test_a_redirect_to_another_host_is_not_followed(hosts: Hosts) -> None:
    hosts.link.delay = 0.005
    key = hosts.home.root / "key"
    key.write_text("sk-of-this-host-alone")
    key.chmod(0o600)
    with hosts.server(ELSEWHERE) as other, hosts.server() as there:
        there.answer = lambda seen, connection: connection.sendall(
            whole({}, "307 There", f"location: {other.url}/chat/completions\r\n")
        )
        hosts.add(there.url, upstream_model="m", upstream_kind="vllm", key_file=str(key))
        text, error = hosts.ask()
        assert not text
        assert f"redirects to {ELSEWHERE}" in error
        assert there.seen[-1].headers["authorization"] == "Bearer sk-of-this-host-alone"
        assert not other.seen
        assert not other.connections


def test_a_certificate_of_another_host_is_not_trusted(hosts: Hosts, tmp_path: Path) -> None:
    """The right one is, where it is named."""
    hosts.link.delay = 0.005
    for address, good in ((ELSEWHERE, False), (THERE, True)):
        context, certificate = certified(tmp_path, address)
        with hosts.server(tls=context) as there:
            hosts.add(there.url, upstream_model="m", upstream_kind="vllm", ca=str(certificate))
            text, error = hosts.ask()
            assert text == "hello there" * good
            assert ("is not trusted" in error) != good
            assert bool(there.seen) == good


@pytest.fixture
def another(hosts: Hosts) -> Iterator[tuple[Home, RunningDaemon]]:
    """A localspec on the other host, as the pair `big` of this one; one of this host answers in its place."""
    hosts.link.delay = 0.005
    with temporary_home() as home:
        home.use_fake(listen=f"{THERE}:0", listen_anywhere="true")
        daemon = hosts.there.do(lambda: RunningDaemon(home))
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


def test_whoever_leaves_frees_the_other_host(
    hosts: Hosts, another: tuple[Home, RunningDaemon]
) -> None:
    there, _ = another
    with hosts.home.streaming("forever", model="big") as stream:
        stream.await_text()
        assert there.status()["running"] == 1
    wait_for(lambda: not there.status()["running"], "the request's end on the other host")


def test_a_server_that_is_killed_ends_its_answers_and_another_pair_gives_the_next(
    hosts: Hosts, another: tuple[Home, RunningDaemon]
) -> None:
    _, daemon = another
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
