"""One request's cost is its own: a slow or endless grammar delays and changes no other answer."""

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
from tests.support.running import GREEDY, PLAIN, Running, drafting

PATIENCE_S = 60.0  # only a bug waits so long
WAIT_S = 0.02  # what a round waits for a grammar
LETTERS = Constraint("regex", "[a-f ]{80}")


def nested(rules: int) -> str:
    """A grammar that compiles in time that grows with the number of its alternatives."""
    return "root ::= " + " | ".join(f'"{i}" root "{i + 1}"' for i in range(rules)) + ' | "x"'


class Wrapped:
    """A Guide that another one decides for; tests override single operations."""

    def __init__(self, guide: Guide) -> None:
        self.guide = guide
        self.forbids_often = guide.forbids_often

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

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


class Blocked(Wrapped):
    """Computes no mask until it may."""

    def __init__(self, guide: Guide) -> None:
        super().__init__(guide)
        self.may = threading.Event()

    def mask(self) -> Mask:
        assert self.may.wait(PATIENCE_S)
        return self.guide.mask()


class Late(Wrapped):
    """Is late for a mask whenever `late` says so, and computes it when it is asked again."""

    def __init__(self, guide: Guide, late: Iterator[bool]) -> None:
        super().__init__(guide)
        self._late = late

    def mask(self) -> Mask:
        if next(self._late):
            raise GuideBusy
        return self.guide.mask()


def start(
    engine: Running, request: int, guide: Callable[[Guide], Guide] | None = None, **more: Any
) -> None:
    """Submit a request whose answer is letters, with its grammar wrapped."""
    generate = Generate(
        request, TextPrompt("ab"), GREEDY, max_tokens=40, constraint=LETTERS, **more
    )
    tokenized = engine.preparer.prepare(generate)
    if guide is not None:
        tokenized.matcher = guide(Grammars(engine.pair.vocab).compile(LETTERS))
    engine.submit(tokenized)


@pytest.mark.parametrize("exact", [False, True])
def test_others_write_while_a_grammar_is_late(
    contextual_files: PairFiles, load: Callable[..., Running], exact: bool
) -> None:
    engine = load(contextual_files, parallel=3, n_ctx=2048)
    blocked: list[Blocked] = []

    def deferred(guide: Guide) -> Guide:
        blocked.append(Blocked(guide))
        return DeferredGuide(blocked[-1], WAIT_S)

    start(engine, 1, deferred, exact=exact)
    start(engine, 2)
    steps = 0
    while engine.answers[2].ending is None and steps < 2000:
        engine.engine.step()
        steps += 1
    assert engine.answers[2].done.finish_reason == "length"
    assert not engine.answers[1].text
    assert engine.answers[1].ending is None
    blocked[0].may.set()
    engine.finish()
    assert engine.answers[1].done.finish_reason == "length"
    if exact:  # in company, a near tie may go the other way
        late = engine.answers[1].text
        start(engine, 3, exact=True)
        engine.finish()
        assert engine.answers[3].text == late


def test_a_late_grammar_is_cancelled_at_once(contextual: Running) -> None:
    contextual.forget()
    blocked: list[Blocked] = []

    def deferred(guide: Guide) -> Guide:
        blocked.append(Blocked(guide))
        return DeferredGuide(blocked[-1], WAIT_S)

    start(contextual, 1, deferred)
    for _ in range(5):
        contextual.engine.step()
    contextual.engine.cancel(1)
    assert contextual.answers[1].done.finish_reason == "cancelled"
    assert not contextual.engine.active
    blocked[0].may.set()


def test_a_grammar_that_fails_in_its_thread_ends_its_request_alone(contextual: Running) -> None:
    class Failing(Wrapped):
        def mask(self) -> Mask:
            raise GrammarRejected("too complex")

    contextual.forget()
    start(contextual, 1, lambda guide: DeferredGuide(Failing(guide), WAIT_S))
    start(contextual, 2)
    contextual.finish()
    assert contextual.answers[1].failed.code == "invalid_grammar"
    assert len(contextual.answers[2].text) > 0
    assert contextual.answers[2].done.finish_reason == "length"


