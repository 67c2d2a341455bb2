"""The threads that turn requests into tokens: whatever one request does to them, the next is served."""

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
from tests.support.running import Running

CHAT = ChatPrompt([Message("user", "hi")])
PATIENCE = 30.0  # seconds; only a bug waits so long


class Buggy(TemplateRenderer):
    """Has a bug that every chat meets."""

    def __init__(self) -> None:
        super().__init__(None, "", "")

    def rendered(self, prompt: Any) -> Any:
        raise ZeroDivisionError("a bug")


class Desk:
    """Preparers with what they send, in order."""

    def __init__(self, engine: Running) -> None:
        self.said: queue.SimpleQueue[Frame | TokenizedRequest] = queue.SimpleQueue()
        self.preparers: Preparers[TokenizedRequest] = Preparers(self.said.put, self.said.put)
        quick, *slow = (Preparer(engine.pair, Buggy()) for _ in range(SLOW_THREADS + 1))
        self.preparers.use(quick, slow)
        self.preparers.start()

    def put(self, request: Generate | SmallRequest) -> Frame | TokenizedRequest:
        """What comes of a request, and that it is being prepared said around it: of one that will be in a
        pass before, since what ends the process in that is not the fault of its text.
        """
        self.preparers.put(request)
        return self.answer(request.id)

    def answer(self, request: int) -> Frame | TokenizedRequest:
        begun, *rest = (self.said.get(timeout=PATIENCE) for _ in range(3))
        assert begun == Preparing(request, begins=True)
        ended = Preparing(request, begins=False)
        found = next(each for each in rest if each != ended)
        passes = isinstance(found, TokenizedRequest)
        assert rest == ([ended, found] if passes else [found, ended])
        return found


@pytest.fixture
def desk(cycle: Running) -> Desk:
    return Desk(cycle)


@pytest.mark.parametrize("request_", [Generate(1, CHAT), ApplyTemplate(1, CHAT)])
def test_a_bug_in_preparing_ends_that_request_and_no_thread(
    desk: Desk, request_: Generate | ApplyTemplate, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = desk.put(request_)
    assert isinstance(failed, Failed)
    assert failed.code == "internal_error"
    assert "ZeroDivisionError" in failed.message
    assert "Traceback" in capfd.readouterr().err
    assert isinstance(desk.put(Tokenize(2, "ab")), Reply)
    desk.preparers.discard(1)  # nothing is remembered of it


def test_a_request_is_cancelled_while_it_waits_or_when_it_is_ready(desk: Desk) -> None:
    ready = desk.put(Generate(1, TextPrompt("ab")))
    assert isinstance(ready, TokenizedRequest)
    desk.preparers.cancel(1)
    with pytest.raises(Cancelled):
        desk.preparers.discard(1)
    desk.preparers.discard(1)  # once is enough
    desk.preparers.cancel(7)  # never heard of
    assert isinstance(desk.put(Generate(7, TextPrompt("ab"))), TokenizedRequest)
    desk.preparers.discard(7)


def test_what_was_cancelled_before_its_turn_is_not_prepared(cycle: Running) -> None:
    desk = Desk(cycle)
    desk.preparers._pending.add(1)  # as if it had been put, and no thread had come to it
    desk.preparers.cancel(1)
    failed = desk.put(Generate(1, TextPrompt("ab")))
    assert isinstance(failed, Failed)
    assert failed.code == Cancelled.code
    desk.preparers.discard(1)


def test_without_a_pair_requests_are_refused(desk: Desk) -> None:
    desk.preparers.close()
    failed = desk.put(Generate(1, TextPrompt("ab")))
    assert isinstance(failed, Failed)
    assert "No pair is loaded" in failed.message


def test_an_answer_that_would_be_too_large_is_refused(desk: Desk, cycle: Running) -> None:
    many = Tokenize(1, "a b " * (MAX_REPLY_PIECES // 2 + 1))
    failed = desk.put(many)
    assert isinstance(failed, Failed)
    assert failed.param == "content"
    assert f"at most {MAX_REPLY_PIECES} are returned with their pieces" in failed.message
    vocab = cycle.pair.vocab
    longest = max(range(vocab.size), key=lambda token: len(vocab.piece(token, special=True)))
    times = MAX_REPLY_TEXT_BYTES // len(vocab.piece(longest, special=True)) + 1
    failed = desk.put(Detokenize(2, [longest] * times))
    assert isinstance(failed, Failed)
    assert failed.param == "tokens"
    assert f"at most {MAX_REPLY_TEXT_BYTES} are returned at once" in failed.message


def test_an_agents_tools_count_in_what_a_prompt_may_cost(cycle: Running) -> None:
    """Or they would be prepared where requests that take long hold up others."""
    preparer = Preparer(cycle.pair, Buggy())
    tools = [{"type": "function", "function": {"name": "f", "description": "a b " * 10_000}}]
    with_tools = Generate(1, ChatPrompt([Message("user", "hi")], tools=tools))
    assert preparer.estimate_s(with_tools) > 10 * preparer.estimate_s(Generate(1, CHAT))
