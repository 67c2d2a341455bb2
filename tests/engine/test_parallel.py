"""Several requests share one decode, and none affects the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localspec.engine.llama import Batch
from localspec.engine.pair import load as loading
from localspec.engine.pair.lane import PLANNED_GAP_SHARE
from localspec.engine.pair.profile import PrefillCost
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import resolve_settings
from localspec.engine.speculation.cost import NO_CHANGE, CostTable, WidthHistory
from localspec.protocol.frames import (
    Constraint,
    PairFiles,
    PromptCost,
    Sampling,
    SpeculationSettings,
)
from tests.support.pairs import BOS, N_VOCAB, expected
from tests.support.recurrent import lfm2_pair
from tests.support.rescoring import NEAR_TIE, first_strange, worst_gap
from tests.support.running import GREEDY, PLAIN, Running, drafting, running, skip_on

Load = Callable[..., Running]


def draw_prompts(count: int, length: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, N_VOCAB - 5, length + 3 * i).tolist() for i in range(count)]


def answer_alone(engine: Running, prompt: list[int], count: int) -> list[int]:
    engine.forget()
    return engine.ask(prompt, count).tokens


def assert_own_text(
    engine: Running, prompt: list[int], tokens: list[int], truth: list[int]
) -> None:
    """Assert that an answer is that of the request alone, apart from near-ties of the target."""
    if tokens != truth:
        assert worst_gap(engine.pair.files.target, prompt, tokens) < NEAR_TIE


@pytest.mark.parametrize(
    "speculative", [PLAIN, drafting(3), drafting(8, "auto"), SpeculationSettings()]
)
def test_four_parallel_requests_answer_as_each_alone(
    contextual: Running, speculative: SpeculationSettings
) -> None:
    prompts = draw_prompts(4)
    truth = [answer_alone(contextual, prompt, 40) for prompt in prompts]
    contextual.forget()
    ids = [contextual.start(prompt, 40, GREEDY, speculative) for prompt in prompts]
    contextual.engine.step()
    assert len(contextual.pair.shared.active) == 4
    contextual.finish()
    for prompt, request, tokens in zip(prompts, ids, truth, strict=True):
        assert_own_text(contextual, prompt, contextual.answers[request].tokens, tokens)


@settings(max_examples=12)
@given(st.data())
def test_requests_that_join_and_leave_midway_keep_their_own_text(
    contextual: Running, data: st.DataObject
) -> None:
    prompts = draw_prompts(6)
    truth = [answer_alone(contextual, prompt, 20) for prompt in prompts]
    contextual.forget()
    ids: dict[int, int] = {}
    cancelled: set[int] = set()
    for at, prompt in enumerate(prompts):
        depth = data.draw(st.sampled_from([0, 1, 4, None]))
        ids[at] = contextual.start(prompt, 20, GREEDY, drafting(depth, "auto"))
        for _ in range(data.draw(st.integers(0, 6))):
            if contextual.engine.active:
                contextual.engine.step()
        if data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(ids)))
            if contextual.engine.cancel(ids[victim]):
                cancelled.add(victim)
    contextual.finish()
    for at, prompt in enumerate(prompts):
        answer = contextual.answers[ids[at]]
        if at in cancelled and answer.started is None:
            assert answer.failed.code == "cancelled"
            continue
        assert_own_text(contextual, prompt, answer.tokens, truth[at][: len(answer.tokens)])
        assert at in cancelled or len(answer.tokens) == 20


def test_requests_with_different_settings_share_a_decode(cycle: Running) -> None:
    """Greedy and sampled, drafted and plain, constrained and free requests run together."""
    cycle.forget()
    seeded = Sampling(temperature=0.9, seed=4)
    truth = cycle.ask([BOS, 9], 20, seeded).tokens
    cycle.forget()
    ids = [
        cycle.start([BOS, 7], 20, GREEDY, drafting(4)),
        cycle.start([BOS, 9], 20, seeded, drafting(2)),
        cycle.start([BOS, 11], 20, GREEDY, PLAIN),
        cycle.start([BOS, 13], 20, constraint=Constraint("regex", "[ab]{5}")),
    ]
    cycle.finish()
    answers = [cycle.answers[request] for request in ids]
    assert answers[0].tokens == expected(7, 20)
    assert answers[1].tokens == truth
    assert answers[2].tokens == expected(11, 20)
    assert len(answers[3].text) == 5


def test_a_long_prompt_is_read_beside_running_answers(
    contextual: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running answer waits for no more than a bounded chunk of another prompt."""
    monkeypatch.setattr(contextual.pair.shared, "max_prompt_rows", lambda decoding: 64)
    short, long = draw_prompts(1)[0], [(13 * at) % 500 for at in range(400)]
    truth = answer_alone(contextual, short, 60), answer_alone(contextual, long, 10)
    contextual.forget()
    writing = contextual.start(short, 60)
    contextual.engine.step()
    reading = contextual.start(long, 10)
    steps = 0
    while not contextual.answers[reading].deltas:
        deltas_before = sum(delta.tokens > 0 for delta in contextual.answers[writing].deltas)
        generated = contextual.sequence(writing).generated
        contextual.engine.step()
        steps += 1
        assert contextual.answers[writing].ending or (
            contextual.sequence(writing).generated > generated
        ), deltas_before
    assert steps >= 4
    contextual.finish()
    assert_own_text(contextual, short, contextual.answers[writing].tokens, truth[0])
    assert_own_text(contextual, long, contextual.answers[reading].tokens, truth[1])


