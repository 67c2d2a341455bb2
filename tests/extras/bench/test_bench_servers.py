"""Test `localspec bench --against`: another server gives an answer or an error of one line."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import BadResponse, UsageError
from localspec.extras.bench import summary
from localspec.extras.bench.asking import OtherServer, RequestOptions, ServerGone, TimedAnswer
from localspec.extras.bench.prompts import Prompt, Work
from localspec.extras.bench.report import Run
from localspec.extras.bench.running import Bench, BenchPlan

CHAT, PLACE = Prompt(ask="Hello?"), Prompt(prefix="def f(", suffix="\n")
OPTIONS = RequestOptions(8, 200)
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def serve_answers(*answers: bytes) -> Iterator[str]:
    """Serve the given answers, one for each connection; the last one is repeated."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for number in range(100):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answers[min(number, len(answers) - 1)])
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def stream(*events: Any) -> bytes:
    return HEAD + b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


MODELS = HEAD + b'{"data": [{"id": "theirs"}]}'
COMPLETE_ANSWER = stream(piece("Hello"), piece(" you"), piece("", "stop"))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((MODELS, stream(piece("Hel"))), "ended in the middle of an answer"),
        ((MODELS, HEAD), "has no text"),
        ((MODELS, stream({"error": {"message": "too hot", "code": 500}})), "refused: too hot"),
        (
            (b'HTTP/1.1 503 No\r\n\r\n{"error": {"message": "Loading model", "code": 503}}',),
            "refused: Loading model (HTTP 503)",
        ),
        ((MODELS, b"HTTP/1.1 404 Not Found\r\n\r\n"), "refused: Not Found (HTTP 404)"),
        ((MODELS, stream([1])), "does not have OpenAI's form"),
        ((MODELS, HEAD + b"data: {\n\n"), "not valid JSON"),
        ((HEAD + b'{"data": 1}',), "neither OpenAI's form nor llama-server's"),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), "cannot be reached"),
        ((b"",), "cannot be reached"),
    ],
)
def test_an_invalid_answer_is_reported_in_one_line(
    answers: tuple[bytes, ...], message: str
) -> None:
    with (
        serve_answers(*answers) as url,
        pytest.raises(BadResponse, match=re.escape(message)) as error,
    ):
        OtherServer(url).ask(CHAT, OPTIONS)
    assert "\n" not in str(error.value)


def test_a_server_without_a_model_list_is_used() -> None:
    with serve_answers(b"HTTP/1.1 404 Not Found\r\n\r\n", COMPLETE_ANSWER) as url:
        assert OtherServer(url).ask(CHAT, OPTIONS).text == "Hello you"


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = OtherServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerGone, match="did not answer in time"):
            server.ask(CHAT, RequestOptions(8, 200, until=time.monotonic() + 0.2))


@pytest.mark.parametrize(
    "address",
    ["ftp://x", "http://", "http://:80", "http://x:0", "http://x:99999", "http://[::1", "/nowhere"],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="neither a URL"):
        OtherServer(address)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = ("choices", "content", "timings", "usage", "localspec", "error", "stop", "stop_type")
EVENTS = st.lists(
    JSON
    | st.dictionaries(st.sampled_from(NAMES), JSON)
    | st.fixed_dictionaries({"choices": st.lists(st.dictionaries(
        st.sampled_from(("delta", "finish_reason")), JSON), max_size=2)})
    | st.fixed_dictionaries({"timings": st.dictionaries(
        st.sampled_from(("predicted_n", "predicted_ms", "prompt_n", "draft_n")), JSON)})
    | st.just(piece("a", "stop")),
    max_size=5,
)  # fmt: skip


@given(EVENTS, st.sampled_from([CHAT, PLACE]))
def test_any_events_give_an_answer_or_an_error(events: list[Any], prompt: Prompt) -> None:
    class Odd(OtherServer):
        def _read(self, method: str, path: str, body: Any, how: RequestOptions) -> Iterator[bytes]:
            del method, path, body, how
            yield stream(*events).removeprefix(HEAD)

    server = Odd("http://127.0.0.1:1")
    server._model = "theirs"
    try:
        answer = server.ask(prompt, OPTIONS)
    except BadResponse as error:
        assert "\n" not in error.message  # noqa: PT017 - whether it is raised is left to chance
        return
    bench = Bench(None, BenchPlan([Work("x", "text", [prompt])], 8, 1), None, ())  # type: ignore[arg-type]
    bench.answers.theirs.append(_run(answer))
    (entry,) = summary.summarize_other_server(bench.plan.works, bench.answers)
    assert entry.side is not None
    assert entry.side.answers == 1


def _run(answer: TimedAnswer) -> Run:
    from localspec.extras.bench import running

    work = Work("x", "text", [CHAT])
    return running._to_run(running.Trial(work, 0, 0, "greedy"), "speculative", answer)
