"""Expensive JSON fails its own request: the daemon's memory is bounded and others are answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localspec.daemon.completion.request import stabilize_instructions
from localspec.daemon.history.turn import make_title
from localspec.protocol import reading
from localspec.protocol.frames import Message
from localspec.protocol.reading import BodyComplexity, TooComplex
from localspec.protocol.requests import ChatMessage, ContentPart
from tests.support.daemons import Home, RunningDaemon, temporary_home
from tests.support.patience import PATIENCE

SENT_BYTES = 64 << 20
# Those that are told apart only on their way; the others are refused as soon in either length.
SENT_TOO = ("empty lists", "one number", "a wide character", "JSON in a string", "not closed")
MAX_ACCEPTED_BYTES = 10_000_000  # a body of this size is still read
MAX_GROWTH_BYTES = 200 << 20  # peak growth of the daemon

START, END = b'{"messages": [{"role": "user", "content": "x"}], ', b"}"
# Name, what comes before, what is repeated, and what ends it: in fields that take anything.
WORST = {
    "empty lists": (START + b'"json_schema": {"a": [', b"[],", b"0]}" + END),
    "empty objects": (START + b'"chat_template_kwargs": {"a": [', b"{},", b"0]}" + END),
    "small objects": (START + b'"chat_template_kwargs": {"a": [', b'{"a":1},', b"0]}" + END),
    "small strings": (START + b'"json_schema": {"a": [', b'"ab",', b"0]}" + END),
    "numbers": (START + b'"json_schema": {"a": [', b"1.5,", b"0]}" + END),
    "a field nobody knows": (START + b'"unknown": [', b"[[]],", b"0]" + END),
    "the same key": (START + b'"logit_bias": {', b'"1":1,', b'"1":1}' + END),
    "messages": (b'{"messages": [', b'{"role":"a"},', b'{"role":"a"}]' + END),
    "depth": (START + b'"unknown": ', b"[", b"" + END),
    "one number": (START + b'"json_schema": {"a": ', b"9", b"}" + END),
    "one fraction": (START + b'"json_schema": {"a": 0.', b"9", b"}" + END),
    "NULs": (b'{"messages": [{"role": "user", "content": "', rb"\u0000", b'"}]' + END),
    "one NUL": (
        rb'{"model": "\u0000", "messages": [{"role": "user", "content": "',
        b"x",
        b'"}]' + END,
    ),
    "a wide character": (
        '{"messages": [{"role": "user", "content": "😀'.encode(),
        b"x",
        b'"}]' + END,
    ),
    "wide parts": (
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "' + "😀".encode(),
        b"x",
        rb'\n!say x"}]}]' + END,
    ),
    "escapes": (b'{"messages": [{"role": "user", "content": "', rb"\"\\", rb'\n!say x"}]' + END),
    "JSON in a string": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
        b'"arguments": "[',
        b"[],",
        b'0]"}}]}]' + END,
    ),
    "not closed": (START + b'"json_schema": {"a": [', b'"",', b""),
    "spaces": (b"{", b" ", b"}"),
}


def build_body(name: str, size: int) -> bytes:
    start, repeated, end = WORST[name]
    return start + repeated * ((size - len(start) - len(end)) // len(repeated)) + end


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    with temporary_home() as home:
        daemon = home.start()
        assert home.chat("say x").text == "x"
        home.environment["PID"] = str(daemon.pid)
        yield home


def status_kib(pid: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def post(home: Home, data: bytes) -> int:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(PATIENCE)
        connected.connect(str(home.socket))
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        framed = b"%x\r\n" % len(data)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in (head, framed, data, b"\r\n0\r\n\r\n"):
                connected.sendall(piece)
        response = http.client.HTTPResponse(connected)
        response.begin()
        error_body = json.loads(response.read())
        if response.status != 200:
            assert error_body["error"]["code"] != "internal_error", error_body
        return response.status


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of memory")
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, MAX_ACCEPTED_BYTES) for name in WORST), *((name, SENT_BYTES) for name in SENT_TOO)],
)
def test_the_most_expensive_json_costs_little_memory(api: Home, name: str, size: int) -> None:
    """The kernel reports the daemon's peak. The waiting times of others are printed: see pytest -s."""
    pid = api.environment["PID"]
    data = build_body(name, size)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from now
    before = status_kib(pid, "VmRSS")
    statuses: list[int] = []
    sending = threading.Thread(target=lambda: statuses.append(post(api, data)))
    sending.start()
    slowest = 0.0
    while sending.is_alive():
        began = time.perf_counter()
        assert api.request("GET", "/health").status == 200
        slowest = max(slowest, time.perf_counter() - began)
        sending.join(0.01)
    sending.join()
    grown = (status_kib(pid, "VmHWM") - before) << 10
    print(f"{name}: {statuses}, +{grown >> 20} MiB, /health at most {slowest * 1000:.0f} ms")
    assert statuses, "no answer"
    assert statuses[0] in ((413,) if size == SENT_BYTES else (200, 400, 413))
    assert grown < MAX_GROWTH_BYTES