def test_request_without_a_slot_waits_and_is_served_in_order(cycle: Running) -> None:
    cycle.forget()
    parallel = cycle.pair.models.parallel
    ids = [cycle.start([BOS, i], 6 + i) for i in range(parallel + 3)]
    cycle.engine.step()
    started = [cycle.answers[request].started is not None for request in ids]
    assert started == [True] * parallel + [False] * 3
    order: list[int] = []
    while cycle.engine.active:
        cycle.engine.step()
        order += [r for r in ids if cycle.answers[r].started is not None and r not in order]
    assert order == ids
    for i, request in enumerate(ids):
        assert cycle.answers[request].tokens == expected(i, 6 + i)


def test_an_editors_request_is_served_before_those_that_wait(cycle: Running) -> None:
    cycle.forget()
    running = [cycle.start([BOS, i], 8) for i in range(cycle.pair.models.parallel)]
    waiting = cycle.start([BOS, 20], 8)
    editor = cycle.start([BOS, 21], 8, priority="editor")
    while cycle.answers[editor].started is None:
        cycle.engine.step()
        if cycle.answers[waiting].started is not None:
            assert cycle.answers[editor].started is not None
    cycle.finish()
    assert all(cycle.answers[request].done for request in [*running, waiting, editor])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_cancelled_answer_ends_at_once_and_frees_its_slot(cycle: Running, steps: int) -> None:
    request = cycle.start([BOS, 7], 100, speculative=drafting(3))
    for _ in range(steps):
        cycle.engine.step()
    assert cycle.engine.cancel(request)
    answer = cycle.answers[request]
    assert answer.done.finish_reason == "cancelled"
    assert answer.tokens == expected(7, len(answer.tokens))
    assert not cycle.engine.active
    assert all(not slot.busy for slot in cycle.pair.shared.slots)
    assert not cycle.engine.cancel(request)


def test_a_request_cancelled_in_the_queue_or_while_reading_ends_too(cycle: Running) -> None:
    cycle.forget()
    running = [cycle.start([BOS, i], 30) for i in range(cycle.pair.models.parallel)]
    waiting = cycle.start([BOS, 30], 30)
    cycle.engine.step()
    assert cycle.engine.cancel(waiting)
    assert cycle.answers[waiting].failed.code == "cancelled"
    assert cycle.engine.cancel(running[0])
    reading = cycle.start([BOS, *range(300)], 30)
    cycle.engine.step()
    assert cycle.answers[reading].started is not None
    assert not cycle.answers[reading].deltas
    assert cycle.engine.cancel(reading)
    assert cycle.answers[reading].done.completion_tokens == 0
    cycle.finish()
    assert cycle.ask([BOS, 7], 8).tokens == expected(7, 8)


