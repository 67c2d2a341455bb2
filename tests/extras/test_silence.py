"""Streams that are silent for long: each official client reads on, and something comes all the while."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.support.daemons import (
    Home,
    UnixConnection,
    scripted_home,
    temporary_home,
    wait_for,
)
from tests.support.official_clients import KNOWS_TOOLS, anthropic_client, openai_client

# A daemon whose streams get a ping after 50 ms.
PROGRAM = """
import sys
from localspec.protocol import requests
requests.PING_INTERVAL_S = 0.05
from localspec.daemon.completion import answer
respond = answer.respond
answer.respond = lambda *a, **k: respond(*a, **{**k, "ping_s": 0.05})
from localspec.daemon.__main__ import main
sys.exit(main())
"""
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
# Each client ends a connection that is silent for so long.
CLIENT_TIMEOUT_S = 6.0
TOO_LATE = "late 7"
LATE = "late 1.5"
# The scripted engine waits between the words of "say", for less time than there is between two pings.
HIDDEN = f"say <think> {'so ' * 60}</think> late"
URL = "http://localspec"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with temporary_home() as home:
        arguments = ("--template", KNOWS_TOOLS, "--load-delay", "0.6", "--pace", "0.01")
        home.start(*arguments, parallel=1, program=PROGRAM)
        yield home


def ask_chat(home: Home, text: str) -> str:
    with openai_client(home, CLIENT_TIMEOUT_S) as client:
        chunks = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": text}], tools=[TOOL], stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def ask_responses(home: Home, text: str) -> str:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    with (
        openai_client(home, CLIENT_TIMEOUT_S) as client,
        client.responses.stream(model="", input=text, tools=[tool], store=False) as stream,
    ):
        numbers = [event.sequence_number for event in stream]
        assert numbers == [*range(len(numbers))]
        return stream.get_final_response().output_text


def ask_messages(home: Home, text: str) -> str:
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    with (
        anthropic_client(home, CLIENT_TIMEOUT_S) as client,
        client.messages.stream(
            model="builtin",
            max_tokens=2000,
            messages=[{"role": "user", "content": text}],
            tools=[tool],
            thinking=thinking,
        ) as stream,
    ):
        return stream.get_final_text()


def ask_ollama(home: Home, text: str) -> str:
    transport = httpx.HTTPTransport(uds=str(home.socket), verify=False)
    with ollama.Client(URL, transport=transport, timeout=CLIENT_TIMEOUT_S) as client:
        parts = client.chat(
            "default", [{"role": "user", "content": text}], tools=[TOOL], stream=True
        )
        return "".join(part.message.content or "" for part in parts)


TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
PROTOCOLS = {
    "chat": (ask_chat, "/v1/chat/completions", b"\n\n:\n\n"),
    "responses": (ask_responses, "/v1/responses", b'"type":"response.in_progress"'),
    "messages": (ask_messages, "/v1/messages", b'event: ping\ndata: {"type":"ping"}'),
    "ollama": (ask_ollama, "/api/chat", b" {"),
}
Asking = Callable[[Home, str], str]


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def read_bytes(home: Home, target: str, text: str, **fields: Any) -> bytes:
    """Return the bytes of a streamed answer."""
    body = {"stream": True, "input": text, "messages": [{"role": "user", "content": text}]}
    tools = [{**TOOL, "name": "weather", "input_schema": SCHEMA, "parameters": SCHEMA}]
    answer = home.request(
        "POST", target, {**body, "tools": tools, "max_tokens": 2000, "store": False, **fields}
    )
    assert answer.status == 200, answer.body
    return answer.body


def test_a_silent_engine(home: Home, protocol: str) -> None:
    ask, target, ping = PROTOCOLS[protocol]
    assert ask(home, TOO_LATE) == "late"
    pings = read_bytes(home, target, LATE).count(ping)
    # The first in_progress belongs to every stream.
    assert pings > (1 if protocol == "responses" else 0)


@pytest.mark.parametrize("target", ["/completion", "/v1/completions"])
def test_a_silent_engine_completes_a_text(home: Home, target: str) -> None:
    answer = home.request("POST", target, {"prompt": LATE, "stream": True})
    assert b":\n\n" in answer.body
    assert b'"late"' in answer.body


def test_a_pair_is_loaded_for_its_notation_of_calls(home: Home, protocol: str) -> None:
    """Tools make the daemon load the pair before it knows what to ask."""
    ask, target, _ = PROTOCOLS[protocol]
    home.request("POST", "/localspec/unload", {})
    assert ask(home, "say late").strip() == "late"
    home.request("POST", "/localspec/unload", {})
    beginning = {
        "chat": b":\n\n",
        "responses": b":\n\n",
        "messages": b"event: ping\n",
        "ollama": b" ",
    }
    assert read_bytes(home, target, "say late").startswith(beginning[protocol])


def test_a_queue(home: Home, protocol: str) -> None:
    ask, target, _ = PROTOCOLS[protocol]
    with home.streaming("slow 20") as first:
        first.await_text()
        assert ask(home, "say late").strip() == "late"
    with home.streaming("forever") as first:
        first.await_text()
        connection = UnixConnection(home.socket)
        body = {"stream": True, "max_tokens": 9, "input": "say late", "store": False}
        messages = [{"role": "user", "content": "say late"}]
        connection.request("POST", target, json.dumps({**body, "messages": messages}))
        response = connection.getresponse()  # the head comes although it waits
        assert response.read(1)
        assert home.status()["waiting"] == 1
        first.leave()
        assert b"late" in response.read()
        connection.close()


def test_hidden_thoughts(home: Home) -> None:
    assert ask_messages(home, HIDDEN).strip() == "late"
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    data = read_bytes(home, "/v1/messages", HIDDEN, thinking=thinking)
    opened = data.index(b'"content_block":{"type":"thinking"')
    closed = data.index(b"signature_delta")
    # One ping follows the first block of every answer.
    assert data[opened:closed].count(b"event: ping") > 1


def test_a_call_that_is_sent_whole(home: Home) -> None:
    city = " ".join(["Rome"] * 60)
    arguments = json.dumps({"city": city})
    call = f'<tool_call> {{"name": "weather", "arguments": {arguments}}} </tool_call>'
    transport = httpx.HTTPTransport(uds=str(home.socket), verify=False)
    with ollama.Client(URL, transport=transport) as client:
        messages = [{"role": "user", "content": f"say {call}"}]
        parts = [*client.chat("default", messages, tools=[TOOL], stream=True)]
    [called] = [one for part in parts for one in part.message.tool_calls or []]
    assert called.function.arguments == {"city": city}
    assert b"  " in read_bytes(home, "/api/chat", f"say {call}")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("/v1/chat/completions", {"error"}),
        ("/v1/responses", {"type", "code", "message", "param", "sequence_number"}),
        ("/v1/messages", {"type", "error", "request_id"}),
        ("/api/chat", {"error"}),
    ],
)
def test_a_failure_after_a_ping_is_an_event(target: str, error: set[str]) -> None:
    """A load that fails late has no status any more, so its error has the shape of the stream."""
    with scripted_home("--load-delay", "0.6", "--load-error", program=PROGRAM) as home:
        data = read_bytes(home, target, "say late").rstrip()
        last = json.loads(data.splitlines()[-1].removeprefix(b"data: "))
        assert set(last) == error
        assert "no GGUF" in json.dumps(last)
        wait_for(lambda: home.status()["running"] == 0, "the request's end")
