"""A slow or endless grammar neither delays nor changes the answers of other requests."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.prompt.pictures import RequestPictures
from localspec.engine.prompt.preparers import SLOW_THREADS, Preparers, Unfinished
from localspec.engine.sampling.grammars.compile import Grammars
from localspec.engine.sampling.grammars.process import GrammarProcess
from localspec.engine.sampling.grammars.sources import GrammarJob
from localspec.engine.sampling.guide import DeferredGuide, Guide, GuideBusy, Mask
from localspec.errors import Cancelled, GrammarRejected, InvalidRequest, Unavailable
from localspec.protocol.frames import (
    Constraint,
    Failed,
    Frame,
    Generate,
    PairFiles,
    Preparing,
    Reply,
    TextPrompt,
    Tokenize,
)
from tests.support.patience import PATIENCE
from tests.support.running import GREEDY, PLAIN, Running, drafting

WAIT_S = 0.02  # how long a round waits for a grammar
LETTERS = Constraint("regex", "[a-f ]{80}")


def make_nested_grammar(rules: int) -> str:
    """Return a grammar whose compile time grows with the number of its alternatives."""
    return "root ::= " + " | ".join(f'"{i}" root "{i + 1}"' for i in range(rules)) + ' | "x"'


class WrappedGuide(Guide):
    """A guide that delegates to another one; tests override single operations."""

    def __init__(self, guide: Guide) -> None:
        self.guide = guide
        self.forbids_often = guide.forbids_often

    def mask(self) -> Mask:
        return self.guide.mask()

    def consume(self, token: int) -> None:
        self.guide.consume(token)

    def take_back(self, count: int) -> None:
        self.guide.take_back(count)

    def count_valid(self, tokens: Sequence[int]) -> int:
        return self.guide.count_valid(tokens)

    def forced_tokens(self) -> list[int]:
        return self.guide.forced_tokens()


class BlockedGuide(WrappedGuide):
    """A guide that computes no mask until it is released."""

    def __init__(self, guide: Guide, released: threading.Event) -> None:
        super().__init__(guide)
        self.released = released

    def mask(self) -> Mask:
        assert self.released.wait(PATIENCE)
        return self.guide.mask()


class LateGuide(WrappedGuide):
    """A guide that is late for a mask whenever `late` yields true, and computes it on the next call."""

    def __init__(self, guide: Guide, late: Iterator[bool]) -> None:
        super().__init__(guide)
        self._late = late

    def mask(self) -> Mask:
        if next(self._late):
            raise GuideBusy
        return self.guide.mask()


def submit_request(
    engine: Running, request: int, guide: Callable[[Guide], Guide] | None = None, **more: Any
) -> None:
    """Submit a request for letters whose grammar is wrapped by `guide`."""
    generate = Generate(
        request, TextPrompt("ab"), GREEDY, max_tokens=40, constraint=LETTERS, **more
    )
    tokenized = engine.preparer.prepare(generate)
    if guide is not None:
        tokenized.matcher = guide(Grammars(engine.pair.vocab).compile(LETTERS))
    engine.submit(tokenized)


def submit_blocked_request(engine: Running, **more: Any) -> threading.Event:
    """Submit request 1, whose grammar computes no mask until the returned event is set."""
    released = threading.Event()
    submit_request(
        engine, 1, lambda guide: DeferredGuide(BlockedGuide(guide, released), WAIT_S), **more
    )
    return released


@pytest.mark.parametrize("exact", [False, True])
def test_others_decode_while_a_grammar_is_late(
    contextual_files: PairFiles, load: Callable[..., Running], exact: bool
) -> None:
    engine = load(contextual_files, parallel=3, n_ctx=2048)
    released = submit_blocked_request(engine, exact=exact)
    submit_request(engine, 2)
    steps = 0
    while engine.answers[2].ending is None and steps < 2000:
        engine.engine.step()
        steps += 1
    assert engine.answers[2].done.finish_reason == "length"
    assert not engine.answers[1].text
    assert engine.answers[1].ending is None
    released.set()
    engine.finish()
    assert engine.answers[1].done.finish_reason == "length"
    if exact:  # beside other requests a near-tie may be decided differently
        late = engine.answers[1].text
        submit_request(engine, 3, exact=True)
        engine.finish()
        assert engine.answers[3].text == late


def test_a_late_grammar_is_cancelled_at_once(contextual: Running) -> None:
    contextual.forget()
    released = submit_blocked_request(contextual)
    for _ in range(5):
        contextual.engine.step()
    contextual.engine.cancel(1)
    assert contextual.answers[1].done.finish_reason == "cancelled"
    assert not contextual.engine.active
    released.set()


def test_a_grammar_that_fails_in_its_thread_ends_its_request_alone(contextual: Running) -> None:
    class Failing(WrappedGuide):
        def mask(self) -> Mask:
            raise GrammarRejected("too complex")

    contextual.forget()
    submit_request(contextual, 1, lambda guide: DeferredGuide(Failing(guide), WAIT_S))
    submit_request(contextual, 2)
    contextual.finish()
    assert contextual.answers[1].failed.code == "invalid_grammar"
    assert len(contextual.answers[2].text) > 0
    assert contextual.answers[2].done.finish_reason == "length"


def test_slow_masks_end_their_own_answer_only(contextual: Running) -> None:
    class Slow(WrappedGuide):
        def mask(self) -> Mask:
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass
            return self.guide.mask()

    contextual.forget()
    submit_request(contextual, 1, lambda guide: DeferredGuide(Slow(guide), WAIT_S))
    submit_request(contextual, 2)
    contextual.finish()
    failed = contextual.answers[1].failed
    assert failed.code == "invalid_grammar"
    assert "takes too long" in failed.message
    assert 0 < len(contextual.answers[1].text) < 10
    assert contextual.answers[2].done.finish_reason == "length"


@given(late=st.lists(st.booleans(), max_size=120), depth=st.sampled_from([0, 1, 4, None]))
def test_late_masks_change_no_answer(
    contextual: Running, late: list[bool], depth: int | None
) -> None:
    """A pass whose mask is late is repeated, so the text does not depend on lateness."""
    speculative = drafting(depth, "auto") if depth != 0 else PLAIN

    def lateness() -> Iterator[bool]:
        yield from late
        while True:
            yield False

    texts = []
    for wrap in (None, lambda guide: LateGuide(guide, lateness())):
        contextual.forget()
        submit_request(contextual, 1, wrap, speculative=speculative, exact=True)
        contextual.finish()
        texts.append(contextual.answers[1].text)
    assert texts[0] == texts[1]


@given(st.data())
def test_deferred_guide_agrees_with_its_guide(data: st.DataObject) -> None:
    """Operations come in any order, and any mask may be requested twice."""
    guide, deferred = CountingGuide(), DeferredGuide(CountingGuide(), WAIT_S)
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["mask", "consume", "back", "valid", "forced", "round"])):
            case "mask":
                assert list(ask_across_rounds(deferred, deferred.mask)) == list(guide.mask())
            case "consume":
                token = data.draw(st.integers(0, 9))
                guide.consume(token)
                deferred.consume(token)
            case "back":
                count = data.draw(st.integers(0, len(deferred._path)))
                guide.take_back(count)
                deferred.take_back(count)
            case "valid":
                tokens = data.draw(st.lists(st.integers(0, 9), max_size=4))
                assert deferred.count_valid(tokens) in (guide.count_valid(tokens), 0)
            case "forced":
                assert deferred.forced_tokens() in (guide.forced_tokens(), [])
            case "round":
                ask_across_rounds(deferred, lambda: None)


class CountingGuide(Guide):
    """A guide of ten tokens whose results depend on all the tokens it has consumed."""

    forbids_often = True

    def __init__(self) -> None:
        self.consumed: list[int] = []

    def mask(self) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(10, dtype=np.bool_)
        allowed[sum(self.consumed) % 10] = True
        return allowed

    def consume(self, token: int) -> None:
        self.consumed.append(token)

    def take_back(self, count: int) -> None:
        if count:
            del self.consumed[-count:]

    def count_valid(self, tokens: Sequence[int]) -> int:
        return min(len(tokens), sum(self.consumed) % 3)

    def forced_tokens(self) -> list[int]:
        return [len(self.consumed)]


def ask_across_rounds(guide: DeferredGuide, ask: Callable[[], Any]) -> Any:
    """Call `ask` in as many rounds as it takes, as the step loop does."""
    for _ in range(1000):
        with contextlib.suppress(GuideBusy):
            if guide.begin_round():
                return ask()
        guide.wait(0.1)
    raise AssertionError("never answered")


@pytest.fixture
def grammars(contextual: Running) -> Iterator[Grammars]:
    """Build grammars that may compile for 50 ms of processor time."""
    compiler = Grammars(contextual.pair.vocab, isolated=True)
    compiler._process = GrammarProcess(compiler._vocabulary, 0.05)
    yield compiler
    compiler.close()


def get_process(grammars: Grammars) -> GrammarProcess:
    assert grammars._process is not None
    return grammars._process


def make_job(source: str, kind: Any = "grammar") -> GrammarJob:
    return GrammarJob(constraint=Constraint(kind, source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[a-f]{1,4}"),
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("grammar", 'root ::= "a" | "b"'),
        ("grammar", "root ::= missing"),
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("json_schema", "{"),
        ("json_object", ""),
    ],
)
def test_compiling_in_a_process_gives_the_same_result(
    contextual: Running, grammars: Grammars, kind: Any, source: str
) -> None:
    def compile_outcome(compiler: Grammars) -> object:
        try:
            return compiler._sources(make_job(source, kind), lambda: False)
        except GrammarRejected as error:
            return error.message, error.param

    assert compile_outcome(grammars) == compile_outcome(Grammars(contextual.pair.vocab))


def test_a_grammar_without_end_is_refused_and_remembered(grammars: Grammars) -> None:
    """It is refused at the second timeout, because the first may have had another reason."""
    endless = make_job(make_nested_grammar(4000))
    for _ in range(2):
        assert not grammars.ready(endless)
        with pytest.raises(GrammarRejected, match=r"takes more than 0\.05 seconds"):
            grammars._compile(endless, lambda: False)
    assert grammars.ready(endless)
    get_process(grammars).close()
    with pytest.raises(GrammarRejected, match=r"takes more than 0\.05 seconds"):
        grammars._compile(endless, lambda: False)
    assert not get_process(grammars)._child.is_running  # it was not used again


@pytest.mark.parametrize(
    "place",
    [
        "engine.sampling.grammars.process.socket.socketpair",
        "children.socket.socketpair",
        "children.subprocess.Popen",
    ],
)
def test_failure_to_start_a_process_does_not_reject_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    valid_job = make_job('root ::= "a"')
    with monkeypatch.context() as patched:
        patched.setattr(f"localspec.{place}", fail)
        with pytest.raises(Unavailable, match="Too many open files"):
            grammars._compile(valid_job, lambda: False)
    assert grammars._compile(valid_job, lambda: False).whole is not None


def test_busy_machine_does_not_reject_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars._process = GrammarProcess(grammars._vocabulary)
    with monkeypatch.context() as patched:
        patched.setattr("localspec.engine.sampling.grammars.process.WALL_LIMIT_S", -1.0)
        with pytest.raises(Unavailable, match="too busy"):
            grammars._compile(make_job('root ::= "a"'), lambda: False)
    assert grammars._compile(make_job('root ::= "a"'), lambda: False).whole is not None


def test_others_compile_beside_a_grammar_without_end(grammars: Grammars) -> None:
    """Each job has its own process, so the second does not wait for the first."""
    grammars._process = GrammarProcess(grammars._vocabulary)
    abandoned = threading.Event()
    outcomes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def compile_endless() -> None:
        try:
            get_process(grammars).build(make_job(make_nested_grammar(4000)), abandoned.is_set)
        except (Cancelled, GrammarRejected) as error:
            outcomes.put(error)

    # The process has started.
    get_process(grammars).build(make_job('root ::= "first"'), lambda: False)
    thread = threading.Thread(target=compile_endless)
    thread.start()
    sources = get_process(grammars).build(make_job('root ::= "a"'), lambda: False)
    assert sources.whole is not None
    abandoned.set()
    assert isinstance(outcomes.get(timeout=PATIENCE), Cancelled | GrammarRejected)
    thread.join()


def test_job_ends_when_no_request_waits_for_it(grammars: Grammars) -> None:
    grammars._process = GrammarProcess(grammars._vocabulary)
    polls = [0]

    def is_abandoned() -> bool:
        polls[0] += 1
        return polls[0] > 2

    with pytest.raises(Cancelled):
        get_process(grammars).build(make_job(make_nested_grammar(4000)), is_abandoned)


def test_a_process_that_was_killed_is_started_again(grammars: Grammars) -> None:
    assert grammars._compile(make_job('root ::= "a"'), lambda: False).whole is not None
    process = get_process(grammars)._child._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert grammars._compile(make_job('root ::= "b"'), lambda: False).whole is not None


def test_no_process_is_left_when_the_worker_is_gone(grammars: Grammars) -> None:
    grammars._compile(make_job('root ::= "a"'), lambda: False)
    child = get_process(grammars)._child
    process = child._process
    assert process is not None
    child.connection.close()
    assert process.wait(PATIENCE) == 0


class FakePreparer:
    """A fake preparer that reads its orders from texts: "slow" ones finish once it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def estimate_s(self, request: Any) -> float:
        return 0.0

    def find_pictures(self, request: Any) -> RequestPictures:
        return RequestPictures()

    def encode_next(
        self, request: Any, pictures: RequestPictures, is_cancelled: Callable[[], bool]
    ) -> None:
        raise AssertionError("there are none")

    def begin(self, request: Any, pictures: RequestPictures) -> Any:
        if "slow" not in request.prompt.text:
            return request

        def finish(is_abandoned: Callable[[], bool]) -> Any:
            deadline = time.monotonic() + PATIENCE
            while not self.released.wait(0.001) and time.monotonic() < deadline:
                if is_abandoned():
                    raise Cancelled("The request was cancelled.")
            if "wrong" in request.prompt.text:
                raise InvalidRequest("wrong", param="grammar")
            return request

        return Unfinished(finish)

    def answer(self, request: Any, pictures: RequestPictures) -> dict[str, object]:
        return {}


