"""`exact = "free"`: the exact lane answers where that costs nothing, by what answers took before."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from localspec.engine import statistics
from localspec.protocol.frames import PairFiles
from tests.support.running import Answer, Running, drafting, running

PROMPT = [300, 17, 402, 255, 31, 340, 18, 77]
AUTO = drafting(None, "auto")


@pytest.fixture(scope="module")
def free(contextual_files: PairFiles) -> Iterator[Running]:
    with running(contextual_files, exact="free") as engine:
        yield engine


@pytest.fixture(autouse=True)
def fresh(free: Running) -> None:
    """Begin with empty slots, in which neither lane has less to read."""
    free.forget()
    free.pair.prefixes.forget(None)


def set_loss(engine: Running, loss: float) -> None:
    """Let the shared lane's answers have taken so much less than the exact lane is expected to take."""
    engine.pair.shared.token_ms = engine.pair.exact.expected_ms() / (1 + loss)


def is_exact(answer: Answer) -> bool:
    return answer.done.speculation.exact


@pytest.mark.parametrize(("loss", "exact"), [(-0.5, True), (0.01, True), (0.03, False), (1, False)])
def test_an_answer_is_exact_if_that_costs_under_two_per_cent(
    free: Running, loss: float, exact: bool
) -> None:
    set_loss(free, loss)
    answer = free.ask(PROMPT, 40, speculative=AUTO)
    assert is_exact(answer) == exact
    plain = free.ask(PROMPT, 40, exact=True)
    assert not exact or answer.tokens == plain.tokens


def test_a_request_that_says_what_it_wants_gets_it(free: Running) -> None:
    set_loss(free, -0.5)
    assert not is_exact(free.ask(PROMPT, 8, exact=False))
    set_loss(free, 1.0)
    assert is_exact(free.ask(PROMPT, 8, exact=True))


def test_what_the_exact_lane_would_have_to_read_counts(free: Running) -> None:
    """An answer of 8 tokens to a text of 300 that the shared lane holds; without it, it is exact."""
    long = PROMPT * 38
    for held in (False, True):
        free.forget()
        free.pair.prefixes.forget(None)
        if held:
            free.ask(long, 8, exact=False)
        set_loss(free, 0.0)
        assert is_exact(free.ask([*long, 5], 8, speculative=AUTO)) == (not held)


def test_nobody_waits_for_an_exact_answer(free: Running) -> None:
    set_loss(free, -0.5)
    free.start(PROMPT, 30, exact=False)
    free.engine.step()
    beside = free.start([5, *PROMPT], 8, speculative=AUTO)
    free.finish()
    assert not is_exact(free.answers[beside])


def test_the_cost_of_a_token_is_learned_from_answers_alone(
    free: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        statistics, "MAX_EXCESS", math.inf
    )  # the machine may have been busy at load
    shared = free.pair.shared
    shared.token_ms = None
    assert not is_exact(free.ask(PROMPT, 8))
    known = shared.token_ms
    assert known is not None
    assert known > 0
    for start in range(2):
        free.start([start, *PROMPT], 20, exact=False)
    free.finish()
    assert shared.token_ms == known
    free.ask(PROMPT, 40, exact=False)
    assert shared.token_ms != known


def test_where_no_width_passes_the_test_answers_are_not_exact(
    free: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_loss(free, -0.5)
    monkeypatch.setattr(free.pair.exact, "reason", "no width passes")
    assert not is_exact(free.ask(PROMPT, 8, speculative=AUTO))
