"""Mixtures of what models really write mean the same in every protocol, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.support.daemons import Home, scripted_home
from tests.support.exploration import SEED, count_examples
from tests.support.mixtures import STOP, STYLES, TOOLS, Mixture, mixtures
from tests.support.random_calls import RandomCalls

ANSWERS = count_examples(4, "LOCALSPEC_TEST_CALLS")
JSON = dict[str, Any]
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in TOOLS.items()
]


class Shown(NamedTuple):
    """What a client got: content, reasoning, calls, why the answer ended, and tokens with probabilities."""

    content: str
    reasoning: str
    calls: list[tuple[str, Any]]
    ending: str
    tokens: list[str] | None = None


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    with scripted_home("--template", "{% if tools %}<tool_call>{% endif %}") as home:
        yield home


def events_of(home: Home, path: str, body: JSON) -> list[JSON]:
    """Return the events of a stream."""
    lines = home.request("POST", path, body).body.decode().splitlines()
    data = (line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{")))
    return [json.loads(text) for text in data]


def chat(home: Home, prompt: str, *, streamed: bool) -> Shown:
    messages = [{"role": "user", "content": prompt}]
    body = {
        "messages": messages,
        "tools": FUNCTIONS,
        "stop": [STOP],
        "logprobs": True,
        "stream": streamed,
    }
    path = "/v1/chat/completions"
    if not streamed:
        choice = home.request("POST", path, body).json["choices"][0]
        deltas, logprobs, ending = (
            [choice["message"]],
            [choice["logprobs"]],
            choice["finish_reason"],
        )
    else:
        choices = [event["choices"][0] for event in events_of(home, path, body) if event["choices"]]
        deltas, logprobs = [c["delta"] for c in choices], [c.get("logprobs") for c in choices]
        ending = choices[-1]["finish_reason"]
    calls: list[tuple[str, str]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        function = part["function"]
        if name := function.get("name"):
            calls.append((name, ""))
        name, arguments = calls[part.get("index", len(calls) - 1)]
        calls[part.get("index", len(calls) - 1)] = name, arguments + function.get("arguments", "")
    return Shown(
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        [(name, json.loads(arguments)) for name, arguments in calls],
        ending,
        [entry["token"] for part in logprobs if part for entry in part["content"] or ()],
    )


def responses(home: Home, prompt: str, *, streamed: bool) -> Shown:
    tools = [{"type": "function", **entry["function"]} for entry in FUNCTIONS]
    body = {
        "input": prompt,
        "tools": tools,
        "store": False,
        "include": ["message.output_text.logprobs"],
        "stream": streamed,
    }
    if not streamed:
        output = home.request("POST", "/v1/responses", body).json["output"]
    else:
        events = events_of(home, "/v1/responses", body)
        output = events[-1]["response"]["output"]
        for kind, item in (("output_text", "message"), ("reasoning_text", "reasoning")):
            deltas = "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
            assert deltas == response_text(output, item)
    calls = [
        (i["name"], json.loads(i["arguments"])) for i in output if i["type"] == "function_call"
    ]
    messages = (item for item in output if item["type"] == "message")
    tokens = [t["token"] for m in messages for part in m["content"] for t in part["logprobs"]]
    content, reasoning = (response_text(output, kind) for kind in ("message", "reasoning"))
    return Shown(content, reasoning, calls, "", tokens)


def response_text(output: list[JSON], kind: str) -> str:
    return "".join(
        part["text"] for item in output if item["type"] == kind for part in item["content"]
    )


def anthropic(home: Home, prompt: str, *, streamed: bool) -> Shown:
    tools = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
    body = {
        "model": "",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": prompt}],
        "tools": tools,
        "stop_sequences": [STOP],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "stream": streamed,
    }
    if not streamed:
        answer = home.request("POST", "/v1/messages", body).json
        blocks, ending = answer["content"], answer["stop_reason"]
    else:
        blocks, ending = [], ""
        for event in events_of(home, "/v1/messages", body):
            match event["type"]:
                case "content_block_start":
                    blocks.append({**event["content_block"], "json": ""})
                case "content_block_delta":
                    for key, text in event["delta"].items():
                        key = {"partial_json": "json"}.get(key, key)
                        if key not in ("type", "signature"):
                            blocks[event["index"]][key] += text
                case "message_delta":
                    ending = event["delta"]["stop_reason"]
        for block in blocks:
            block["input"] = json.loads(block["json"] or "{}")
    return Shown(
        "".join(block.get("text", "") for block in blocks),
        "".join(block.get("thinking", "") for block in blocks),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        ending,
    )


def ollama(home: Home, prompt: str, *, streamed: bool) -> Shown:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": prompt}],
        "tools": FUNCTIONS,
        "options": {"stop": [STOP]},
        "think": True,
        "stream": streamed,
    }
    parts = events_of(home, "/api/chat", body)
    messages = [part["message"] for part in parts]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return Shown(
        "".join(message.get("content") or "" for message in messages),
        "".join(message.get("thinking") or "" for message in messages),
        [(call["name"], call["arguments"]) for call in calls],
        parts[-1]["done_reason"],
    )


PROTOCOLS: dict[str, Callable[..., Shown]] = {
    "chat": chat,
    "responses": responses,
    "anthropic": anthropic,
    "ollama": ollama,
}
ENDINGS = {
    # of a call, of a stop string, and of the model's own end
    "chat": ("tool_calls", "stop", "stop"),
    "responses": ("", "", ""),
    "anthropic": ("tool_use", "stop_sequence", "end_turn"),
    "ollama": ("stop", "stop", "stop"),
}


def expect(mixture: Mixture, pieces: list[str], protocol: str) -> Shown:
    """Return what a client of a protocol must get. Responses has no stop strings."""
    is_stopped = protocol != "responses" and STOP in mixture.text("content")
    kept = mixture.up_to_stop() if is_stopped else mixture
    called, stopped, ended = ENDINGS[protocol]
    chars, begin, tokens = kept.content_chars(), 0, list[str]()
    for piece in pieces:
        # A chat has the tokens of all text up to a stop string, and a message those of its own.
        is_told = (
            begin < len(chars) if protocol == "chat" else any(chars[begin : begin + len(piece)])
        )
        tokens += [piece] if is_told else []
        begin += len(piece)
    calls: list[tuple[str, Any]] = [*kept.calls]
    ending = called if calls else stopped if is_stopped else ended
    has_tokens = protocol in ("chat", "responses")
    return Shown(
        kept.text("content"), kept.text("reasoning"), calls, ending, tokens if has_tokens else None
    )


@pytest.mark.explore
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", STYLES)
def test_mixtures_mean_the_same_in_every_protocol(api: Home, name: str, protocol: str) -> None:
    for number, (rng, mixture) in enumerate(mixtures(name, ANSWERS, SEED, stops=True)):
        pieces = RandomCalls(rng, []).split(mixture.answer)
        script = {"family": name, "tail": mixture.tail, "pieces": pieces}
        shown = PROTOCOLS[protocol](api, f"mixed {json.dumps(script)}", streamed=number % 2 == 0)
        assert shown == expect(mixture, pieces, protocol), (mixture.tail, mixture.answer)