def test_cancelled_answer_leaves_its_own_text_in_the_cache(contextual: Running) -> None:
    prompt = draw_prompts(1)[0]
    contextual.forget()
    request = contextual.start(prompt, 60, speculative=drafting(4))
    for _ in range(6):
        contextual.engine.step()
    contextual.engine.cancel(request)
    follow_up = [*contextual.answers[request].all_tokens, 3, 4]
    tokens = contextual.ask(follow_up, 20).tokens
    assert_own_text(contextual, follow_up, tokens, answer_alone(contextual, follow_up, 20))


@settings(max_examples=12)
@given(st.data())
def test_requests_without_room_wait_and_none_is_truncated(
    crowded: Running, data: st.DataObject
) -> None:
    """Each request whose prompt and limit fit alone gets the whole answer that it gets alone."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    room = crowded.pair.n_ctx
    request_args = []
    for _ in range(data.draw(st.integers(3, 6), "requests")):
        length = data.draw(st.integers(1, room - 2), "prompt")
        limit = data.draw(st.none() | st.integers(1, 120), "limit")
        sampling = data.draw(st.sampled_from([GREEDY, Sampling(temperature=0.7, seed=5)]))
        text = [1, *rng.integers(0, N_VOCAB - 5, length - 1).tolist()]
        request_args.append((text, limit, sampling))
    crowded.forget()
    truth = [crowded.ask(*args).tokens for args in request_args]
    crowded.forget()
    ids = []
    for args in request_args:
        drafts = data.draw(st.sampled_from([PLAIN, drafting(3), SpeculationSettings()]), "drafts")
        priority = data.draw(st.sampled_from(["chat", "chat", "editor"]), "priority")
        ids.append(crowded.start(*args, drafts, priority=priority))
        for _ in range(data.draw(st.integers(0, 9), "steps")):
            if crowded.engine.active:
                crowded.engine.step()
    crowded.finish()
    for (prompt, limit, sampling), request, tokens in zip(request_args, ids, truth, strict=True):
        answer = crowded.answers[request]
        if answer.tokens != tokens:  # only at a near-tie
            sampler = Sampler(resolve_settings(sampling, {}))
            target = crowded.pair.files.target
            assert first_strange(target, prompt, answer.tokens, sampler) is None
        if answer.done.finish_reason == "length":
            assert len(answer.tokens) == min(limit or room, room - len(prompt))
        assert answer.done.truncated == (
            answer.done.finish_reason == "length" and len(answer.tokens) != limit
        )


@pytest.fixture(scope="module")
def crowded(contextual_files: PairFiles) -> Iterator[Running]:
    with running(contextual_files, n_ctx=256) as engine:
        yield engine


UNENDING = Sampling(temperature=0.0, ignore_eos=True)


def test_newest_request_is_preempted_and_resumes(crowded: Running) -> None:
    """With drafts, a seed and a grammar, no text is repeated or lost, and the state is retained."""
    prompts = draw_prompts(3, 15)
    shape = Constraint("regex", "[a-z ]{90}")
    variants: list[tuple[Sampling, SpeculationSettings, Constraint | None]] = [
        (UNENDING, drafting(3), None),
        (UNENDING, SpeculationSettings(), None),
        (Sampling(temperature=0.8, seed=11, ignore_eos=True), drafting(2, "ngram"), shape),
    ]

    def start(at: int) -> int:
        sampling, speculative, constraint = variants[at]
        return crowded.start(prompts[at], 110, sampling, speculative, constraint=constraint)

    truth = []
    for at in range(3):
        crowded.forget()
        solo_id = start(at)
        crowded.finish()
        truth.append(crowded.answers[solo_id])
    crowded.forget()
    ids = [start(at) for at in range(3)]
    preempted = set()
    while crowded.engine.active:
        crowded.engine.step()
        active_ids = {gen.id for gen in crowded.pair.shared.active}
        preempted |= {r for r in ids if r not in active_ids and not crowded.answers[r].ending}
    assert preempted
    assert ids[0] not in preempted
    for request, alone_answer, prompt in zip(ids, truth, prompts, strict=True):
        answer = crowded.answers[request]
        assert answer.done.completion_tokens == alone_answer.done.completion_tokens
        if answer.text != alone_answer.text:  # only at a near-tie
            banned = crowded.pair.vocab.ends
            assert request != ids[2]
            assert worst_gap(crowded.pair.files.target, prompt, answer.tokens, banned) < NEAR_TIE
    assert len(crowded.answers[ids[2]].text) == 90


def count_sent_tokens(engine: Running, request: int) -> int:
    """Return how many tokens of an answer have been sent."""
    return max((delta.tokens for delta in engine.answers[request].deltas), default=0)


def test_oldest_request_advances_whatever_comes_after_it(crowded: Running) -> None:
    crowded.forget()
    oldest = crowded.start(draw_prompts(1)[0], 120, UNENDING)
    crowded.engine.step()
    rng = np.random.default_rng(3)
    stalled = 0
    while crowded.answers[oldest].ending is None:
        generated = crowded.sequence(oldest).generated
        if rng.random() < 0.3:
            crowded.start(rng.integers(0, N_VOCAB - 5, 150).tolist(), 40)
        crowded.engine.step()
        ended = crowded.answers[oldest].ending is not None
        moved = ended or crowded.sequence(oldest).generated > generated
        stalled = 0 if moved else stalled + 1
        assert stalled <= 4  # steps in which other requests are preempted
    crowded.finish()


def test_preempted_request_can_be_cancelled_and_keeps_its_tokens(crowded: Running) -> None:
    prompts = draw_prompts(2, 40)
    crowded.forget()
    ids = [crowded.start(prompt, 150, UNENDING) for prompt in prompts]
    while len(crowded.pair.shared.active) != 1 or not count_sent_tokens(crowded, ids[1]):
        crowded.engine.step()
    assert crowded.engine.cancel(ids[1])
    ending = crowded.answers[ids[1]].done
    assert (ending.finish_reason, ending.truncated) == ("cancelled", False)
    assert ending.completion_tokens == len(crowded.answers[ids[1]].tokens) > 0
    crowded.finish()
    assert len(crowded.answers[ids[0]].tokens) == 150


def test_requests_with_a_common_prefix_share_its_cells(crowded: Running) -> None:
    """Four prompts of 180 tokens that differ in the last one run together in a context of 256."""
    common = draw_prompts(1, 180)[0]
    crowded.forget()
    crowded.ask(common, 0)
    ids = [crowded.start([*common, 3 + at], 4) for at in range(4)]
    crowded.engine.step()
    crowded.engine.step()
    assert len(crowded.pair.shared.active) == 4
    crowded.finish()
    assert all(len(crowded.answers[request].tokens) == 4 for request in ids)


def test_idle_caches_make_room_for_a_long_prompt(contextual_files: PairFiles, load: Load) -> None:
    engine = load(contextual_files, n_ctx=256)
    for prompt in draw_prompts(4, 50):
        engine.ask(prompt, 8)
    cached_lengths = [slot.n_past for slot in engine.pair.shared.slots]
    long = [(3 * at) % 500 for at in range(200)]
    assert sum(cached_lengths) + len(long) > 256
    answer = engine.ask(long, 20, speculative=drafting(4))
    assert_own_text(engine, long, answer.tokens, answer_alone(engine, long, 20))


def test_depth_falls_as_load_rises(cycle_files: PairFiles, load: Load) -> None:
    """Where rows are expensive, four parallel requests draft less each than a single one."""
    engine = load(cycle_files)
    costs = engine.pair.learned.costs
    table = {1: 10.0, 2: 11.0, 4: 14.0, 8: 30.0, 16: 70.0, 32: 150.0}
    target = type(costs.target)(table)
    target.observe = lambda width, ms: None  # type: ignore[method-assign]
    engine.pair.shared.costs = costs.target = target
    assert engine.pair.drafter is not None

    def drafted_per_round(together: int) -> float:
        ids = [
            engine.start([BOS, 7 + i], 120, speculative=SpeculationSettings(kind="draft"))
            for i in range(together)
        ]
        engine.finish()
        statistics = [engine.answers[request].done.speculation for request in ids]
        return sum(t.drafted for t in statistics) / max(sum(t.rounds for t in statistics), 1)

    drafted_per_round(1)  # the calibration learns that drafts are good
    assert drafted_per_round(4) < drafted_per_round(1)


def test_gpu_pass_reads_several_batches_of_a_prompt(
    contextual: Running,
    contextual_files: PairFiles,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("localspec.engine.pair.models.gpus", lambda: ["A GPU"])
    engine = load(contextual_files, n_batch=64, n_ctx=1024)
    pass_tokens = 64 * loading.GPU_BATCH_FACTOR
    prompts = draw_prompts(3, pass_tokens - 3)
    truth = [answer_alone(contextual, prompt, 20) for prompt in prompts]
    reading = engine.start(prompts[0], 20)
    engine.engine.step()
    assert engine.sequence(reading).slot.n_past == pass_tokens - 3  # all of it, in one pass
    later_ids = [engine.start(prompt, 20, GREEDY, drafting(3)) for prompt in prompts[1:]]
    engine.finish()
    for request, prompt, text in zip([reading, *later_ids], prompts, truth, strict=True):
        assert_own_text(contextual, prompt, engine.answers[request].tokens, text)


@settings(max_examples=10)
@given(count=st.integers(2, 3), length=st.integers(60, 150), budget=st.integers(3, 60))
def test_short_prompts_end_together_and_long_ones_are_read_in_turn(
    contextual: Running, count: int, length: int, budget: int
) -> None:
    """Meanwhile a bystander generates a token in every pass."""
    lane = contextual.pair.shared
    contextual.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "max_prompt_rows", lambda decoding: budget)
        bystander = contextual.start([BOS, 7], 500)
        contextual.engine.step()
        waiting = [contextual.start([at, *range(10, 9 + length)], 1) for at in range(count)]
        ended: dict[int, int] = {}
        begun = 0
        while len(ended) < count:
            generated = contextual.sequence(bystander).generated
            contextual.engine.step()
            assert contextual.sequence(bystander).generated == generated + 1
            begun = begun or sum(
                sequence.prefilling and sequence.slot.n_past > 0 for sequence in lane.active
            )
            for request in waiting:
                if contextual.answers[request].ending:
                    ended.setdefault(request, contextual.engine.rounds)
        contextual.engine.cancel(bystander)
        contextual.finish()
    if count * length <= lane.batch.capacity:
        assert begun == count
        assert max(ended.values()) - min(ended.values()) <= 1
    else:
        assert begun == 1


@settings(max_examples=8)
@given(
    budget=st.integers(12, 80),
    writing=st.integers(1, 2),
    lengths=st.lists(st.integers(30, 250), min_size=1, max_size=2),
    priority=st.sampled_from(["chat", "editor"]),
)
@example(budget=12, writing=1, lengths=[97], priority="editor")
def test_drafts_of_others_do_not_lengthen_a_prompt_pass(
    cycle: Running, budget: int, writing: int, lengths: list[int], priority: str
) -> None:
    """Drafts replace some of the prompt's tokens in the pass, but none of an editor's prompt."""
    cycle.forget()
    lane, passes = cycle.pair.shared, []
    decode = lane.decode

    def counting_decode(timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        own = {sequence.slot.id for sequence in lane.active if not sequence.prefilling}
        rows = [lane.batch.struct.seq_id[row][0] for row in range(lane.batch.rows)]
        if not timed and own and (prompt_rows := sum(row not in own for row in rows)):
            passes.append((prompt_rows, len(rows) - prompt_rows, len(own)))
        return decode(timed, sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "max_prompt_rows", lambda decoding: budget)
        patch.setattr(lane, "decode", counting_decode)
        ids = [cycle.start([BOS, 7 + at], 300, speculative=drafting(8)) for at in range(writing)]
        for _ in range(3):
            cycle.engine.step()
        for length in lengths:
            late = cycle.start([(5 * at) % 500 for at in range(length)], 1, priority=priority)
        while not cycle.answers[late].ending:
            cycle.engine.step()
        for request in ids:
            cycle.engine.cancel(request)
        cycle.finish()
    assert passes
    assert all(
        prompt_rows + decode_rows <= budget + own for prompt_rows, decode_rows, own in passes
    )
    if priority == "editor":
        if len(lengths) == 1:
            # A last token read alone counts as a decoding row.
            assert len(passes) == -(-(lengths[0] - 1) // budget)
    elif len(passes) > 3:
        assert any(decode_rows > own for _, decode_rows, own in passes)


@skip_on("rpc", "cuda", why="a CPU alone is asked on the way through a pass")
@pytest.mark.parametrize("seed", range(8))
def test_prompts_are_read_in_wide_passes_while_nothing_decodes(
    cycle: Running, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Prompts are read whole if they fit together; else the first one, with little of the others."""
    cycle.forget()
    rng, lane = np.random.default_rng(seed), cycle.pair.shared
    monkeypatch.setattr(lane, "max_prompt_rows", lambda decoding: 20)
    lengths = [int(rng.integers(10, 200)) for _ in range(rng.integers(2, 5))]
    editor = int(rng.integers(-1, len(lengths)))
    for at, length in enumerate(lengths):
        priority = "editor" if at == editor else "user"
        cycle.start([BOS, *rng.integers(0, 400, length - 1).tolist()], 4, priority=priority)
    cycle.engine.step()
    n_past = [sequence.slot.n_past for sequence in lane.active]
    prompt_lengths = [len(sequence.tokens) - sequence.generated for sequence in lane.active]
    leader = next(
        (at for at, sequence in enumerate(lane.active) if sequence.request.priority == "editor"),
        None,
    )
    if leader is None and sum(prompt_lengths) <= lane.batch.capacity:
        assert n_past == prompt_lengths
    else:
        leader = prompt_lengths.index(min(prompt_lengths)) if leader is None else leader
        assert n_past[leader] == prompt_lengths[leader]
        assert sum(n_past) <= max(prompt_lengths[leader], 20)
    cycle.finish()


