"""The threads that turn requests into tokens serve the next request whatever the last one did."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.preparers import SLOW_THREADS, Preparers, SmallRequest
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sequence import TokenizedRequest
from localspec.errors import Cancelled
from localspec.protocol.frames import (
    MAX_REPLY_PIECES,
    MAX_REPLY_TEXT_BYTES,
    ApplyTemplate,
    ChatPrompt,
    Detokenize,
    Failed,
    Frame,
    Generate,
    Message,
    Preparing,
    Reply,
    TextPrompt,
    Tokenize,
)
from tests.support.patience import PATIENCE
from tests.support.running import Running

CHAT = ChatPrompt([Message("user", "hi")])


class BuggyRenderer(TemplateRenderer):
    """A renderer with a bug that every chat triggers."""

    def __init__(self) -> None:
        super().__init__(None, "", "")

    def rendered(self, prompt: Any) -> Any:
        raise ZeroDivisionError("a bug")


class Harness:
    """The preparers and the frames that they send, in order."""

    def __init__(self, engine: Running) -> None:
        self.output: queue.SimpleQueue[Frame | TokenizedRequest] = queue.SimpleQueue()
        self.preparers: Preparers[TokenizedRequest] = Preparers(self.output.put, self.output.put)
        quick, *slow = (Preparer(engine.pair, BuggyRenderer()) for _ in range(SLOW_THREADS + 1))
        self.preparers.use(quick, slow)
        self.preparers.start()

    def put(self, request: Generate | SmallRequest) -> Frame | TokenizedRequest:
        """Prepare a request and return its result.

        The preparers report the begin and the end of the preparation. A request that joins a pass is
        reported before its end, since a crash in the pass is not the fault of its text.
        """
        self.preparers.put(request)
        return self.answer(request.id)

    def answer(self, request: int) -> Frame | TokenizedRequest:
        begun, *rest = (self.output.get(timeout=PATIENCE) for _ in range(3))
        assert begun == Preparing(request, begins=True)
        ended = Preparing(request, begins=False)
        result = next(frame for frame in rest if frame != ended)
        passes = isinstance(result, TokenizedRequest)
        assert rest == ([ended, result] if passes else [result, ended])
        return result


@pytest.fixture
def harness(cycle: Running) -> Harness:
    return Harness(cycle)


@pytest.mark.parametrize("request_", [Generate(1, CHAT), ApplyTemplate(1, CHAT)])
def test_bug_in_preparing_ends_that_request_alone(
    harness: Harness, request_: Generate | ApplyTemplate, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = harness.put(request_)
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert "ZeroDivisionError" in failed.message
    assert "Traceback" in capfd.readouterr().err
    assert isinstance(harness.put(Tokenize(2, "ab")), Reply)
    harness.preparers.discard(1)  # the request is forgotten


def test_a_request_is_cancelled_while_it_waits_or_when_it_is_ready(harness: Harness) -> None:
    ready = harness.put(Generate(1, TextPrompt("ab")))
    assert isinstance(ready, TokenizedRequest)
    harness.preparers.cancel(1)
    with pytest.raises(Cancelled):
        harness.preparers.discard(1)
    harness.preparers.discard(1)  # once is enough
    harness.preparers.cancel(7)  # an unknown request
    assert isinstance(harness.put(Generate(7, TextPrompt("ab"))), TokenizedRequest)
    harness.preparers.discard(7)


def test_request_cancelled_in_the_queue_is_not_prepared(cycle: Running) -> None:
    harness = Harness(cycle)
    harness.preparers._pending.add(1)  # as if it had been queued, and no thread had taken it yet
    harness.preparers.cancel(1)
    failed = harness.put(Generate(1, TextPrompt("ab")))
    assert isinstance(failed, Failed)
    assert failed.code == Cancelled.code
    harness.preparers.discard(1)


def test_without_a_pair_requests_are_refused(harness: Harness) -> None:
    harness.preparers.close()
    failed = harness.put(Generate(1, TextPrompt("ab")))
    assert isinstance(failed, Failed)
    assert "No pair is loaded" in failed.message


def test_an_answer_that_would_be_too_large_is_refused(harness: Harness, cycle: Running) -> None:
    large_request = Tokenize(1, "a b " * (MAX_REPLY_PIECES // 2 + 1))
    failed = harness.put(large_request)
    assert isinstance(failed, Failed)
    assert failed.param == "content"
    assert f"at most {MAX_REPLY_PIECES} are returned with their pieces" in failed.message
    vocab = cycle.pair.vocab
    longest = max(range(vocab.size), key=lambda token: len(vocab.piece(token, special=True)))
    times = MAX_REPLY_TEXT_BYTES // len(vocab.piece(longest, special=True)) + 1
    failed = harness.put(Detokenize(2, [longest] * times))
    assert isinstance(failed, Failed)
    assert failed.param == "tokens"
    assert f"at most {MAX_REPLY_TEXT_BYTES} are returned at once" in failed.message


def test_tools_count_in_the_estimate_of_a_prompt(cycle: Running) -> None:
    """Otherwise slow requests would be prepared by the thread for quick ones."""
    preparer = Preparer(cycle.pair, BuggyRenderer())
    tools = [{"type": "function", "function": {"name": "f", "description": "a b " * 10_000}}]
    with_tools = Generate(1, ChatPrompt([Message("user", "hi")], tools=tools))
    assert preparer.estimate_s(with_tools) > 10 * preparer.estimate_s(Generate(1, CHAT))
