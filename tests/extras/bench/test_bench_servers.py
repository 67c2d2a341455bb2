"""`localspec bench --against`: whatever another server does, its answer is one, or a line says why not."""

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
HOW = RequestOptions(8, 200)
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def serving(*answers: bytes) -> Iterator[str]:
    """A server that answers each connection with the next of these bytes, the last one again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for at in range(100):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answers[min(at, len(answers) - 1)])
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def stream(*events: Any) -> bytes:
    return HEAD + b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events)


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


MODELS = HEAD + b'{"data": [{"id": "theirs"}]}'
WHOLE = stream(piece("Hello"), piece(" you"), piece("", "stop"))


@pytest.mark.parametrize(
    ("answers", "said"),
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
def test_what_is_no_answer_is_one_line(answers: tuple[bytes, ...], said: str) -> None:
    with (
        serving(*answers) as url,
        pytest.raises(BadResponse, match=re.escape(said)) as error,
    ):
        OtherServer(url).ask(CHAT, HOW)
    assert "\n" not in str(error.value)


def test_a_server_without_a_list_of_models_is_asked_for_any() -> None:
    with serving(b"HTTP/1.1 404 Not Found\r\n\r\n", WHOLE) as url:
        assert OtherServer(url).ask(CHAT, HOW).text == "Hello you"


def test_one_that_says_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = OtherServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerGone, match="did not answer in time"):
            other.ask(CHAT, RequestOptions(8, 200, until=time.monotonic() + 0.2))


@pytest.mark.parametrize(
    "address",
    ["ftp://x", "http://", "http://:80", "http://x:0", "http://x:99999", "http://[::1", "/nowhere"],
)
def test_what_is_no_address_is_told_before_anything_is_measured(address: str) -> None:
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
def test_whatever_comes_is_an_answer_or_a_reason(events: list[Any], prompt: Prompt) -> None:
    class Odd(OtherServer):
        def _read(self, method: str, path: str, body: Any, how: RequestOptions) -> Iterator[bytes]:
            del method, path, body, how
            yield stream(*events).removeprefix(HEAD)

    other = Odd("http://127.0.0.1:1")
    other._model = "theirs"
    try:
        answer = other.ask(prompt, HOW)
    except BadResponse as error:
        assert "\n" not in error.message  # noqa: PT017 - whether it is raised is left to chance
        return
    bench = Bench(None, BenchPlan([Work("x", "text", [prompt])], 8, 1), None, ())  # type: ignore[arg-type]
    bench.answers.theirs.append(_run(answer))
    (told,) = summary.summarize_other_server(bench.plan.works, bench.answers)
    assert told.side is not None
    assert told.side.answers == 1


def _run(answer: TimedAnswer) -> Run:
    from localspec.extras.bench import running

    work = Work("x", "text", [CHAT])
    return running._to_run(running.Trial(work, 0, 0, "greedy"), "speculative", answer)
