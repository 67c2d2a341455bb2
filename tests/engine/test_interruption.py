"""Passes are aborted for a request that is cancelled or arrives, and no other request is affected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.engine import sequence
from localspec.engine.interruption import Interruption
from localspec.engine.llama import Aborted, Batch, Context, ContextSettings, Model
from localspec.engine.pair import lane
from localspec.protocol.frames import PairFiles, SpeculationSettings
from tests.support.recurrent import lfm2_pair, mamba_pair
from tests.support.rescoring import assert_alike
from tests.support.running import GREEDY, PLAIN, Load, Running, drafting, skip_on
from tests.support.stops import StopAfter

LONG = [(13 * at + 5) % 500 for at in range(400)]
SHORT = [[300 + at, 17, 402, 255, 31] for at in range(3)]
# Only on a CPU does llama.cpp check midway whether a pass must be aborted.
ABORTABLE = skip_on("rpc", "cuda", why="a CPU alone is asked on the way through a pass")


@pytest.fixture(scope="module")
def context(contextual_files: PairFiles) -> Iterator[Context]:
    with Model(contextual_files.target) as model:
        sizes = ContextSettings(n_ctx=512, n_batch=256, n_seq=2, n_outputs=2, n_threads=1)
        with Context(model, sizes) as created:
            yield created


def make_batch(sequence: int, tokens: list[int], start: int = 0) -> Batch:
    batch = Batch(256)
    for at, token in enumerate(tokens, start=start):
        batch.add(token, at, sequence, at == start + len(tokens) - 1)
    return batch


def decode_with_stop(context: Context, batch: Batch, stop: StopAfter | None) -> None:
    """Decode a batch in a pass that `stop` may abort."""
    context.stop = stop
    try:
        context.decode(batch)
    finally:
        context.stop = None


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_aborted_pass_leaves_the_cache_unchanged(
    context: Context, steps: int, capfd: pytest.CaptureFixture[str]
) -> None:
    context.clear()
    context.decode(make_batch(0, LONG[:50]))
    context.decode(make_batch(1, LONG[:30]))
    stop = StopAfter(steps)
    if not steps:
        stop.set()
    with pytest.raises(Aborted):
        decode_with_stop(context, make_batch(0, LONG[50:200], 50), stop)
    assert (context.length(0), context.length(1)) == (50, 30)
    stop.set(False)
    decode_with_stop(context, make_batch(0, LONG[50:200], 50), stop)
    aborted_logits = context.logits(149).copy()
    context.clear()
    context.decode(make_batch(0, LONG[:50]))
    context.decode(make_batch(0, LONG[50:200], 50))
    assert abs(aborted_logits - context.logits(149)).max() < 1e-3
    assert not capfd.readouterr().err  # the last line there is taken for the cause of a crash


def test_shift_is_completed_by_an_aborted_pass(context: Context) -> None:
    """llama.cpp rotates them at the beginning of the next pass, on the same threads."""

    def shift_and_decode(stop: StopAfter | None) -> list[float]:
        context.clear()
        context.decode(make_batch(0, LONG[:100]))
        context.remove(0, 40, 50)
        context.shift(0, 50, 100, -10)
        decode_with_stop(context, make_batch(0, [7], 90), stop)
        values: list[float] = context.logits(0).tolist()
        return values

    assert shift_and_decode(StopAfter(1)) == pytest.approx(shift_and_decode(None), abs=1e-4)


def answer_alone(engine: Running, prompts: list[list[int]], count: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        engine.forget()
        answers.append(engine.ask(prompt, count).tokens)
    engine.forget()
    return answers


@settings(max_examples=15)
@given(
    st.integers(1, 60),
    st.integers(0, 2),
    st.integers(0, 6),
    st.sampled_from([PLAIN, drafting(3), SpeculationSettings()]),
)
def test_cancelling_during_a_pass_changes_no_other_text(
    contextual: Running, place: int, company: int, passes: int, speculative: SpeculationSettings
) -> None:
    company_prompts = SHORT[:company]
    truth = answer_alone(contextual, company_prompts, 20)
    engine = contextual.engine
    ids = [contextual.start(prompt, 20, GREEDY, speculative) for prompt in company_prompts]
    for _ in range(passes):
        engine.step()
    leaving = contextual.start(LONG, 20)
    engine.interruption = Interruption()
    engine.interruption.stop = StopAfter(place, lambda: engine.interruption.request_left(leaving))
    while not engine.interruption.stop and contextual.answers[leaving].ending is None:
        engine.step()
    n_read = 0
    if engine.interruption.stop:
        n_read = contextual.sequence(leaving).slot.n_past
        assert n_read < len(LONG) - 1
        assert engine.cancel(leaving)
        assert contextual.answers[leaving].done.completion_tokens == 0
    engine.interruption.clear()
    contextual.finish()
    for prompt, request, tokens in zip(company_prompts, ids, truth, strict=True):
        answer = contextual.answers[request].tokens
        assert_alike(contextual.pair.files.target, prompt, answer, tokens)
    # The tokens that it had read are those of its text.
    repeated = contextual.ask(LONG, 4)
    assert repeated.done.timings.cache_n >= n_read
    fresh = contextual.ask(LONG, 4, cache_prompt=False).tokens
    assert_alike(contextual.pair.files.target, LONG, repeated.tokens, fresh)


@ABORTABLE
@pytest.mark.parametrize("write", [lfm2_pair, mamba_pair])
@pytest.mark.parametrize("place", [1, 20, 45])
def test_half_updated_state_is_not_reused(
    write: Callable[..., PairFiles],
    place: int,
    load: Load,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files = write(tmp_path_factory.getbasetemp() / write.__name__)
    engine = load(files, n_batch=64, prefix_bytes=64 << 20)
    truth = engine.ask(LONG[:300], 8, cache_prompt=False).tokens
    engine.forget()
    request = engine.start(LONG[:300], 8)
    engine.engine.step()
    engine.engine.interruption.stop = stop = StopAfter(place)
    while not stop:
        engine.engine.step()
    stop.set(False)
    engine.finish()
    assert engine.answers[request].tokens == truth
    assert engine.ask(LONG[:300], 8).tokens == truth


@pytest.fixture
def no_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the time in which a pass counts as beginning."""
    monkeypatch.setattr(lane, "MAX_START_S", 0.0)


