"""Requests to one upstream server: dialects, faults in any byte of an answer, keys and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import string
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localspec.daemon.http.errors import stream_error
from localspec.daemon.worker.process import Event
from localspec.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
    WorkerDied,
)
from localspec.extras.upstream.connection import UpstreamConnection
from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.request import build_request
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.pieces import Arguments, Call, Text
from localspec.protocol.settings import Upstream
from tests.extras.upstream.asking import (
    CHAT,
    ask,
    encode_delta,
    encode_text,
    join_text,
    list_deltas,
    run_request,
    send_bytes,
    send_json,
    state,
)
from tests.support.daemons import wait_for
from tests.support.patience import PATIENCE
from tests.support.upstreams import (
    HEAD,
    ReceivedRequest,
    ScriptedServer,
    encode_chat,
    encode_chunk,
    encode_event,
    encode_response,
    encode_stream,
    make_tls_context,
    scripted_server,
)


async def _collect_events(server: UpstreamServer, request: frames.Generate) -> list[Event]:
    return [event async for event in server.events(request)]


async def _append_events(server: UpstreamServer, received: list[Event]) -> None:
    async for item in server.events(frames.Generate(0, CHAT)):
        received.append(item)


def get_done(events: list[Event]) -> frames.Done:
    assert isinstance(events[-1], frames.Done)
    return events[-1]


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        *(("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama-server")),
        *(("localspec", "localspec"), ("tensorrt_llm", "tensorrt-llm"), ("somebody", "openai")),
    ],
)
def test_a_server_is_recognized_at_its_first_request(owner: str, kind: str) -> None:
    with scripted_server(owner=owner) as remote:

        async def main() -> None:
            server = UpstreamServer("big", Upstream(upstream=remote.url))
            assert server.known is None
            assert not remote.requests
            for _ in range(2):
                events = await _collect_events(server, frames.Generate(0, CHAT))
                assert join_text(events) == "hello there"
            assert server.known is not None
            assert (server.known.dialect.kind, server.known.model) == (kind, "tiny")
            await server.close()

        asyncio.run(main())
        assert [request.path for request in remote.requests].count("/v1/models") == 1
        assert remote.requests[-1].body["model"] == "tiny"


def test_a_stated_model_is_not_looked_up_and_one_of_several_is_required() -> None:
    with scripted_server(models=["one", "two"]) as remote:
        assert join_text(run_request(state(remote, model="two"))) == "hello there"
        assert [request.path for request in remote.requests] == ["/v1/chat/completions"]
        with pytest.raises(InvalidRequest, match=r"several models: one, two.*--upstream-model"):
            run_request(Upstream(upstream=remote.url))


def test_token_requests_name_the_model() -> None:
    """Another localspec has several models, and its default model may have another vocabulary."""

    with scripted_server(answer=send_json(prompt="hi", content="hi", tokens=[1])) as remote:
        small = frames.Tokenize(0, "hi"), frames.Detokenize(0, [1]), frames.CountTokens(0, CHAT)
        ask(state(remote, "localspec", "two"), *small)
        requests = [(request.path, request.body["model"]) for request in remote.requests]
    tokens = ("/tokenize", "two")
    assert requests == [tokens, ("/detokenize", "two"), ("/apply-template", "two"), tokens]


def test_unsupported_fields_are_refused_or_left_out_by_name() -> None:
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
    upstream_request = build_request(request, KINDS["openai"], "tiny")
    assert upstream_request.note == (
        "The server does not know 'top_k', 'dry_multiplier', 'speculative'; left out."
    )
    assert upstream_request.body["temperature"] == 0.5
    assert not {"top_k", "xtc_probability"} & upstream_request.body.keys()
    assert build_request(request, KINDS["localspec"], "tiny").note == ""
    guarded = frames.Generate(0, CHAT, loop_guard="all")
    assert build_request(guarded, KINDS["openai"], "tiny").left_out == ["loop_guard"]
    assert build_request(guarded, KINDS["localspec"], "tiny").body["loop_guard"] == "all"


def test_tools_schemas_and_infill_follow_each_servers_dialect() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("look", "go")
    ]
    earlier = frames.Message(
        "assistant",
        extra={"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": {"a": 1}}}]},
    )
    prompt = frames.ChatPrompt([*CHAT.messages, earlier], tools=tools)
    from localspec.chat.families.hermes import HERMES
    from localspec.protocol.calls import ToolSet

    allowed = ToolSet(HERMES, {"go": {"type": "object"}}, required=True, parallel=False)
    request = frames.Generate(0, prompt, tools=allowed)
    body = build_request(request, KINDS["vllm"], "tiny").body
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert body["tool_choice"] == {"type": "function", "function": {"name": "go"}}
    assert body["parallel_tool_calls"] is False
    # llama-server treats a named tool as "auto", so only the allowed tools are sent.
    body = build_request(request, KINDS["llama-server"], "tiny").body
    assert (body["tool_choice"], body["tools"]) == ("required", tools[1:])

    schema = frames.Constraint("json_schema", '{"type":"object"}', param="response_format")
    body = build_request(frames.Generate(0, CHAT, constraint=schema), KINDS["openai"], "tiny").body
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    infill = frames.InfillPrompt("before", "after", [("f.py", "x")], "line")
    body = build_request(frames.Generate(0, infill), KINDS["llama-server"], "tiny").body
    assert (body["input_prefix"], body["prompt"]) == ("before", "line")
    upstream_request = build_request(
        frames.Generate(0, infill), KINDS["vllm"], "Qwen/Qwen2.5-Coder-7B"
    )
    assert upstream_request.body["prompt"] == (
        "<|fim_prefix|>beforeline<|fim_suffix|>after<|fim_middle|>"
    )
    assert upstream_request.left_out == ["input_extra"]


def test_thoughts_and_calls_are_separate_fields() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    stream = (
        encode_delta(reasoning_content="hm")
        + encode_delta(reasoning="m")
        + encode_delta(tool_calls=[call])
        + encode_delta(tool_calls=[more])
        + encode_chat(finish="tool_calls")
    )
    with scripted_server(stream=stream) as remote:
        events = run_request(Upstream(upstream=remote.url))
    assert [piece for delta in list_deltas(events) for piece in delta.pieces] == [
        Text("reasoning", "hm"),
        Text("reasoning", "m"),
        Call("c1", "look"),
        Arguments('{"a"'),
        Arguments(":1}"),
    ]
    assert get_done(events).finish_reason == "stop"


def test_top_logprobs_are_sorted_by_likelihood() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"b": -2.0, "a": -1.0}]}
    with scripted_server(stream=encode_text("a", logprobs=logprobs)) as remote:
        request = frames.Generate(0, frames.TextPrompt("x"), max_tokens=9, top_logprobs=2)
        events = run_request(Upstream(upstream=remote.url), request)
    assert [piece for _, piece, _ in list_deltas(events)[0].logprobs[0].top] == [b"a", b"b"]


# Figures that a vLLM 0.32 and a llama-server reported.
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
    ("owner", "report", "figures"),
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
def test_speculation_is_reported_only_as_the_server_reports_it(
    owner: str, report: dict[str, Any], figures: tuple[int, int, int] | None
) -> None:
    stream = encode_chat(*["a"] * 24, **report)
    with scripted_server(owner=owner, stream=stream) as remote:
        final = get_done(run_request(Upstream(upstream=remote.url)))
    speculation = final.speculation
    assert speculation.speed_up is None
    assert speculation.speed_up_reason
    assert final.completion_tokens == 24
    if figures is None:
        assert (speculation.active, speculation.drafted) == (False, 0)
        assert speculation.reason is not None
        assert "not measured" in speculation.reason
    else:
        assert (speculation.drafted, speculation.accepted, speculation.rounds) == figures
        assert speculation.mean_tokens_per_pass == 24 / figures[2]


@pytest.mark.parametrize("others", [0, 3])
def test_server_counters_are_used_only_for_an_undisturbed_answer(others: int) -> None:
    """A vLLM whose answers have no figures of drafts still counts drafts in its metrics."""
    names = "generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
    counts = [100, 40, 30]

    def metrics() -> str:
        metrics_read.set()
        return "".join(
            f'vllm:{name}_total{{engine="{engine}"}} {count / 2}\n'
            for name, count in zip(names, counts, strict=True)
            for engine in (0, 1)
        )

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        assert metrics_read.wait(PATIENCE)
        counts[:] = [124 + others, 60, 46]
        connection.sendall(encode_stream(encode_chat(*["a"] * 24)))

    metrics_read = threading.Event()
    with scripted_server(answer=answer, metrics=metrics) as remote:
        speculation = get_done(run_request(Upstream(upstream=remote.url))).speculation
    if others:
        assert (speculation.active, speculation.drafted) == (False, 0)
    else:
        assert (speculation.drafted, speculation.accepted, speculation.mean_tokens_per_pass) == (
            20,
            16,
            3.0,
        )


def test_an_answer_cut_anywhere_is_one_error_after_its_text() -> None:
    """Answers to a bystander on the same server stay complete."""
    stream = encode_chat("one", " two", " three")
    response = encode_stream(stream)
    complete_length = response.index(b"[DONE]") + len(b"[DONE]\n")
    cut_position = 0

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        connection.sendall(
            response[:cut_position] if request.body["messages"][0]["content"] == "hi" else response
        )

    bystander_request = frames.Generate(0, frames.ChatPrompt([frames.Message("user", "bystander")]))

    async def main(remote: ScriptedServer) -> None:
        nonlocal cut_position
        server = UpstreamServer("big", state(remote))
        for position in range(0, complete_length, 7):
            cut_position = position
            bystander = asyncio.create_task(_collect_events(server, bystander_request))
            received: list[Event] = []
            with pytest.raises(UpstreamError, match="'big'"):
                await _append_events(server, received)
            assert "one two three".startswith(join_text(received))
            assert not any(isinstance(event, frames.Done) for event in received)
            assert join_text(await bystander) == "one two three"
        await server.close()

    with scripted_server(answer=answer) as remote:
        asyncio.run(main(remote))


def encode_choice(**fields: Any) -> bytes:
    return encode_event({"choices": [fields]})


GARBAGE = [
    encode_event(b"{"),
    encode_event(b"[]"),
    encode_event(b"1"),
    encode_event(b"null"),
    encode_event(b'"\\ud800"'),
    b"\xff\xfe\n\n",
    encode_event(b"[" * 100_000),
    encode_event(b'{"choices":' + b"[" * 5_000),
    encode_event({"choices": 1}),
    encode_event({"choices": [1]}),
    encode_event({"choices": [{"delta": []}]}),
    encode_choice(delta={"content": 1}),
    encode_choice(delta={"tool_calls": [1]}),
    encode_choice(delta={"tool_calls": {}}),
    encode_choice(delta={"tool_calls": [{"index": -1, "function": {}}]}),
    encode_choice(delta={"content": "x"}, logprobs={"content": [{"bytes": 9}]}),
    encode_choice(finish_reason="because"),
    encode_event({"error": {"message": "no"}}),
    encode_event({"error": 1}),
    b"HTTP/1.1 500 what\r\n\r\n",
    b"data: " + b"x" * (5 << 20),
    b"\x00" * 100 + b"\n",
    encode_event(b"[DONE]"),
    encode_event({"choices": [], "timings": {"prompt_n": "x" * 9}}) + encode_event(b"[DONE]"),
]


def test_an_error_in_a_stream_of_another_localspec_is_quoted_without_its_words_for_agents() -> None:
    [event] = stream_error(WorkerDied("The engine crashed."))
    with (
        scripted_server(stream=encode_event(msgspec.json.encode(event))) as remote,
        pytest.raises(UpstreamError) as caught,
    ):
        run_request(Upstream(upstream=remote.url))
    assert caught.value.message == "The server of 'big' failed: The engine crashed."


def test_garbage_fails_only_its_own_request() -> None:
    draw = random.Random(7)
    good = encode_chat("one", " two")
    streams = [encode_delta(content="one") + garbage for garbage in GARBAGE]
    for _ in range(60):  # valid streams with changed bytes anywhere
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        streams.append(bytes(data))

    async def main(remote: ScriptedServer) -> None:
        server = UpstreamServer("big", state(remote))
        for index, stream in enumerate(streams):
            remote.stream = stream
            received: list[Event] = []
            # A changed byte may be a letter of the text, or lie where nothing is parsed.
            with contextlib.suppress(UpstreamError):
                await _append_events(server, received)
                assert index >= len(GARBAGE), stream
                assert get_done(received)
        remote.stream = good
        assert join_text(await _collect_events(server, frames.Generate(0, CHAT))) == "one two"
        await server.close()

    with scripted_server() as remote:
        asyncio.run(main(remote))


def test_a_request_is_retried_once_and_only_before_its_first_event() -> None:
    tries: list[int] = []

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        tries.append(1)
        if len(tries) == 2:
            connection.sendall(encode_stream(encode_chat("again")))
        elif len(tries) > 2:
            connection.sendall(HEAD + encode_chunk(encode_delta(content="begun")))

    with scripted_server(answer=answer) as remote:
        upstream = Upstream(upstream=remote.url)
        assert join_text(run_request(upstream)) == "again"
        assert len(tries) == 2
        with pytest.raises(UpstreamError, match="'big'"):
            run_request(upstream)
        assert len(tries) == 3


def test_a_problem_is_cleared_by_the_next_answer() -> None:
    """The caller reads events only up to the final one."""

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        late = encode_response({"error": "loading"}, "503 Later", "connection: close\r\n")
        connection.sendall(
            late if len(remote.requests) <= 2 else encode_stream(encode_chat("hello"))
        )

    async def main() -> None:
        server = UpstreamServer("big", state(remote))
        with pytest.raises(UpstreamUnreachable):
            await _collect_events(server, frames.Generate(0, CHAT))
        assert "not ready" in server.status.problem
        events = server.events(frames.Generate(0, CHAT))
        while not isinstance(await anext(events), frames.Done):
            pass
        await events.aclose()
        assert server.status.problem == ""
        await server.close()

    with scripted_server(answer=answer) as remote:
        asyncio.run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_silent_server_times_out(begun: bool) -> None:
    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        connection.sendall(HEAD + (encode_chunk(encode_delta(content="begun")) if begun else b""))
        remote.watch(request, connection)

    with scripted_server(answer=answer) as remote:
        name = "silence_timeout" if begun else "first_token_timeout"
        seconds = 0.1
        while not remote.requests:  # on a busy machine the request itself may take longer
            with pytest.raises(UpstreamTimeout, match="sent nothing for too long"):
                run_request(msgspec.structs.replace(state(remote), **{name: seconds}))
            seconds *= 4
            assert seconds < PATIENCE
        wait_for(lambda: remote.requests[0].closed_at, "the connection's end")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has all of these")
def test_keepalive_ends_a_cut_connection_within_half_a_minute() -> None:
    """The options of the socket are checked, because no link can be cut here."""

    async def main() -> None:
        connection = UpstreamConnection("big", Upstream(upstream=remote.url))
        async with connection._open_response(
            "GET", "models", None, time.monotonic() + PATIENCE
        ) as response:
            tcp_socket = response.extensions["network_stream"].get_extra_info("socket")

            def read_option(name: str) -> int:
                value: int = tcp_socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                return value

            assert tcp_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            keepalive_s = read_option("TCP_KEEPIDLE") + read_option("TCP_KEEPINTVL") * read_option(
                "TCP_KEEPCNT"
            )
            assert keepalive_s <= 30
            assert read_option("TCP_USER_TIMEOUT") <= 30_000
            assert read_option("TCP_NODELAY")
        await connection.close()

    with scripted_server() as remote:
        asyncio.run(main())


def test_leaving_a_stream_closes_its_connection_at_once() -> None:
    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        connection.sendall(HEAD + encode_chunk(encode_delta(content="begun")))
        remote.watch(request, connection)

    async def main() -> None:
        server = UpstreamServer("big", Upstream(upstream=remote.url))
        events = server.events(frames.Generate(0, CHAT))
        while not isinstance(await anext(events), frames.Delta):
            pass
        await events.aclose()
        await asyncio.to_thread(
            wait_for, lambda: remote.requests[-1].closed_at, "the connection's end"
        )
        await server.close()

    with scripted_server(answer=answer) as remote:
        asyncio.run(main())


def test_unreachable_servers_and_refusals_have_plain_messages() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UpstreamUnreachable, match=rf"'big' \({address}\) does not answer"):
        run_request(Upstream(upstream=address))
    long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    # The wording of vLLM 0.32.
    longer = (
        "This model's maximum context length is 2048 tokens. However, your prompt contains at least"
    )
    worded = {"message": longer, "type": "BadRequestError", "param": "input_tokens", "code": 400}
    no_stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 0\r\n\r\n"
    refusals: list[tuple[bytes, type[LocalspecError], str]] = [
        (encode_response({"error": worded}, "400 Bad"), ContextExceeded, "context length is 2048"),
        (encode_response(long, "400 Bad Request"), ContextExceeded, "too long"),
        (encode_response({"detail": "no such field"}, "422 What"), InvalidRequest, "no such field"),
        (encode_response({}, "403 No"), UpstreamError, "wants a key .403."),
        (encode_response({"error": "loading"}, "503 No"), UpstreamUnreachable, "ready.*loading"),
        (encode_response({"message": "\x1b[31mred"}, "500 Oh"), UpstreamError, "␛"),
        (b"SSH-2.0-OpenSSH_9\r\n", UpstreamError, "broke the connection|is not HTTP"),
        (encode_response({"choices": []}), UpstreamError, "was cut off"),
        (no_stream, UpstreamError, "'text/html' in place of an event stream"),
        (
            encode_response({}, "307 There", "location: http://[\r\n"),
            *(UpstreamError, "to an invalid address"),
        ),
    ]
    for data, kind, words in refusals:
        with scripted_server(answer=send_bytes(data)) as remote, pytest.raises(kind, match=words):
            run_request(Upstream(upstream=remote.url))


def test_a_refused_key_and_a_missing_key_have_different_messages(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1")
    file.chmod(0o600)
    with scripted_server(answer=send_bytes(encode_response({}, "401 No"))) as remote:
        with pytest.raises(UpstreamError, match=r"wants a key \(401\).*--key-file"):
            run_request(state(remote))
        with pytest.raises(UpstreamError, match=r"refuses the key \(401\)"):
            run_request(state(remote, key_file=str(file)))


def test_a_key_is_sent_only_to_its_server_and_in_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(11)
    letters = string.ascii_letters + string.digits + "-_.+/="
    with scripted_server() as redirect_target, scripted_server() as remote:
        for index in range(24):
            key = "sk-" + "".join(draw.choices(letters, k=draw.randint(12, 60)))
            file = tmp_path / "key"
            file.write_text(f"{key}\n")
            file.chmod(0o600)
            monkeypatch.setenv("BIG_KEY", key)
            key_source = {"key_file": str(file)} if index % 2 else {"key_env": "BIG_KEY"}
            echoes = [
                encode_response({"error": {"message": f"bad key {key}", "param": key}}, "400 Bad"),
                encode_response({"error": f"{key} is wrong"}, "401 No"),
                encode_response({"detail": key}, "500 Oh"),
                encode_response({"message": f"x{key}x"}, "503 Later"),
                encode_response(
                    {}, "307 There", f"location: {redirect_target.url}/chat/completions?{key}\r\n"
                ),
                encode_response({}, "302 There", "location: /elsewhere\r\n"),
                encode_response({}, "307 There", f"location: http://{key}.example/\r\n"),
                HEAD.replace(b"event-stream", key.encode()),
                encode_stream(encode_event({"error": {"message": f"no {key}"}})),
                key.encode(),
            ]
            remote.answer = send_bytes(echoes[index % len(echoes)])
            upstream = state(remote, **key_source)
            with pytest.raises(LocalspecError) as caught:
                run_request(upstream)
            error_text = f"{caught.value!r} {caught.value.message} {caught.value.param} {upstream}"
            assert key.lower() not in error_text.lower()
            assert remote.requests[-1].headers["authorization"] == f"Bearer {key}"
            assert key not in caplog.text
        assert redirect_target.requests == []


def test_a_redirect_on_the_same_server_is_followed() -> None:
    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        if request.path == "/v1/chat/completions":
            connection.sendall(encode_response({}, "308 There", "location: /v2/chat\r\n"))
            request = remote.requests[-1]
        else:
            connection.sendall(encode_stream(encode_chat("moved")))

    with scripted_server(answer=answer) as remote:
        assert join_text(run_request(Upstream(upstream=remote.url))) == "moved"
        assert remote.requests[-1].path == "/v2/chat"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with scripted_server() as remote:
        for key_source, words in (
            ({"key_env": "NOBODY_SET_THIS"}, "NOBODY_SET_THIS"),
            ({"key_file": str(tmp_path / "none")}, "cannot be read"),
        ):
            with pytest.raises(UpstreamError, match=words):
                run_request(state(remote, "auto", "", **key_source))
        assert not remote.requests


def test_a_certificate_is_verified_and_another_authority_can_be_named(tmp_path: Path) -> None:
    context, certificate = make_tls_context(tmp_path, "127.0.0.1")
    with scripted_server(tls=context) as remote:
        with pytest.raises(UpstreamError, match=r"is not trusted.*--ca FILE"):
            run_request(Upstream(upstream=remote.url))
        trusting = Upstream(upstream=remote.url, ca=str(certificate))
        assert join_text(run_request(trusting)) == "hello there"


def test_text_is_passed_on_as_soon_as_it_arrives() -> None:
    """The server sends the second piece only after the client has received the first."""
    first_received = threading.Event()

    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        connection.sendall(HEAD + encode_chunk(encode_delta(content="one")))
        assert first_received.wait(PATIENCE)
        connection.sendall(
            encode_chunk(encode_delta(content=" two") + encode_chat()) + b"0\r\n\r\n"
        )

    async def main() -> str:
        server, received = UpstreamServer("big", Upstream(upstream=remote.url)), ""
        async for item in server.events(frames.Generate(0, CHAT)):
            if isinstance(item, frames.Delta):
                received += item.text
                first_received.set()
        await server.close()
        return received

    with scripted_server(answer=answer) as remote:
        assert asyncio.run(main()) == "one two"