def test_a_million_token_ids_and_long_texts_are_accepted(api: Home) -> None:
    ids = api.request("POST", "/detokenize", {"tokens": [151_643] * 1_000_000})
    assert len(ids.json["content"]) == 1_000_000
    for text in ('word, [list] {x: 1} "quoted" \\ \n' * 150_000, "日本語, 中文、" * 200_000):
        answer = api.request(
            "POST", "/apply-template", {"messages": [{"role": "user", "content": text}]}
        )
        assert answer.json["prompt"] == f"<user>{text}"


JSON = st.recursive(
    st.none()
    | st.integers()
    | st.text(st.sampled_from('a"\\[{,\0\ud83d\n') | st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\[,'), max_size=3), inner)
    ),
    max_leaves=12,
)


def count_parts(value: object) -> tuple[int, int]:
    """Return the number of strings, lists and objects in `value`, and of commas between items."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [*value.values(), *value] if isinstance(value, dict) else value
    counts = [count_parts(item) for item in inner]
    return 1 + sum(n for n, _ in counts), max(len(value) - 1, 0) + sum(n for _, n in counts)


@given(JSON, st.booleans(), st.lists(st.integers(1, 12), min_size=1))
@example("\r", True, [1])  # the text ends soon after an escape
@example(["\0", "\n"], True, [2, 1])
def test_counting_does_not_depend_on_how_the_text_is_split(
    value: object, ascii_only: bool, cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    counted, at = BodyComplexity(), 0
    while at < len(text):
        for cut in cuts:
            counted.count_piece(text[at : at + cut])
            at += cut
    assert (counted.parts, counted.items) == count_parts(value)
    assert counted.nul == ("\0" in repr(value).replace("\\x00", "\0"))


def test_too_large_structures_are_noticed_early() -> None:
    for piece, most in (
        (b"[],", reading.MAX_BODY_PARTS),
        (b'"",', reading.MAX_BODY_PARTS),
        (b"1,", reading.MAX_BODY_ITEMS),
    ):
        counted = BodyComplexity()
        counted.count_text(piece * most)
        with pytest.raises(TooComplex):
            counted.count_text(piece * 10)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of memory")
def test_the_number_of_tokens_in_an_answer_is_limited(warm: Home) -> None:
    """With a real engine, half a million words are tokenized and ten times as many are refused."""
    text = "a b c d " * 60_000
    response = warm.request("POST", "/tokenize", {"content": text})
    assert response.status == 200
    assert 100_000 < len(response.json["tokens"]) < 500_000
    detokenized = warm.request("POST", "/detokenize", response.json)
    assert detokenized.json["content"] == text
    pid = str(warm.status()["pid"])
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = status_kib(pid, "VmRSS")
    for times, more in ((1, {"with_pieces": True}), (5, {})):
        refused = warm.request("POST", "/tokenize", {"content": text * times, **more})
        assert (refused.status, refused.error["param"]) == (400, "content")
    longest = max(response.json["tokens"])
    pieces = warm.request("POST", "/detokenize", {"tokens": [longest] * 1_000_000})
    assert pieces.status in (200, 400)
    assert (status_kib(pid, "VmHWM") - before) << 10 < MAX_GROWTH_BYTES


# No text field of a request may keep the event loop from the other requests.


TEXT_BYTES = 16 << 20
SHAPES = ("\n", "a\n", " ", "\r\n", "```\n", "\u2028", "x")
MAX_LOOP_CPU_S = 1.5  # six times what the worst of them takes; before, some took ten seconds


def put(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: put(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [put(item, text) for item in value]
    return text + SHORT_ANSWER if value == "TEXT" else value


SHORT_ANSWER = "\n!say x"  # instead of the whole text, which takes the scripted engine seconds
USER = {"role": "user", "content": f"x{SHORT_ANSWER}"}
ASKED = {"role": "user", "content": "TEXT"}
PART = [{"type": "text", "text": "TEXT"}]
KEPT = {"localspec": {"conversation": "new"}}
THREAD = {"max_tokens": 5, "thread": {"type": "create"}}
TOOL = {"name": "f", "description": "TEXT", "parameters": {"type": "object"}}
SAID = {"prompt": "!say x"}  # otherwise the scripted engine says what is around the cursor
# Every text field of a request of each protocol.
TEXT_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [ASKED]}),
    "kept chat": ("/v1/chat/completions", {"messages": [ASKED], **KEPT}),
    "kept part": ("/v1/chat/completions", {"messages": [{**USER, "content": PART}], **KEPT}),
    "kept system": (
        "/v1/chat/completions",
        {"messages": [{**ASKED, "role": "system"}, USER], **KEPT},
    ),
    "kept beginning": (
        "/v1/chat/completions",
        {"messages": [USER, {**ASKED, "role": "assistant"}], **KEPT},
    ),
    "tool": (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]},
    ),
    "prediction": (
        "/v1/chat/completions",
        {"messages": [USER], "prediction": {"type": "content", "content": "TEXT"}},
    ),
    "input": ("/v1/responses", {"input": "TEXT"}),
    "input not kept": ("/v1/responses", {"input": "TEXT", "store": False}),
    "input item": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "TEXT"}]}]},
    ),
    "instructions": ("/v1/responses", {"input": "x", "instructions": "TEXT"}),
    "message": ("/v1/messages", {"max_tokens": 5, "messages": [ASKED]}),
    "thread": ("/v1/messages", {**THREAD, "messages": [ASKED]}),
    "thread's system": ("/v1/messages", {**THREAD, "system": "TEXT", "messages": [USER]}),
    "generate": ("/api/generate", {"model": "", "prompt": "TEXT", "stream": False}),
    "generate's system": (
        "/api/generate",
        {"model": "", "prompt": "x", "system": "TEXT", "stream": False},
    ),
    "Ollama's chat": ("/api/chat", {"model": "", "messages": [ASKED], "stream": False}),
    "prompt": ("/v1/completions", {"prompt": "TEXT"}),
    "suffix": ("/v1/completions", {"prompt": "x", "suffix": "TEXT"}),
    "llama-server's prompt": ("/completion", {"prompt": "TEXT"}),
    "before the cursor": ("/infill", {"input_prefix": "TEXT", "input_suffix": "x", **SAID}),
    "behind the cursor": ("/infill", {"input_prefix": "x", "input_suffix": "TEXT", **SAID}),
    "other file": (
        "/infill",
        {
            "input_prefix": "x",
            "input_suffix": "x",
            "input_extra": [{"filename": "a", "text": "TEXT"}],
            **SAID,
        },
    ),
    "tokenize": ("/tokenize", {"content": "TEXT"}),
    "template": ("/apply-template", {"messages": [ASKED]}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 1000])
def test_a_title_costs_the_same_for_any_text(shape: str, parts: int) -> None:
    """CPU time is measured: it does not depend on what else this machine does."""
    text = shape * (TEXT_BYTES // len(shape) // parts)
    content: Any = [ContentPart("text", text) for _ in range(parts)] if parts > 1 else text
    begun = time.thread_time()
    make_title([ChatMessage("user", content)])
    assert time.thread_time() - begun < 0.25


@pytest.mark.parametrize("shape", [*SHAPES, "x-billing-header:\n", "Current date: 1\n"])
def test_long_instructions_cost_little(shape: str) -> None:
    text = shape * (TEXT_BYTES // len(shape))
    begun = time.thread_time()
    stabilize_instructions([Message("system", text)])
    assert time.thread_time() - begun < 0.25


def read_loop_cpu(pid: str) -> float:
    """Return the CPU time of the thread of the daemon's event loop, in seconds."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the CPU time of a thread")
@pytest.mark.parametrize("name", TEXT_FIELDS)
def test_no_long_text_keeps_the_event_loop(api: Home, name: str) -> None:
    """Between two tokens of a bystander the loop works for no request as long as a person would notice."""
    pid = api.environment["PID"]
    path, fields = TEXT_FIELDS[name]
    shape = SHAPES[[*TEXT_FIELDS].index(name) % 2]
    body = json.dumps(put(fields, shape * (TEXT_BYTES // len(json.dumps(shape)[1:-1])))).encode()
    longest = 0.0
    statuses: list[int] = []
    with api.streaming("slow 100000") as bystander:
        bystander.await_text()
        sending = threading.Thread(
            target=lambda: statuses.append(api.request("POST", path, body).status)
        )
        before = read_loop_cpu(pid)
        sending.start()
        while sending.is_alive():
            bystander.readline()
            now = read_loop_cpu(pid)
            longest, before = max(longest, now - before), now
    assert statuses
    assert statuses[0] in (200, 400, 404, 413)
    assert longest < MAX_LOOP_CPU_S


@pytest.fixture
def warm(home: Home) -> Home:
    """Run a daemon with the builtin pair."""
    RunningDaemon(home)
    return home