def test_unfinished_request_holds_up_no_other() -> None:
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Generate] = queue.SimpleQueue()
    preparers: Preparers[Generate] = Preparers(frames.put, ready.put)
    preparer = FakePreparer()
    preparers.use(preparer, [preparer] * SLOW_THREADS)
    preparers.start()
    for number, text in enumerate(["slow", "slow and wrong", "slow and left", "quick"], start=1):
        preparers.put(Generate(number, TextPrompt(text)))
    preparers.put(Tokenize(5, "x"))
    assert ready.get(timeout=PATIENCE).id == 4
    assert wait_for_frame(frames, lambda frame: isinstance(frame, Reply)).id == 5
    preparers.cancel(3)
    failed = wait_for_frame(frames, lambda frame: isinstance(frame, Failed))
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code) == (3, "cancelled")
    preparer.released.set()
    assert ready.get(timeout=PATIENCE).id == 1
    failed = wait_for_frame(frames, lambda frame: isinstance(frame, Failed))
    assert isinstance(failed, Failed)
    assert (failed.id, failed.param) == (2, "grammar")
    assert wait_for_frame(frames, lambda frame: frame == Preparing(2, begins=False))


class TurnPreparer(FakePreparer):
    """A fake preparer that notes whose pictures are encoded, each as soon as the test lets it go on."""

    def __init__(self, counts: dict[int, int]) -> None:
        super().__init__()
        self.counts = counts  # of new pictures, by request
        self.turns: list[int] = []
        self.go_on = threading.Semaphore(0)

    def find_pictures(self, request: Any) -> RequestPictures:
        return RequestPictures(missing=[b"picture"] * self.counts[request.id])

    def encode_next(
        self, request: Any, pictures: RequestPictures, is_cancelled: Callable[[], bool]
    ) -> None:
        self.turns.append(request.id)
        assert self.go_on.acquire(timeout=PATIENCE)
        if is_cancelled():
            raise Cancelled("The request was cancelled.")
        del pictures.missing[0]