def test_suggestion_is_read_before_a_shorter_warm_up(
    cycle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle.forget()
    lane = cycle.pair.shared
    monkeypatch.setattr(lane, "max_prompt_rows", lambda decoding: 20)
    warm = cycle.start([BOS, *range(60)], 0, priority="editor")
    suggestion = cycle.start([BOS, *range(100, 250)], 4, priority="editor")
    while cycle.answers[suggestion].ending is None:
        cycle.engine.step()
        assert cycle.answers[warm].ending is None or cycle.answers[suggestion].deltas
    cycle.finish()


@pytest.mark.parametrize("seed", range(4))
def test_warm_up_is_not_read_while_a_suggestion_is_generated(
    cycle: Running, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It is read afterwards, to its end; the prompt of a chat is read all the time."""
    cycle.forget()
    rng, lane = np.random.default_rng(seed), cycle.pair.shared
    monkeypatch.setattr(lane, "max_prompt_rows", lambda decoding: 20)
    suggestion = cycle.start([BOS, *range(10)], int(rng.integers(4, 20)), priority="editor")
    assert cycle.engine.has_waiting_editor
    while not cycle.answers[suggestion].deltas:
        cycle.engine.step()
    warm = cycle.start([401, *rng.integers(0, 400, 90).tolist()], 0, priority="editor")
    chat = cycle.start([BOS, *rng.integers(0, 400, 30).tolist()], 2)
    while cycle.answers[suggestion].ending is None:
        cycle.engine.step()
        n_past = {sequence.id: sequence.slot.n_past for sequence in lane.active}
        assert cycle.answers[suggestion].ending or n_past[warm] == 0
        assert not cycle.engine.has_waiting_editor
    assert cycle.answers[chat].started
    cycle.finish()
    assert cycle.answers[warm].done.prompt_tokens == 91
    assert cycle.answers[chat].done.completion_tokens == 2


def test_prompts_use_short_passes_where_a_pass_cannot_be_aborted(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(lfm2_pair(tmp_path))
    lane = engine.pair.shared
    monkeypatch.setattr(lane, "max_prompt_rows", lambda decoding: 20)
    for number in range(2):
        engine.start([BOS, *range(number, 100)], 4)
    engine.engine.step()
    assert 0 < sum(sequence.slot.n_past for sequence in lane.active) <= 20
    engine.finish()


@pytest.mark.parametrize("bystanders", [0, 1])
def test_text_is_copied_in_wide_passes_only_when_alone(
    cycle: Running, monkeypatch: pytest.MonkeyPatch, bystanders: int
) -> None:
    cycle.forget()
    lane, widest = cycle.pair.shared, [0]
    decode = lane.decode

    def counting_decode(timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        widest[0] = max(widest[0], lane.batch.rows if timed else 0)
        return decode(timed, sequences)

    monkeypatch.setattr(lane, "max_prompt_rows", lambda decoding: 20)
    # The width must not depend on measured costs.
    monkeypatch.setattr(lane, "choose_width", lambda rows, sequences=1: rows)
    monkeypatch.setattr(lane, "decode", counting_decode)
    for _ in range(bystanders):
        cycle.start([BOS, 9], 400)
    cycle.engine.step()
    text = [7]
    for _ in range(120):
        text.append(expected(text[-1], 1)[0])
    copying = cycle.start([BOS, *text, BOS, *text[:4]], 100, speculative=drafting(48, "ngram"))
    while not cycle.answers[copying].ending:
        cycle.engine.step()
    for request in [sequence.id for sequence in lane.active]:
        cycle.engine.cancel(request)
    cycle.finish()
    assert widest[0] <= 22 if bystanders else widest[0] >= 40


def test_warm_editor_gets_its_first_token_within_two_passes(
    contextual: Running,
) -> None:
    """Answers are being generated and a long prompt is being read meanwhile, with speculation."""
    contextual.forget()
    rng = np.random.default_rng(5)
    above, long = rng.integers(0, N_VOCAB - 5, 150).tolist(), rng.integers(0, N_VOCAB - 5, 250)
    contextual.ask(above, 0)  # the warm-up of an editor
    for number in range(2):
        contextual.start([BOS, number], 60, speculative=drafting(3))
    for _ in range(3):
        contextual.engine.step()
    contextual.start(long.tolist(), 8)
    line = rng.integers(0, N_VOCAB - 5, 20).tolist()
    editor = contextual.start(
        [*above, *line], 8, speculative=SpeculationSettings(), priority="editor"
    )
    rounds_before = contextual.engine.rounds
    while not contextual.answers[editor].started or not contextual.sequence(editor).generated:
        contextual.engine.step()
        assert contextual.engine.rounds - rounds_before <= 2
    started = contextual.answers[editor].started
    assert started is not None
    assert started.cached_tokens == len(above)
    contextual.finish()


@pytest.mark.parametrize("progress", [False, True])
def test_each_prompt_pass_reports_its_progress(
    contextual_files: PairFiles, load: Load, progress: bool
) -> None:
    engine = load(contextual_files, n_batch=64)
    prompt, rows = [(13 * at) % 500 for at in range(200)], engine.pair.models.rows
    for cached in (0, 64, 199):
        passes = [*range(cached + rows, 200, rows), 200]
        text = [*prompt[:cached], *(499 - token for token in prompt[cached:])]
        answer = engine.ask(text if cached < 199 else prompt, 3, progress=progress)
        assert [reading.processed for reading in answer.readings] == passes[
            : None if progress else -1
        ]
        assert all(reading.ms > 0 for reading in answer.readings)
        assert answer.started is not None
        assert answer.started.reading is not None
        assert answer.started.reading.range_seconds(0, 200) > 0
        engine.ask(prompt, 1)


def test_started_frame_reports_the_measured_cost_of_prompts(
    contextual_files: PairFiles, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine a row takes 1 ms, and 20 µs more for each row before it."""
    engine, truth = load(contextual_files, n_batch=64), PromptCost(1e-3, 2e-5)
    lane = engine.pair.shared
    times = iter(range(1_000_000))  # a pass reads the clock when it begins and when it ends

    def clock() -> float:
        return (
            lane.batch.rows * truth.token_seconds(lane.batch.mean_position)
            if next(times) % 2
            else 0.0
        )

    monkeypatch.setattr(lane, "_clock", clock)
    for length in (engine.pair.n_ctx - 20, 90, 300):
        engine.forget()
        engine.ask([(13 * at + length) % 500 for at in range(length)], 3)
    started = engine.ask(draw_prompts(1)[0], 1).started
    assert started is not None
    assert started.reading is not None
    assert started.reading.range_seconds(0, 400) == pytest.approx(
        truth.range_seconds(0, 400), rel=0.1
    )
    assert started.reading.range_seconds(300, 400) == pytest.approx(
        truth.range_seconds(300, 400), rel=0.2
    )


def test_plain_ms_is_the_last_entry_of_pass_ms(contextual_files: PairFiles, load: Load) -> None:
    """`plain_ms` serves a round's accounting, and `pass_ms` the choice of a depth."""
    engine, rng = load(contextual_files), random.Random(7)
    lane = engine.pair.shared
    lane._widths = WidthHistory(NO_CHANGE)  # a device may have shown a price of changing the width
    for _ in range(40):
        lane.costs = CostTable({width: rng.uniform(1, 9) for width in (1, 2, 3, 4, 6, 8, 12)})
        for sequences in (1, 2, 3, 4, 8):
            assert lane.plain_ms(sequences) == pytest.approx(lane.pass_ms(sequences, sequences)[-1])
    exact = engine.pair.exact.lane()
    assert exact.plain_ms(1) == pytest.approx(exact.pass_ms(1)[-1])


@pytest.mark.parametrize("least", [0.0, 0.2])
@pytest.mark.parametrize("writing", [0, 1, 3])
def test_prompt_passes_are_as_long_as_the_limit_allows(
    contextual_files: PairFiles, load: Load, writing: int, least: float
) -> None:
    """Passes follow the measured cost of a row, and are shorter while other requests decode.

    `least` is the duration of the narrowest pass in seconds, which reads all weights.
    """
    engine = load(contextual_files, pass_s=1.0, gap_s=0.5)
    limit_s = PLANNED_GAP_SHARE * 0.5 if writing else 1.0  # some passes take longer than expected
    lane = engine.pair.shared
    row_s, elapsed = 0.02, [0.0]  # seconds per row, and seconds elapsed
    lane._clock = lambda: elapsed[0]
    lane.reading = PrefillCost(max(16 * row_s, least) / 16, 0.0, lane.context.n_ctx)
    lane.costs = CostTable({width: max(width * row_s, least, 1e-3) * 1e3 for width in range(1, 17)})
    passes: list[tuple[int, float]] = []
    decode = lane.context.decode

    def slow_decode(batch: Batch) -> None:
        spent = max(batch.rows * row_s, least)
        elapsed[0] += spent
        passes.append((batch.rows, spent))
        decode(batch)

    lane.context.decode = slow_decode  # type: ignore[method-assign]
    text = [(13 * at) % 500 for at in range(200)]

    def write() -> None:
        engine.forget()
        for number in range(writing):
            engine.start([5, number, 7], 200)
            engine.engine.step()
        passes.clear()

    write()
    engine.start([text[0], *text[:90]], 4)  # two prompts share the time of a pass
    reading = engine.start(text, 4)
    while not engine.answers[reading].ending:
        engine.engine.step()
    assert all(spent <= limit_s + (2 + writing) * row_s for _, spent in passes)
    assert max(spent for _, spent in passes) >= 0.8 * limit_s  # and no shorter than necessary
    row_s *= 2
    write()
    reading = engine.start(text, 4)
    while not engine.answers[reading].ending:
        engine.engine.step()
    # The pass that shows the slowdown.
    assert sum(spent > 1.2 * limit_s for _, spent in passes) <= 1
