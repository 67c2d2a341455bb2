"""Prefix caches are reused, copied, cut and evicted, and no text is affected."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.cache.slot import Slot
from localspec.engine.cache.slots import SlotRequest, Slots, plan_slot
from localspec.engine.llama import Batch, Context, ContextSettings, Model
from localspec.protocol.frames import PairFiles
from tests.support.rescoring import assert_alike
from tests.support.running import Running, drafting

CELLS = 256


@given(st.integers(0, 200), *[st.lists(st.integers(0, 2), max_size=30)] * 2)
def test_the_common_prefix_is_the_first_difference(n: int, a: list[int], b: list[int]) -> None:
    a, b = [0] * n + a, [0] * n + b
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


class Bench:
    """Slots over real contexts, and a reader that fills them with text."""

    def __init__(self, target: Model, draft: Model | None, count: int) -> None:
        self.target = _context(target, count)
        self.draft = _context(draft, count) if draft else None
        self.slots = Slots(self.target, self.draft, 0, count)
        self._batch = Batch(128)

    def read(self, slot: Slot, tokens: list[int]) -> None:
        """Read all but the last token with target and draft, as the step loop does."""
        slot.tokens = tokens
        slot.n_past = self._advance(self.target, slot.id, tokens, slot.n_past)
        if self.draft is not None:
            slot.n_past_draft = self._advance(self.draft, slot.draft_id, tokens, slot.n_past_draft)

    def _advance(self, context: Context, sequence: int, tokens: list[int], start: int) -> int:
        self._batch.clear()
        for at in range(start, len(tokens) - 1):
            self._batch.add(tokens[at], at, sequence, False)
        if self._batch.rows:
            context.decode(self._batch)
        return max(len(tokens) - 1, start)

    def serve(self, tokens: list[int]) -> tuple[Slot, int]:
        """Run a request from acquiring to releasing its slot, and return what it reused."""
        slot = self.slots.acquire(SlotRequest(tokens))
        reused = slot.n_past
        assert slot.tokens == tokens
        assert reused < len(tokens)
        self.check(slot)
        self.read(slot, tokens)
        self.slots.release(slot)
        self.check(slot)
        return slot, reused

    def check(self, slot: Slot) -> None:
        """Assert that the counts are those of llama.cpp's memories."""
        assert self.target.length(slot.id) == slot.n_past
        if self.draft is not None:
            assert self.draft.length(slot.draft_id) == slot.n_past_draft <= slot.n_past

    def close(self) -> None:
        self.target.close()
        if self.draft is not None:
            self.draft.close()


def _context(model: Model, count: int) -> Context:
    sizes = ContextSettings(n_ctx=CELLS, n_batch=128, n_seq=count, n_outputs=count, n_threads=1)
    return Context(model, sizes)


@pytest.fixture(scope="module")
def target(contextual_files: PairFiles) -> Iterator[Model]:
    with Model(contextual_files.target) as model:
        yield model


@pytest.fixture(scope="module")
def draft(contextual_files: PairFiles) -> Iterator[Model]:
    assert contextual_files.draft is not None
    with Model(contextual_files.draft) as model:
        yield model


@pytest.fixture
def bench(target: Model, draft: Model) -> Iterator[Bench]:
    created = Bench(target, draft, 3)
    yield created
    created.close()


def test_a_conversation_goes_on_in_its_slot(bench: Bench) -> None:
    first_slot, _ = bench.serve([*range(20)])
    second_slot, reused = bench.serve([*range(20), 50, 51, 52])
    assert second_slot is first_slot
    assert reused == 19


@pytest.mark.parametrize(
    ("length", "request_", "reused"),
    [
        (20, SlotRequest([*range(10)]), 9),  # at least the last token is left to be read
        (20, SlotRequest([*range(15), 99, 98, 97]), 15),
        (20, SlotRequest([*range(20)], reuse=False), 0),
        (60, SlotRequest([*range(60)], align=16), 48),
    ],
)
def test_reuse_ends_at_the_first_difference(
    bench: Bench, length: int, request_: SlotRequest, reused: int
) -> None:
    bench.serve([*range(length)])
    slot = bench.slots.acquire(request_)
    assert slot.n_past == reused
    bench.check(slot)


def test_a_prefix_shared_with_a_busy_slot_is_copied(bench: Bench) -> None:
    system = [*range(40)]
    busy = bench.slots.acquire(SlotRequest([*system, 100]))
    bench.read(busy, [*system, 100, 101])
    copy_slot = bench.slots.acquire(SlotRequest([*system, 200, 201]))
    assert copy_slot is not busy
    assert copy_slot.n_past == copy_slot.n_past_draft == 40
    bench.check(copy_slot)
    assert busy.n_past == 41


@pytest.mark.parametrize(
    ("length", "other", "shared"), [(30, [*range(100, 130)], 0), (60, [*range(10), 200, 201], 10)]
)
def test_unrelated_text_and_a_branch_leave_a_long_text_in_its_slot(
    bench: Bench, length: int, other: list[int], shared: int
) -> None:
    trunk, _ = bench.serve([*range(length)])
    slot, reused = bench.serve(other)
    assert slot is not trunk
    assert (reused, trunk.n_past) == (shared, length - 1)


def test_oldest_of_three_caches_is_evicted(bench: Bench) -> None:
    slots = [bench.serve([start, *range(start, start + 20)])[0] for start in (0, 100, 200)]
    bench.serve([0, *range(20), 5])  # the first slot is used again
    newcomer, reused = bench.serve([300, 301, 302])
    assert reused == 0
    assert newcomer is slots[1]


