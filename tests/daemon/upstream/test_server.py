"""One server and a request on its way through it: any byte of it may be wrong, and none harms another."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import string
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localspec.daemon.worker.process import Event
from localspec.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from localspec.extras.upstream.connection import UpstreamConnection
from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.request import build_request
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.settings import Upstream
from tests.support.daemons import PATIENCE, wait_for
from tests.support.upstreams import (
    HEAD,
    ScriptedServer,
    Seen,
    certified,
    chunked,
    event,
    said,
    scripted_server,
    streamed,
    whole,
)

CHAT = frames.ChatPrompt([frames.Message("user", "hi")])


async def _events(server: UpstreamServer, request: frames.Generate) -> list[Event]:
    return [each async for each in server.events(request)]


async def _collect(server: UpstreamServer, came: list[Event]) -> None:
    async for each in server.events(frames.Generate(0, CHAT)):
        came.append(each)


def run(upstream: Upstream, request: frames.Generate | None = None) -> list[Event]:
    """All events of one answer."""

    async def main() -> list[Event]:
        server = UpstreamServer("big", upstream)
        try:
            return await _events(server, request or frames.Generate(0, CHAT))
        finally:
            await server.close()

    return asyncio.run(main())


def text(events: list[Event]) -> str:
    return "".join(each.text for each in events if isinstance(each, frames.Delta))


def done(events: list[Event]) -> frames.Done:
    assert isinstance(events[-1], frames.Done)
    return events[-1]


def sending(data: bytes) -> Callable[[Seen, socket.socket], None]:
    return lambda seen, connection: connection.sendall(data)


# ------------------------------------------------------------------------ what it is


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        *(("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama-server")),
        *(("localspec", "localspec"), ("tensorrt_llm", "tensorrt-llm"), ("somebody", "openai")),
    ],
)
def test_a_server_is_recognized_by_its_models_when_it_is_asked_first(owner: str, kind: str) -> None:
    with scripted_server(owner=owner) as there:

        async def main() -> None:
            server = UpstreamServer("big", Upstream(upstream=there.url))
            assert server.known is None
            assert not there.seen
            for _ in range(2):
                assert text(await _events(server, frames.Generate(0, CHAT))) == "hello there"
            assert server.known is not None
            assert (server.known.dialect.kind, server.known.model) == (kind, "tiny")
            await server.close()

        asyncio.run(main())
        assert [each.path for each in there.seen].count("/v1/models") == 1
        assert there.seen[-1].body["model"] == "tiny"


def test_what_is_stated_is_not_asked_for_and_one_of_several_models_must_be_named() -> None:
    with scripted_server(models=["one", "two"]) as there:
        named = Upstream(upstream=there.url, upstream_model="two", upstream_kind="vllm")
        assert text(run(named)) == "hello there"
        assert [each.path for each in there.seen] == ["/v1/chat/completions"]
        with pytest.raises(InvalidRequest, match=r"several models: one, two.*--upstream-model"):
            run(Upstream(upstream=there.url))


# ------------------------------------------------------------------------ what is asked


def test_tokens_are_those_of_the_model_that_is_named() -> None:
    """Another localspec has several, and the one that answers where none is named has another vocabulary."""

    def answer(seen: Seen, connection: socket.socket) -> None:
        both = {"prompt": "hi", "content": "hi", "tokens": [1]}
        connection.sendall(whole(both, headers="connection: close\r\n"))

    async def main(upstream: Upstream) -> None:
        server = UpstreamServer("big", upstream)
        await server.ask(frames.Tokenize(0, "hi"))
        await server.ask(frames.Detokenize(0, [1]))
        await server.ask(frames.CountTokens(0, CHAT))
        await server.close()

    with scripted_server(answer=answer) as there:
        asyncio.run(
            main(Upstream(upstream=there.url, upstream_model="two", upstream_kind="localspec"))
        )
        asked_ = [(each.path, each.body["model"]) for each in there.seen]
    tokens = ("/tokenize", "two")
    assert asked_ == [tokens, ("/detokenize", "two"), ("/apply-template", "two"), tokens]


def test_what_a_server_does_not_know_is_refused_or_left_out_by_its_name() -> None:
    grammar = frames.Constraint("grammar", "root ::= x", param="grammar")
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("openai", "grammar", {"constraint": grammar}),
        ("llama-server", "regex", {"constraint": frames.Constraint("regex", "x", param="regex")}),
        ("vllm", "exact", {"exact": True}),
        ("openai", "ignore_eos", {"sampling": frames.Sampling(ignore_eos=True)}),
        ("vllm", "logit_bias", {"sampling": frames.Sampling(text_bias={"a": 1.0})}),
        ("vllm", "prompt", {"prompt": frames.MixedPrompt(["a", 1])}),
        ("vllm", "input_suffix", {"prompt": frames.InfillPrompt("a", "b")}),
        ("openai", "messages", {"prompt": frames.ChatPrompt(CHAT.messages, continued="content")}),
        ("llama-server", "post_sampling_probs", {"post_sampling": True}),
    ]  # fmt: skip
    for kind, field, fields in refused:
        request = frames.Generate(**{"id": 0, "prompt": CHAT, **fields})
        with pytest.raises(InvalidRequest, match=f"'{field}'") as caught:
            build_request(request, KINDS[kind], "tiny")
        assert caught.value.param == field, kind
    sampling = frames.Sampling(top_k=5, dry_multiplier=0.5, xtc_probability=0.0, temperature=0.5)
    request = frames.Generate(
        0, CHAT, sampling, speculative=frames.SpeculationSettings(enabled=False)
    )
    sent = build_request(request, KINDS["openai"], "tiny")
    assert sent.note == (
        "The server does not know 'top_k', 'dry_multiplier', 'speculative'; left out."
    )
    assert sent.body["temperature"] == 0.5
    assert not {"top_k", "xtc_probability"} & sent.body.keys()
    assert build_request(request, KINDS["localspec"], "tiny").note == ""


def test_tools_schemas_and_infill_are_asked_for_in_each_servers_words() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("look", "go")
    ]
    earlier = frames.Message(
        "assistant",
        extra={"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": {"a": 1}}}]},
    )
    prompt = frames.ChatPrompt([*CHAT.messages, earlier], tools=tools)
    from localspec.protocol.calls import HERMES, ToolSet

    allowed = ToolSet(HERMES, {"go": {"type": "object"}}, required=True, parallel=False)
    request = frames.Generate(0, prompt, tools=allowed)
    body = build_request(request, KINDS["vllm"], "tiny").body
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert body["tool_choice"] == {"type": "function", "function": {"name": "go"}}
    assert body["parallel_tool_calls"] is False
    body = build_request(
        request, KINDS["llama-server"], "tiny"
    ).body  # which would take that for "auto"
    assert (body["tool_choice"], body["tools"]) == ("required", tools[1:])

    schema = frames.Constraint("json_schema", '{"type":"object"}', param="response_format")
    body = build_request(frames.Generate(0, CHAT, constraint=schema), KINDS["openai"], "tiny").body
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    prompt_ = frames.InfillPrompt("before", "after", [("f.py", "x")], "line")
    body = build_request(frames.Generate(0, prompt_), KINDS["llama-server"], "tiny").body
    assert (body["input_prefix"], body["prompt"]) == ("before", "line")
    sent = build_request(frames.Generate(0, prompt_), KINDS["vllm"], "Qwen/Qwen2.5-Coder-7B")
    assert sent.body["prompt"] == ("<|fim_prefix|>beforeline<|fim_suffix|>after<|fim_middle|>")
    assert sent.left_out == ["input_extra"]


# ------------------------------------------------------------------------ what comes


def chunk(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def test_thoughts_and_calls_come_apart() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    stream = (
        chunk(reasoning_content="hm")
        + chunk(reasoning="m")
        + chunk(tool_calls=[call])
        + chunk(tool_calls=[more])
        + said(finish="tool_calls")
    )
    with scripted_server(stream=stream) as there:
        events = run(Upstream(upstream=there.url))
    deltas = [each for each in events if isinstance(each, frames.Delta)]
    assert "".join(each.thought for each in deltas) == "hmm"
    parts = [part for each in deltas for part in each.calls]
    assert parts == [
        frames.CallPart(0, "look", "c1", '{"a"'),
        frames.CallPart(0, "", "", ":1}"),
    ]
    assert done(events).finish_reason == "stop"


def test_the_likeliest_token_comes_first_in_whatever_order_a_server_names_them() -> None:
    told = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"b": -2.0, "a": -1.0}]}
    text_ = {"index": 0, "text": "a", "logprobs": told, "finish_reason": "stop"}
    with scripted_server(stream=event({"choices": [text_]}) + event(b"[DONE]")) as there:
        request = frames.Generate(0, frames.TextPrompt("x"), max_tokens=9, top_logprobs=2)
        events = run(Upstream(upstream=there.url), request)
    delta = next(each for each in events if isinstance(each, frames.Delta))
    assert [piece for _, piece, _ in delta.logprobs[0].top] == [b"a", b"b"]


# As a vLLM 0.32 and llama-server said it.
VLLM = {
    "mean_acceptance_length": 4.0, "draft_acceptance_rate": 1.0, "acceptance_histogram": [0, 0, 0, 6],
    "num_spec_steps": 6, "num_accepted_draft_tokens": 18, "num_draft_tokens": 18, "num_spec_tokens": 3,
}  # fmt: skip
SGLANG = {"spec_num_correct_drafts": 10, "spec_num_proposed_drafts": 20, "spec_verify_ct": 14}
LLAMA = {
    "prompt_n": 7, "prompt_ms": 3.5, "predicted_n": 24, "predicted_ms": 12.0, "draft_n": 18,
    "draft_n_accepted": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "told", "figures"),
    [
        ("vllm", {"metrics": {"speculative_decoding": VLLM}}, (18, 18, 6)),
        ("sglang", {"sglext": {"spec_tokens_details": SGLANG}}, (20, 10, 14)),
        ("llamacpp", {"timings": LLAMA}, (18, 16, 8)),
        ("somebody", {"timings": LLAMA}, None),
        ("vllm", {}, None),
        ("vllm", {"metrics": {"speculative_decoding": {**VLLM, "num_draft_tokens": "6"}}}, None),
        ("llamacpp", {"timings": {**LLAMA, "draft_n_accepted": 25}}, None),
    ],
)
def test_what_speculation_did_is_told_as_the_server_tells_it_or_not_at_all(
    owner: str, told: dict[str, Any], figures: tuple[int, int, int] | None
) -> None:
    stream = said(*["a"] * 24, **told)
    with scripted_server(owner=owner, stream=stream) as there:
        end = done(run(Upstream(upstream=there.url)))
    found = end.speculation
    assert found.speed_up is None
    assert end.completion_tokens == 24
    if figures is None:
        assert (found.active, found.drafted) == (False, 0)
        assert found.reason is not None
        assert "not measured" in found.reason
    else:
        assert (found.drafted, found.accepted, found.rounds) == figures
        assert found.mean_tokens_per_pass == 24 / figures[2]


@pytest.mark.parametrize("others", [0, 3])
def test_a_servers_counters_tell_of_an_answer_where_nobody_elses_is_in_them(others: int) -> None:
    """As a vLLM counts whose answers say nothing of drafts."""
    names = "generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
    counts = [100, 40, 30]

    def metrics() -> str:
        looked.set()
        return "".join(
            f'vllm:{name}_total{{engine="{engine}"}} {count / 2}\n'
            for name, count in zip(names, counts, strict=True)
            for engine in (0, 1)
        )

    def answer(seen: Seen, connection: socket.socket) -> None:
        assert looked.wait(PATIENCE)
        counts[:] = [124 + others, 60, 46]
        connection.sendall(streamed(said(*["a"] * 24)))

    looked = threading.Event()
    with scripted_server(answer=answer, metrics=metrics) as there:
        found = done(run(Upstream(upstream=there.url))).speculation
    if others:
        assert (found.active, found.drafted) == (False, 0)
    else:
        assert (found.drafted, found.accepted, found.mean_tokens_per_pass) == (20, 16, 3.0)


# ------------------------------------------------------------------------ faults


def test_an_answer_cut_anywhere_is_one_error_and_its_text_a_beginning() -> None:
    """With a bystander, whose answers go on."""
    stream = said("one", " two", " three")
    sent = streamed(stream)
    whole_from = sent.index(b"[DONE]") + len(b"[DONE]\n")
    at = 0

    def answer(seen: Seen, connection: socket.socket) -> None:
        connection.sendall(sent[:at] if seen.body["messages"][0]["content"] == "hi" else sent)

    other = frames.Generate(0, frames.ChatPrompt([frames.Message("user", "bystander")]))

    async def main(there: ScriptedServer) -> None:
        nonlocal at
        upstream = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
        server = UpstreamServer("big", upstream)
        for cut in range(0, whole_from, 7):
            at = cut
            beside = asyncio.create_task(_events(server, other))
            came: list[Event] = []
            with pytest.raises(UpstreamError, match="'big'"):
                await _collect(server, came)
            assert "one two three".startswith(text(came))
            assert not any(isinstance(each, frames.Done) for each in came)
            assert text(await beside) == "one two three"
        await server.close()

    with scripted_server(answer=answer) as there:
        asyncio.run(main(there))


def choice(**fields: Any) -> bytes:
    return event({"choices": [fields]})


GARBAGE = [
    event(b"{"), event(b"[]"), event(b"1"), event(b"null"), event(b'"\\ud800"'), b"\xff\xfe\n\n",
    event(b"[" * 100_000), event(b'{"choices":' + b"[" * 5_000), event({"choices": 1}),
    event({"choices": [1]}), event({"choices": [{"delta": []}]}), choice(delta={"content": 1}),
    choice(delta={"tool_calls": [1]}), choice(delta={"tool_calls": {}}),
    choice(delta={"tool_calls": [{"index": -1, "function": {}}]}),
    choice(delta={"content": "x"}, logprobs={"content": [{"bytes": 9}]}),
    choice(finish_reason="because"), event({"error": {"message": "no"}}),
    event({"error": 1}), b"HTTP/1.1 500 what\r\n\r\n", b"data: " + b"x" * (5 << 20), b"\x00" * 100 + b"\n",
    event(b"[DONE]"), event({"choices": [], "timings": {"prompt_n": "x" * 9}}) + event(b"[DONE]"),
]  # fmt: skip


def test_garbage_ends_the_request_that_it_is_for_with_one_error() -> None:
    draw = random.Random(7)
    good = said("one", " two")
    streams = [chunk(content="one") + each for each in GARBAGE]
    for _ in range(60):  # and bytes changed anywhere
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        streams.append(bytes(data))

    async def main(there: ScriptedServer) -> None:
        upstream = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
        server = UpstreamServer("big", upstream)
        for at, each in enumerate(streams):
            there.stream = each
            came: list[Event] = []
            # A changed byte may be a letter of the text, or in what is not read.
            with contextlib.suppress(UpstreamError):
                await _collect(server, came)
                assert at >= len(GARBAGE), each
                assert done(came)
        there.stream = good
        assert text(await _events(server, frames.Generate(0, CHAT))) == "one two"
        await server.close()

    with scripted_server() as there:
        asyncio.run(main(there))


def test_a_request_is_sent_once_more_where_nothing_came_and_never_after_that() -> None:
    tries: list[int] = []

    def answer(seen: Seen, connection: socket.socket) -> None:
        tries.append(1)
        if len(tries) == 2:
            connection.sendall(streamed(said("again")))
        elif len(tries) > 2:
            connection.sendall(HEAD + chunked(chunk(content="begun")))

    with scripted_server(answer=answer) as there:
        upstream = Upstream(upstream=there.url)
        assert text(run(upstream)) == "again"
        assert len(tries) == 2
        with pytest.raises(UpstreamError, match="'big'"):
            run(upstream)
        assert len(tries) == 3


def test_a_problem_is_over_with_the_next_answer() -> None:
    """Whoever asks reads no further than its end."""

    def answer(seen: Seen, connection: socket.socket) -> None:
        late = whole({"error": "loading"}, "503 Later", "connection: close\r\n")
        connection.sendall(late if len(there.seen) <= 2 else streamed(said("hello")))

    async def main() -> None:
        upstream = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
        server = UpstreamServer("big", upstream)
        with pytest.raises(UpstreamUnreachable):
            await _events(server, frames.Generate(0, CHAT))
        assert "not ready" in server.problem
        events = server.events(frames.Generate(0, CHAT))
        while not isinstance(await anext(events), frames.Done):
            pass
        await events.aclose()
        assert server.problem == ""
        await server.close()

    with scripted_server(answer=answer) as there:
        asyncio.run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_silence_is_not_waited_for(begun: bool) -> None:
    def answer(seen: Seen, connection: socket.socket) -> None:
        connection.sendall(HEAD + (chunked(chunk(content="begun")) if begun else b""))
        there.watch(seen, connection)

    with scripted_server(answer=answer) as there:
        name = "silence_timeout" if begun else "first_token_timeout"
        stated = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
        seconds = 0.1
        while not there.seen:  # on a busy machine the request itself may take longer
            with pytest.raises(UpstreamTimeout, match="sent nothing for too long"):
                run(msgspec.structs.replace(stated, **{name: seconds}))
            seconds *= 4
            assert seconds < PATIENCE
        wait_for(lambda: there.seen[0].left, "the connection's end")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has all of these")
def test_a_link_that_is_cut_ends_a_connection_within_half_a_minute() -> None:
    """As far as that can be seen without cutting one: by what its socket was told."""

    async def main() -> None:
        connection = UpstreamConnection("big", Upstream(upstream=there.url))
        async with connection._open_response(
            "GET", "models", None, time.monotonic() + PATIENCE
        ) as response:
            used = response.extensions["network_stream"].get_extra_info("socket")

            def told(name: str) -> int:
                value: int = used.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                return value

            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            asked = told("TCP_KEEPIDLE") + told("TCP_KEEPINTVL") * told("TCP_KEEPCNT")
            assert asked <= 30
            assert told("TCP_USER_TIMEOUT") <= 30_000
            assert told("TCP_NODELAY")
        await connection.close()

    with scripted_server() as there:
        asyncio.run(main())


def test_whoever_leaves_closes_the_connection_at_once() -> None:
    def answer(seen: Seen, connection: socket.socket) -> None:
        connection.sendall(HEAD + chunked(chunk(content="begun")))
        there.watch(seen, connection)

    async def main() -> None:
        server = UpstreamServer("big", Upstream(upstream=there.url))
        events = server.events(frames.Generate(0, CHAT))
        while not isinstance(await anext(events), frames.Delta):
            pass
        await events.aclose()
        await asyncio.to_thread(wait_for, lambda: there.seen[-1].left, "the connection's end")
        await server.close()

    with scripted_server(answer=answer) as there:
        asyncio.run(main())


def test_nobody_there_and_refusals_are_said_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(UpstreamUnreachable, match=rf"'big' \({address}\) does not answer"):
        run(Upstream(upstream=address))
    long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    # As vLLM 0.32 says it.
    longer = (
        "This model's maximum context length is 2048 tokens. However, your prompt contains at least"
    )
    worded = {"message": longer, "type": "BadRequestError", "param": "input_tokens", "code": 400}
    refusals: list[tuple[bytes, type[LocalspecError], str]] = [
        (whole({"error": worded}, "400 Bad Request"), ContextExceeded, "context length is 2048"),
        (whole(long, "400 Bad Request"), ContextExceeded, "too long"),
        (whole({"detail": "no such field"}, "422 What"), InvalidRequest, "no such field"),
        (whole({}, "403 No"), UpstreamError, "wants a key .403."),
        (whole({"error": "loading"}, "503 Later"), UpstreamUnreachable, "not ready.*loading"),
        (whole({"message": "\x1b[31mred"}, "500 Oh"), UpstreamError, "␛"),
        (b"SSH-2.0-OpenSSH_9\r\n", UpstreamError, "broke the connection|is not HTTP"),
        (whole({"choices": []}), UpstreamError, "in place of an event stream"),
        (whole({}, "307 There", "location: http://[\r\n"), UpstreamError, "to an invalid address"),
    ]
    for data, kind, words in refusals:
        with scripted_server(answer=sending(data)) as there, pytest.raises(kind, match=words):
            run(Upstream(upstream=there.url))


# ------------------------------------------------------------------------ keys


def test_a_key_that_is_refused_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1")
    file.chmod(0o600)
    with scripted_server(answer=sending(whole({}, "401 No"))) as there:
        upstream = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
        with pytest.raises(UpstreamError, match=r"wants a key \(401\).*--key-file"):
            run(upstream)
        with pytest.raises(UpstreamError, match=r"refuses the key \(401\)"):
            run(msgspec.structs.replace(upstream, key_file=str(file)))


def test_a_key_goes_to_its_server_alone_and_into_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(11)
    letters = string.ascii_letters + string.digits + "-_.+/="
    with scripted_server() as other, scripted_server() as there:
        for at in range(24):
            key = "sk-" + "".join(draw.choices(letters, k=draw.randint(12, 60)))
            file = tmp_path / "key"
            file.write_text(f"{key}\n")
            file.chmod(0o600)
            monkeypatch.setenv("BIG_KEY", key)
            named = {"key_file": str(file)} if at % 2 else {"key_env": "BIG_KEY"}
            echoes = [
                whole({"error": {"message": f"bad key {key}", "param": key}}, "400 Bad"),
                whole({"error": f"{key} is wrong"}, "401 No"),
                whole({"detail": key}, "500 Oh"),
                whole({"message": f"x{key}x"}, "503 Later"),
                whole({}, "307 There", f"location: {other.url}/chat/completions?{key}\r\n"),
                whole({}, "302 There", "location: /elsewhere\r\n"),
                whole({}, "307 There", f"location: http://{key}.example/\r\n"),
                HEAD.replace(b"event-stream", key.encode()),
                streamed(event({"error": {"message": f"no {key}"}})),
                key.encode(),
            ]
            there.answer = sending(echoes[at % len(echoes)])
            stated = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
            upstream = msgspec.structs.replace(stated, **named)
            with pytest.raises(LocalspecError) as caught:
                run(upstream)
            shown = f"{caught.value!r} {caught.value.message} {caught.value.param} {upstream}"
            assert key.lower() not in shown.lower()
            assert there.seen[-1].headers["authorization"] == f"Bearer {key}"
            assert key not in caplog.text
        assert other.seen == []


def test_a_redirect_on_the_same_server_is_followed() -> None:
    def answer(seen: Seen, connection: socket.socket) -> None:
        if seen.path == "/v1/chat/completions":
            connection.sendall(whole({}, "308 There", "location: /v2/chat\r\n"))
            seen = there.seen[-1]
        else:
            connection.sendall(streamed(said("moved")))

    with scripted_server(answer=answer) as there:
        assert text(run(Upstream(upstream=there.url))) == "moved"
        assert there.seen[-1].path == "/v2/chat"


def test_a_key_that_is_not_there_is_said_by_its_name(tmp_path: Path) -> None:
    with scripted_server() as there:
        for named, words in (
            ({"key_env": "NOBODY_SET_THIS"}, "NOBODY_SET_THIS"),
            ({"key_file": str(tmp_path / "none")}, "cannot be read"),
        ):
            with pytest.raises(UpstreamError, match=words):
                run(msgspec.structs.replace(Upstream(upstream=there.url), **named))
        assert not there.seen


# ------------------------------------------------------------------------ TLS


def test_a_certificate_is_verified_and_another_authority_can_be_named(tmp_path: Path) -> None:
    context, certificate = certified(tmp_path, "127.0.0.1")
    with scripted_server(tls=context) as there:
        with pytest.raises(UpstreamError, match=r"is not trusted.*--ca FILE"):
            run(Upstream(upstream=there.url))
        assert text(run(Upstream(upstream=there.url, ca=str(certificate)))) == "hello there"


def test_text_is_passed_on_as_soon_as_it_is_there() -> None:
    """The second piece is sent when the first was seen."""
    seen_first = threading.Event()

    def answer(seen: Seen, connection: socket.socket) -> None:
        connection.sendall(HEAD + chunked(chunk(content="one")))
        assert seen_first.wait(PATIENCE)
        connection.sendall(chunked(chunk(content=" two") + said()) + b"0\r\n\r\n")

    async def main() -> str:
        server, found = UpstreamServer("big", Upstream(upstream=there.url)), ""
        async for each in server.events(frames.Generate(0, CHAT)):
            if isinstance(each, frames.Delta):
                found += each.text
                seen_first.set()
        await server.close()
        return found

    with scripted_server(answer=answer) as there:
        assert asyncio.run(main()) == "one two"