def test_requests_take_turns_with_their_pictures() -> None:
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Generate] = queue.SimpleQueue()
    preparers: Preparers[Generate] = Preparers(frames.put, ready.put)
    preparer = TurnPreparer({1: 60, 2: 1, 3: 2, 4: 60, 5: 0})
    preparers.use(preparer, [preparer] * SLOW_THREADS)
    preparers.start()
    for number in range(1, 6):
        preparers.put(Generate(number, TextPrompt("quick")))
    assert ready.get(timeout=PATIENCE).id == 5  # all are in the queue, and the first is encoded
    preparer.go_on.release(4 + 3 + 1)
    assert {ready.get(timeout=PATIENCE).id for _ in range(2)} == {2, 3}
    assert preparer.turns[:6] == [1, 2, 3, 4, 1, 3]
    preparers.cancel(1)
    preparers.cancel(4)
    preparer.go_on.release(2)
    failed = [wait_for_frame(frames, lambda frame: isinstance(frame, Failed)) for _ in range(2)]
    assert {(frame.id, frame.code) for frame in failed} == {(1, "cancelled"), (4, "cancelled")}
    assert len(preparer.turns) <= 9


def wait_for_frame(frames: queue.SimpleQueue[Frame], matches: Callable[[Frame], bool]) -> Any:
    """Return the next frame that matches."""
    while not matches(frame := frames.get(timeout=PATIENCE)):
        pass
    return frame