@ABORTABLE
@pytest.mark.usefixtures("no_beginning")
def test_prompt_pass_is_aborted_once_for_another(load: Load, contextual_files: PairFiles) -> None:
    engine = load(contextual_files, gap_s=1e-9)
    lane = engine.pair.shared
    request = engine.start(LONG, 4)
    interruption = engine.engine.interruption
    interruption.stop = StopAfter(20, interruption.request_came)
    engine.engine.step()
    assert engine.sequence(request).slot.n_past == 0
    interruption.clear()
    interruption.request_came()  # another request does not abort the pass again
    engine.engine.step()
    assert 0 < engine.sequence(request).slot.n_past <= lane.max_prompt_rows(0) < 20
    editor = engine.start(SHORT[0], 4, priority="editor")
    interruption.clear()
    while engine.answers[editor].ending is None:
        n_past = engine.sequence(request).slot.n_past
        engine.engine.step()
        assert engine.sequence(request).slot.n_past - n_past < 20
    engine.finish()
    truth = answer_alone(engine, [LONG, SHORT[0]], 4)
    assert [engine.answers[request_id].tokens for request_id in (request, editor)] == truth


@ABORTABLE
@settings(max_examples=10)
@given(st.lists(st.integers(1, 12), min_size=3, max_size=3))
def test_requests_as_a_pass_begins_share_it(contextual: Running, places: list[int]) -> None:
    """They may arrive at any point of its beginning, until its patience ends."""
    prompts = [LONG[:60], *SHORT]
    truth = answer_alone(contextual, prompts, 8)
    interruption = contextual.engine.interruption
    ids = [contextual.start(prompts[0], 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "START_SHARE", 1e6)
        patch.setattr(lane, "MAX_START_S", 1e3)
        patch.setattr(sequence, "MAX_RESTART_WAIT_S", 1e6)
        for place, prompt in zip(places, prompts[1:], strict=True):
            patch.setattr(interruption, "stop", StopAfter(place, interruption.request_came))
            contextual.engine.step()
            assert contextual.sequence(ids[0]).slot.n_past == 0
            ids.append(contextual.start(prompt, 8))
            interruption.clear()
        patch.setattr(sequence, "MAX_RESTART_WAIT_S", 0.0)
        patch.setattr(interruption, "stop", StopAfter(1, interruption.request_came))
        contextual.engine.step()
        assert not any(contextual.sequence(request).prefilling for request in ids)
    interruption.clear()
    contextual.finish()
    assert [contextual.answers[request].tokens for request in ids] == truth


@pytest.mark.usefixtures("no_beginning")
def test_short_pass_is_not_aborted_for_a_new_request(cycle: Running) -> None:
    cycle.forget()
    request = cycle.start(LONG, 4)
    cycle.engine.interruption.request_came()
    cycle.engine.step()
    cycle.engine.interruption.clear()
    assert cycle.sequence(request).slot.n_past > 100
    cycle.finish()


def test_cancellation_before_a_pass_is_not_lost() -> None:
    interruption = Interruption()
    interruption.request_left(7)
    assert not interruption.stop
    assert interruption.begin_pass([8], yields_s=1.0) is interruption.stop
    assert not interruption.stop
    interruption.begin_pass([7])
    assert interruption.stop
    interruption.clear()
    assert not interruption.stop
    assert interruption.begin_pass([]) is None


@pytest.mark.parametrize(("yields_s", "after_s", "ends"), [
    (0.0, 0.0, False), (0.5, -1.0, True), (0.5, 0.4, True), (0.5, 0.6, False), (math.inf, 1e9, True),
])  # fmt: skip
def test_request_that_comes_in_time_aborts_it(yields_s: float, after_s: float, ends: bool) -> None:
    time_s = [10.0]
    interruption = Interruption(lambda: time_s[0])
    for passes in (1, 2):  # an earlier request does not abort the next pass
        interruption.clear()
        begins, comes = 10.0 * passes, 10.0 * passes + after_s
        for time_s[0], is_arrival in sorted([(begins, False), (comes, True)]):
            interruption.request_came() if is_arrival else interruption.begin_pass([], yields_s)
            # No request has arrived yet.
            assert is_arrival or comes < begins or not interruption.stop
        assert bool(interruption.stop) is interruption.was_for_new_request is ends