def test_masks_that_take_too_long_together_end_their_answer_alone(contextual: Running) -> None:
    class Slow(Wrapped):
        def mask(self) -> Mask:
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass
            return self.guide.mask()

    contextual.forget()
    start(contextual, 1, lambda guide: DeferredGuide(Slow(guide), WAIT_S))
    start(contextual, 2)
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
    """Whenever a mask is late, its pass is repeated: the text is that of a grammar that never is."""
    speculative = drafting(depth, "auto") if depth != 0 else PLAIN

    def lateness() -> Iterator[bool]:
        yield from late
        while True:
            yield False

    texts = []
    for wrap in (None, lambda guide: Late(guide, lateness())):
        contextual.forget()
        start(contextual, 1, wrap, speculative=speculative, exact=True)
        contextual.finish()
        texts.append(contextual.answers[1].text)
    assert texts[0] == texts[1]


@given(st.data())
def test_a_deferred_guide_answers_as_the_guide_does(data: st.DataObject) -> None:
    """Any order of operations, with the mask of any place asked for twice."""
    guide, deferred = Counting(), DeferredGuide(Counting(), WAIT_S)
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["mask", "consume", "back", "valid", "forced", "round"])):
            case "mask":
                assert list(asked(deferred, deferred.mask)) == list(guide.mask())
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
                asked(deferred, lambda: None)


class Counting:
    """A guide of ten tokens whose answers depend on all that it has consumed."""

    forbids_often = True

    def __init__(self) -> None:
        self.consumed: list[int] = []

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

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


def asked(guide: DeferredGuide, ask: Callable[[], Any]) -> Any:
    """Ask in the rounds that it takes, as the step loop does."""
    for _ in range(1000):
        with contextlib.suppress(GuideBusy):
            if guide.begin_round():
                return ask()
        guide.wait(0.1)
    raise AssertionError("never answered")


# ------------------------------------------------------------------------ compiling


@pytest.fixture
def grammars(contextual: Running) -> Iterator[Grammars]:
    """Grammars whose compiling is ended after a twentieth of a second of processor time."""
    made = Grammars(contextual.pair.vocab, isolated=True)
    made._process = GrammarProcess(made._vocabulary, 0.05)
    yield made
    made.close()


def process_of(grammars: Grammars) -> GrammarProcess:
    assert grammars._process is not None
    return grammars._process


def job(source: str, kind: Any = "grammar") -> GrammarJob:
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
def test_a_process_of_its_own_says_what_this_one_does(
    contextual: Running, grammars: Grammars, kind: Any, source: str
) -> None:
    def outcome(compiler: Grammars) -> object:
        try:
            return compiler._sources(job(source, kind), lambda: False)
        except GrammarRejected as error:
            return error.message, error.param

    assert outcome(grammars) == outcome(Grammars(contextual.pair.vocab))


def test_a_grammar_without_end_is_refused_and_remembered(grammars: Grammars) -> None:
    """The second time: its process may have been ended for another reason."""
    endless = job(nested(4000))
    for _ in range(2):
        assert not grammars.ready(endless)
        with pytest.raises(GrammarRejected, match=r"takes more than 0\.05 seconds"):
            grammars._compile(endless, lambda: False)
    assert grammars.ready(endless)
    process_of(grammars).close()
    with pytest.raises(GrammarRejected, match=r"takes more than 0\.05 seconds"):
        grammars._compile(endless, lambda: False)
    assert process_of(grammars)._process is None  # it was not asked again


@pytest.mark.parametrize("place", ["socket.socketpair", "subprocess.Popen"])
def test_a_process_that_cannot_be_started_is_no_fault_of_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    fine = job('root ::= "a"')
    with monkeypatch.context() as patched:
        patched.setattr(f"localspec.engine.sampling.grammars.process.{place}", fail)
        with pytest.raises(Unavailable, match="Too many open files"):
            grammars._compile(fine, lambda: False)
    assert grammars._compile(fine, lambda: False).whole is not None