def test_least_recently_used_idle_slot_is_evicted_first(bench: Bench) -> None:
    busy = bench.slots.acquire(SlotRequest([1, 2, 3]))
    bench.read(busy, [1, 2, 3])
    old, _ = bench.serve([*range(100, 120)])
    new, _ = bench.serve([*range(200, 220)])
    assert bench.slots.evict()
    assert (old.n_past, new.n_past) == (0, 19)
    assert bench.slots.evict()
    assert not bench.slots.evict()
    assert busy.n_past == 2
    for slot in (old, new, busy):
        bench.check(slot)


def test_rolling_back_cuts_both_memories(bench: Bench) -> None:
    slot = bench.slots.acquire(SlotRequest([*range(30)]))
    bench.read(slot, [*range(30)])
    assert bench.slots.roll_back(slot, 12)
    assert (slot.n_past, slot.n_past_draft) == (12, 12)
    bench.check(slot)
    assert bench.slots.roll_back(slot, 20)  # there is nothing behind 12 to cut
    assert slot.n_past == 12


short_texts = st.lists(st.integers(0, 2), max_size=12)


@given(
    st.lists(st.tuples(short_texts, st.booleans(), st.integers(0, 3)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_plan_takes_an_idle_slot_and_changes_nothing(
    states: list[tuple[list[int], bool, int]],
    prompt: list[int],
    min_move: int,
    n_reread: int,
    cuttable: bool,
) -> None:
    slots = [
        Slot(i, i, tokens=text, n_past=len(text), busy=busy and i > 0, last_used=last_used)
        for i, (text, busy, last_used) in enumerate(states)
    ]
    usable = {s.id: min(common_prefix(s.cached, prompt), len(prompt) - 1) for s in slots}
    states_before = copy.deepcopy([asdict(slot) for slot in slots])
    request = SlotRequest(prompt, min_move=min_move, n_reread=n_reread)
    plan = plan_slot(request, slots, usable, chunks_move=min_move > 0, cuttable=cuttable)
    assert [asdict(slot) for slot in slots] == states_before
    assert not plan.slot.busy
    assert plan.n_kept == usable[plan.slot.id] <= plan.n_offered == max(usable.values())
    assert plan.n_offered < len(prompt)
    end = plan.n_kept
    for chunk in plan.chunks:
        assert end <= chunk.new <= len(prompt) - n_reread - chunk.length
        assert chunk.length >= min_move
        moved_tokens = plan.slot.cached[chunk.old : chunk.old + chunk.length]
        assert moved_tokens == prompt[chunk.new : chunk.new + chunk.length]
        end = chunk.new + chunk.length
    if plan.chunks:  # moving saves more than the best copy
        assert plan.n_kept + sum(chunk.length for chunk in plan.chunks) > plan.n_offered


prompt_parts = st.lists(st.sampled_from([0, 1]), max_size=4)


@settings(max_examples=25)
@given(st.lists(st.tuples(prompt_parts, st.booleans()), min_size=1, max_size=8))
def test_counts_are_right_after_any_conversations(
    target: Model, draft: Model, conversations: list[tuple[list[int], bool]]
) -> None:
    """Prompts consist of few parts, so that they share, extend and leave each other."""
    parts = {0: [*range(10)], 1: [*range(100, 113)]}
    bench = Bench(target, draft, 2)
    try:
        for chosen, reuse in conversations:
            prompt = [7, *(token for part in chosen for token in parts[part])]
            slot = bench.slots.acquire(SlotRequest(prompt, reuse))
            bench.check(slot)
            assert slot.n_past < len(prompt)
            bench.read(slot, prompt)
            bench.slots.release(slot)
            for other_slot in bench.slots:
                bench.check(other_slot)
    finally:
        bench.close()


@settings(max_examples=20)
@given(st.data())
def test_text_is_the_same_with_and_without_reuse(contextual: Running, data: st.DataObject) -> None:
    """Random conversations grow, branch and return, with and without drafts."""
    contextual.forget()
    texts: list[list[int]] = [[9, 8, 7]]
    for _ in range(data.draw(st.integers(2, 6))):
        base = data.draw(st.sampled_from(texts))
        n_kept = data.draw(st.integers(1, len(base)))
        new = data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=5))
        prompt = [*base[:n_kept], *new]
        depth = data.draw(st.sampled_from([0, 3, None]))
        answer = contextual.ask(prompt, 12, speculative=drafting(depth, "auto"))
        texts.append(answer.all_tokens)
        truth = contextual.ask(prompt, 12, cache_prompt=False).tokens
        assert_alike(contextual.pair.files.target, prompt, answer.tokens, truth)


def test_draft_that_is_behind_reads_the_missing_text(contextual: Running) -> None:
    """A conversation that began without drafts continues with them."""
    contextual.forget()
    prompt = [5, 6, 7, 8]
    opening = contextual.ask(prompt, 30)
    follow_up = [*opening.all_tokens, 9]
    drafted = contextual.ask(follow_up, 30, speculative=drafting(3))
    assert drafted.done.speculation.accepted > 0
    contextual.forget()
    repeated = contextual.ask(follow_up, 30, speculative=drafting(3))
    assert repeated.tokens == drafted.tokens
    assert repeated.done.speculation.accepted == drafted.done.speculation.accepted


def test_state_of_a_sequence_can_be_saved_and_restored(target: Model, tmp_path: Path) -> None:
    bench = Bench(target, None, 2)
    try:
        slot = bench.slots.acquire(SlotRequest([*range(30)]))
        bench.read(slot, [*range(30)])
        state = bench.target.save(slot.id)
        bench.slots.clear(slot)
        assert bench.target.length(slot.id) == 0
        assert bench.target.restore(slot.id, state)
        assert bench.target.length(slot.id) == 29
        assert not bench.target.restore(1, state[: len(state) // 2])
    finally:
        bench.close()