def test_a_machine_that_is_too_busy_is_no_fault_of_the_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars._process = GrammarProcess(grammars._vocabulary)
    with monkeypatch.context() as patched:
        patched.setattr("localspec.engine.sampling.grammars.process.WALL_LIMIT_S", -1.0)
        with pytest.raises(Unavailable, match="too busy"):
            grammars._compile(job('root ::= "a"'), lambda: False)
    assert grammars._compile(job('root ::= "a"'), lambda: False).whole is not None


def test_others_compile_beside_a_grammar_without_end(grammars: Grammars) -> None:
    """Each job has a process: the second is not behind the first."""
    grammars._process = GrammarProcess(grammars._vocabulary)
    left = threading.Event()
    outcomes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def compile() -> None:
        try:
            process_of(grammars).build(job(nested(4000)), left.is_set)
        except (Cancelled, GrammarRejected) as error:
            outcomes.put(error)

    process_of(grammars).build(job('root ::= "first"'), lambda: False)  # it is up
    thread = threading.Thread(target=compile)
    thread.start()
    sources = process_of(grammars).build(job('root ::= "a"'), lambda: False)
    assert sources.whole is not None
    left.set()
    assert isinstance(outcomes.get(timeout=PATIENCE_S), Cancelled | GrammarRejected)
    thread.join()


def test_a_job_ends_when_nobody_waits(grammars: Grammars) -> None:
    grammars._process = GrammarProcess(grammars._vocabulary)
    asked = [0]

    def left() -> bool:
        asked[0] += 1
        return asked[0] > 2

    with pytest.raises(Cancelled):
        process_of(grammars).build(job(nested(4000)), left)


def test_a_process_that_was_killed_is_started_again(grammars: Grammars) -> None:
    assert grammars._compile(job('root ::= "a"'), lambda: False).whole is not None
    process = process_of(grammars)._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert grammars._compile(job('root ::= "b"'), lambda: False).whole is not None


def test_no_process_is_left_when_the_worker_is_gone(grammars: Grammars) -> None:
    grammars._compile(job('root ::= "a"'), lambda: False)
    process, control = process_of(grammars)._process, process_of(grammars)._control
    assert process is not None
    assert control is not None
    control.close()
    assert process.wait(PATIENCE_S) == 0


# ------------------------------------------------------------------------ preparing


class Desk:
    """Prepares by what tests put into requests' texts: "slow" ones are finished when `may` is set."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def estimate_s(self, request: Any) -> float:
        return 0.0

    def begin(self, request: Any) -> Any:
        if "slow" not in request.prompt.text:
            return request

        def finish(left: Callable[[], bool]) -> Any:
            deadline = time.monotonic() + PATIENCE_S
            while not self.may.wait(0.001) and time.monotonic() < deadline:
                if left():
                    raise Cancelled("The request was cancelled.")
            if "wrong" in request.prompt.text:
                raise InvalidRequest("wrong", param="grammar")
            return request

        return Unfinished(finish)

    def answer(self, request: Any) -> dict[str, object]:
        return {}


def test_what_is_unfinished_holds_up_no_other_request() -> None:
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Generate] = queue.SimpleQueue()
    preparers: Preparers[Generate] = Preparers(frames.put, ready.put)
    desk = Desk()
    preparers.use(desk, [desk] * SLOW_THREADS)
    preparers.start()
    for number, text in enumerate(["slow", "slow and wrong", "slow and left", "quick"], start=1):
        preparers.put(Generate(number, TextPrompt(text)))
    preparers.put(Tokenize(5, "x"))
    assert ready.get(timeout=PATIENCE_S).id == 4
    assert until(frames, lambda frame: isinstance(frame, Reply)).id == 5
    preparers.cancel(3)
    failed = until(frames, lambda frame: isinstance(frame, Failed))
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code) == (3, "cancelled")
    desk.may.set()
    assert ready.get(timeout=PATIENCE_S).id == 1
    failed = until(frames, lambda frame: isinstance(frame, Failed))
    assert isinstance(failed, Failed)
    assert (failed.id, failed.param) == (2, "grammar")
    assert until(frames, lambda frame: frame == Preparing(2, begins=False))


def until(frames: queue.SimpleQueue[Frame], wanted: Callable[[Frame], bool]) -> Any:
    """The next frame of a kind."""
    while not wanted(frame := frames.get(timeout=PATIENCE_S)):
        pass
    return frame
