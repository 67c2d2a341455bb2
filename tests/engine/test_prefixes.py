"""The store of prefixes that lost their slot: its limit, its order of eviction, and its lookup.

With real models, a restored prefix gives the same answer as a prompt that is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.cache import prefixes
from localspec.engine.cache.prefixes import CopyCost, Prefix, PrefixStore, common_prefix
from localspec.engine.cache.slot import MIN_TOKENS, Slot
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import FimTokens
from localspec.engine.pair.lane import EXACT_CHUNK_TOKENS
from localspec.protocol.frames import PairFiles
from tests.support.recurrent import lfm2_pair, mamba_pair
from tests.support.rescoring import assert_alike
from tests.support.running import PLAIN, Load, Running, drafting

LIMIT = 100
MIB = 1 << 20


def make_prefix(tokens: list[int], size: int = 10, **more: Any) -> Prefix:
    return Prefix(tokens, np.zeros(size, np.uint8), **more)


def make_store(limit: int = LIMIT, dropped: list[Prefix] | None = None) -> PrefixStore:
    given_up = [] if dropped is None else dropped
    return PrefixStore(limit, CopyCost(lambda: 1.0), given_up.append, lambda: None)


def held_texts(store: PrefixStore) -> list[list[int]]:
    return [list(entry.tokens) for entry in store]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=8)
actions = st.one_of(
    st.tuples(st.just("put"), texts, st.integers(1, LIMIT + 20)),
    st.tuples(st.just("find"), texts, st.integers(0, 1)),
)


@given(st.lists(actions, max_size=40))
def test_store_keeps_what_saves_most(
    operations: list[tuple[str, list[int], int]],
) -> None:
    """Nothing is lost unreported, and nothing goes while something that saves less per byte stays."""
    dropped: list[Prefix] = []
    store = make_store(dropped=dropped)
    given_prefixes: list[Prefix] = []
    for action, tokens, number in operations:
        store.now += 1
        if action == "find":
            store.touch_if_covered(tokens, exact=False)
            continue
        new = make_prefix(tokens, number, used_at=store.now)
        n_dropped = len(dropped)
        is_kept = store.put(new)
        given_prefixes.append(new)
        assert is_kept == any(entry is new for entry in store)
        held = [*store]
        alone = make_store()
        alone.now = store.now
        # The last to go saves no more than each that stays, beside the same others.
        for evicted in dropped[-1:] if len(dropped) > n_dropped and number <= LIMIT else []:
            alone._entries = [*held, evicted]
            least_saving = alone._expected_saving(evicted)
            assert all(least_saving <= alone._expected_saving(entry) for entry in held)
    assert store.size <= LIMIT
    assert len(store) + len(dropped) == len(given_prefixes)


def test_text_that_another_copy_holds_or_nobody_requested_for_long_goes_first() -> None:
    """An agent's helpers share instructions, so a copy of one saves little beside a copy of another."""
    store = make_store()
    store.now = 1
    for tokens in ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [9, 8, 7, 6, 4]):
        store.put(make_prefix(tokens, LIMIT * 2 // 5, used_at=1))
    assert held_texts(store) == [[9, 8, 7, 6, 4], [1, 2, 3, 4, 5]]
    store = make_store()
    for at in range(4):
        store.now = at
        store.put(make_prefix([at, at], LIMIT // 3, used_at=at))
    assert held_texts(store) == [[3, 3], [2, 2], [1, 1]]


@given(st.lists(st.tuples(texts, st.integers(0, 8)), max_size=10), texts, st.integers(1, 3))
def test_find_returns_the_longest_prefix_it_can_cut_to(
    stored: list[tuple[list[int], int]], wanted_tokens: list[int], align: int
) -> None:
    store = make_store(10_000)
    for tokens, least in stored:
        store.put(make_prefix(tokens, least=min(least, len(tokens))))
    prefix, length = store.find(wanted_tokens, exact=False, align=align)
    shared = ((common_prefix(t, wanted_tokens) // align * align, min(m, len(t))) for t, m in stored)
    assert length == max((common for common, least in shared if common >= least), default=0)
    if prefix is None:
        assert length == 0
    else:
        assert list(prefix.tokens[:length]) == wanted_tokens[:length]
        assert prefix.least <= length


rows = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@given(rows, st.integers(1, 5000), st.floats(0.01, 2.0), st.floats(1e-6, 1e-3))
def test_idle_text_costs_at_most_twice_the_better_choice(
    requests: list[int], cells: int, ms_per_mib: float, cell_ms: float
) -> None:
    """The choices are to leave it in its cells all the time, and to copy it to memory at once."""
    size = cells * 4096
    costs = CopyCost(lambda: 1.0, ms_per_mib, cell_ms)
    copies = 2 * size / MIB * ms_per_mib + 1.0  # with the cost of a call
    beside = 0
    for at, count in enumerate(requests):
        rest = requests[at:]
        if costs.leaving_pays(costs.idle_ms(cells, 0, beside + count, 0), lambda: size):
            spent = beside * cells * cell_ms + copies
        elif len(rest) == 1:
            spent = (beside + count) * cells * cell_ms
        else:
            beside += count
            continue
        best = min(copies, sum(requests) * cells * cell_ms)
        assert spent <= 2 * best + 1e-9
        break


def test_prefix_of_the_exact_lane_is_for_that_lane_alone() -> None:
    store = make_store()
    store.put(make_prefix([1, 2, 3], exact=True))
    assert store.find([1, 2, 3], exact=False) == (None, 0)
    assert store.find([1, 2, 3], exact=True)[1] == 3
    store.supersede(make_prefix([1, 2, 3, 4]))
    assert len(store) == 1


def test_longer_text_supersedes_the_prefixes_it_can_be_cut_to() -> None:
    store = make_store()
    for tokens in ([1, 2], [1, 2, 3], [1, 9]):
        store.put(make_prefix(tokens))
    store.supersede(make_prefix([1, 2, 3, 4]))
    assert held_texts(store) == [[1, 9]]
    store = make_store()
    store.put(make_prefix([1, 2], least=2))
    store.put(make_prefix([1, 2, 3], least=3))
    store.supersede(make_prefix([1, 2, 3, 4], least=3))
    assert held_texts(store) == [[1, 2]]
    assert not store.touch_if_covered([1], exact=False)


def test_restored_prefix_leaves_the_store_unless_much_remains() -> None:
    store = make_store()
    long, short = make_prefix([1, *range(MIN_TOKENS)]), make_prefix([2, 3])
    store.put(long)
    store.put(short)
    store.note_restored(long, 1)
    assert [entry.tokens for entry in store] == [long.tokens, short.tokens]
    store.note_restored(next(iter(store)), 2)
    assert list(store) == [short]


def test_nothing_is_kept_where_memory_is_short() -> None:
    dropped: list[Prefix] = []
    store = PrefixStore(
        LIMIT, CopyCost(lambda: 1.0), dropped.append, lambda: prefixes.RESERVED_BYTES + 9
    )
    assert store.put(make_prefix([1], 9))
    assert not store.put(make_prefix([2], 10))
    assert len(dropped) == 1


def test_forgotten_conversation_is_not_reported_as_dropped() -> None:
    dropped: list[Prefix] = []
    store = make_store(dropped=dropped)
    for token, conversation in ((1, "a"), (2, "b"), (3, None)):
        store.put(make_prefix([token], conversation=conversation))
    store.forget("a")
    assert held_texts(store) == [[3], [2]]
    store.forget(None)
    assert held_texts(store) == [[3]]
    assert not dropped


def test_a_copy_must_cost_less_than_reading() -> None:
    cost = CopyCost(lambda: 0.5, ms_per_mib=1.0)
    assert cost.restoring_pays(100, 49 * MIB)
    assert not cost.restoring_pays(100, 51 * MIB)
    assert not cost.restoring_pays(MIN_TOKENS - 1, 1)
    assert cost.worth_keeping(100, 12 * MIB)
    assert not cost.worth_keeping(100, 13 * MIB)
    cost.observe_copy(10 * MIB, 100.0)
    assert not cost.restoring_pays(100, 49 * MIB)


def test_editor_text_is_evicted_before_chats_and_evicts_none() -> None:
    store = make_store()
    for at in range(4):
        store.put(make_prefix([at], 30, editors=at in (1, 2)))
    assert held_texts(store) == [[3], [2], [0]]
    assert store.has_room(40, editors=True)
    assert not store.has_room(41, editors=True)
    assert store.has_room(LIMIT, editors=False)


def make_conversation(first: int, length: int) -> list[int]:
    return [1 + (first * 131 + at * at * 7 + at) % 400 for at in range(length)]


def load_single_slot(load: Load, files: PairFiles, **more: Any) -> Running:
    """Load a pair with one slot, which every other text takes, with free copies and slow prefill."""
    engine = load(files, parallel=1, prefix_bytes=64 * MIB, **more)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    return engine


def test_text_that_lost_its_slot_is_not_reread(load: Load, contextual_files: PairFiles) -> None:
    engine = load_single_slot(load, contextual_files)
    first = make_conversation(1, 150)
    opening = engine.ask(first, 20, speculative=drafting(3)).all_tokens
    engine.ask(make_conversation(2, 150), 5)
    assert len(engine.pair.prefixes) == 1
    prompt = [*opening, 5, 6, 7]
    answer = engine.ask(prompt, 24, speculative=drafting(3))
    assert answer.started is not None
    assert answer.started.cache == "memory"
    assert answer.started.cached_tokens == answer.done.timings.cache_n >= len(opening) - 1
    assert answer.done.timings.prompt_n <= 4
    plain = engine.ask(prompt, 24, cache_prompt=False)
    assert_alike(contextual_files.target, prompt, answer.tokens, plain.tokens)
    # The draft's memory was restored too: the draft did not read 170 tokens again.
    assert answer.done.speculation.accepted > 0
    # A prefix is restored as far as it agrees.
    engine.ask(make_conversation(3, 100), 4)
    branch = [*first[:120], 9, 8, 7]
    answer = engine.ask(branch, 16)
    assert answer.done.timings.cache_n == 120
    anew = engine.ask(branch, 16, cache_prompt=False).tokens
    assert_alike(contextual_files.target, branch, answer.tokens, anew)


def test_few_tokens_slow_copies_and_a_store_without_a_limit_keep_nothing(
    load: Load, contextual_files: PairFiles
) -> None:
    engine = load_single_slot(load, contextual_files)
    engine.ask(make_conversation(1, MIN_TOKENS // 2), 4)
    engine.ask(make_conversation(2, 150), 4)
    assert len(engine.pair.prefixes) == 0
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e-9
    engine.ask(make_conversation(3, 150), 4)
    assert len(engine.pair.prefixes) == 0
    engine = load(contextual_files, parallel=1)
    for first in (1, 2):
        engine.ask(make_conversation(first, 150), 4)
    assert len(engine.pair.prefixes) == 0


def test_full_context_moves_its_oldest_text_to_the_store_and_back(
    load: Load, contextual: Running, contextual_files: PairFiles
) -> None:
    """There are two slots, but cells for only one of the texts."""
    engine = load(contextual_files, parallel=2, n_ctx=512, prefix_bytes=64 * MIB)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    texts = [make_conversation(at, 300) for at in (1, 2)]
    fresh = [contextual.ask(text, 12, cache_prompt=False).tokens for text in texts]
    for turn in range(3):
        for text, truth in zip(texts, fresh, strict=True):
            answer = engine.ask(text, 12)
            assert_alike(contextual_files.target, text, answer.tokens, truth)
            assert answer.done.timings.cache_n == (299 if turn else 0)


@pytest.mark.parametrize("dear", [True, False])
def test_idle_texts_leave_cells_that_cost_more_than_copies(
    load: Load, contextual: Running, contextual_files: PairFiles, dear: bool
) -> None:
    """All of them are still reused later, also beside a running request."""
    engine = load(contextual_files, parallel=5, n_ctx=2048, prefix_bytes=64 * MIB)
    costs = engine.pair.prefixes.copy_cost
    costs.prefill_ms, costs.cell_ms = (lambda: 1e6), 1e6 if dear else 0.0
    texts = [make_conversation(at, 200) for at in range(4)]
    fresh = [contextual.ask(text, 24, cache_prompt=False).tokens for text in texts]
    for turn in range(3):
        for text, truth in zip(texts[:3], fresh, strict=False):
            beside = engine.start(texts[3], 24, speculative=drafting(3))
            answer = engine.ask(text, 12)
            assert_alike(contextual_files.target, text, answer.tokens, truth[:12])
            assert_alike(contextual_files.target, texts[3], engine.answers[beside].tokens, fresh[3])
            assert answer.done.timings.cache_n == (199 if turn else 0)
            assert answer.started is not None
            assert answer.started.cache == (("memory" if dear else "slot") if turn else "")
    busy_slots = sum(slot.n_past > 0 for slot in engine.pair.shared.slots)
    assert busy_slots == (2 if dear else 4)


@pytest.mark.parametrize(
    ("length", "count", "evicted"), [(300, 12, True), (70, 12, False), (70, 120, True)]
)
def test_idle_texts_leave_the_cells_of_a_text_that_runs_alone(
    load: Load,
    contextual: Running,
    contextual_files: PairFiles,
    length: int,
    count: int,
    evicted: bool,
) -> None:
    """Idle texts leave when it arrives, so that it is read into their cells.

    Short texts may stay unless one of them may grow long.
    """
    engine = load(contextual_files, parallel=4, n_ctx=2048, prefix_bytes=64 * MIB)
    costs = engine.pair.prefixes.copy_cost
    costs.prefill_ms, costs.cell_ms, costs.split_ms = (lambda: 1e6), 1e-9, 1e3
    texts = [make_conversation(at, length) for at in range(4)]
    fresh = [contextual.ask(text, count, cache_prompt=False).tokens for text in texts]
    assert evicted == (3 * (length + count) > prefixes.SPLIT_CELLS)
    for turn in range(2):
        for text, truth in zip(texts[:3], fresh, strict=False):
            answer = engine.ask(text, count)
            assert_alike(contextual_files.target, text, answer.tokens, truth)
            assert answer.done.timings.cache_n == (length - 1 if turn else 0)
            assert answer.started is not None
            cache = "memory" if evicted else "slot"
            assert answer.started.cache == (cache if turn else "")
    slots = engine.pair.shared.slots
    assert sum(slot.n_past > 0 for slot in slots) == (1 if evicted else 3)
    beside = engine.start(texts[3], 60)
    engine.engine.step()
    alone = engine.start([*texts[3][:9], 7], 8)
    engine.finish()
    assert len(engine.answers[beside].tokens) == 60
    assert len(engine.answers[alone].tokens) == 8


@pytest.mark.parametrize(("most", "where"), [(200, "memory"), (60, "slot")])
def test_idle_text_leaves_when_an_answer_may_reach_its_cells(
    load: Load,
    contextual: Running,
    contextual_files: PairFiles,
    most: int,
    where: str,
) -> None:
    engine = load(contextual_files, parallel=4, n_ctx=2048, prefix_bytes=64 * MIB)
    costs = engine.pair.prefixes.copy_cost
    costs.prefill_ms, costs.cell_ms, costs.split_ms = (lambda: 1e6), 1e-9, 1e3
    first, second = make_conversation(1, 145), make_conversation(2, 40)
    fresh = contextual.ask(first, 4, cache_prompt=False).tokens
    engine.ask(first, 4)
    engine.start(second, most)
    engine.engine.step()  # it has its slot, and has not generated that much yet
    used_slots = [slot for slot in engine.pair.shared.slots if slot.n_past]
    assert len(used_slots) == (1 if where == "memory" else 2)
    engine.finish()
    repeated = engine.ask(first, 4)
    assert repeated.started is not None
    assert (repeated.started.cache, repeated.done.timings.cache_n) == (where, 144)
    assert_alike(contextual_files.target, first, repeated.tokens, fresh)


def test_exact_answers_stay_exact_when_restored(load: Load, contextual_files: PairFiles) -> None:
    engine = load_single_slot(load, contextual_files, n_ctx=1024)
    prompt = make_conversation(1, 3 * EXACT_CHUNK_TOKENS + 40)
    fresh = engine.ask(prompt, 40, exact=True, top_logprobs=0)
    engine.ask(make_conversation(2, 300), 4, exact=True)
    engine.ask(prompt, 4)  # the shared lane reads the same text, with other kernels
    repeated = engine.ask(prompt, 40, exact=True, top_logprobs=0, speculative=drafting(3))
    assert repeated.started is not None
    assert repeated.started.cache == "memory"
    assert repeated.done.timings.cache_n == 3 * EXACT_CHUNK_TOKENS
    assert repeated.tokens == fresh.tokens
    assert [t.logprob for t in repeated.logprobs] == [t.logprob for t in fresh.logprobs]


@pytest.mark.parametrize("pair", [lfm2_pair, mamba_pair])
def test_uncuttable_state_is_restored_whole_or_not_at_all(
    pair: Callable[..., PairFiles], load: Load, models: Any
) -> None:
    engine = load_single_slot(load, pair(models / pair.__name__))
    first = make_conversation(1, 100)
    opening = engine.ask(first, 8, speculative=PLAIN)
    engine.ask(make_conversation(2, 100), 4)
    for prompt, is_restored in (([*opening.all_tokens, 4, 5], True), ([*first[:70], 4, 5], False)):
        engine.ask(make_conversation(3, 100), 4)
        answer = engine.ask(prompt, 12)
        assert (answer.started is not None and answer.started.cache == "memory") == is_restored
        assert (answer.done.timings.cache_n > 90) == is_restored
        anew = engine.ask(prompt, 12, cache_prompt=False).tokens
        assert_alike(engine.pair.files.target, prompt, answer.tokens, anew)


FIM = FimTokens(prefix=500, suffix=501, middle=502, repo=-1, separator=-1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the ids of the slots that are copied into memory."""
    slot_ids: list[int] = []
    copy_state = Slots.copy_state

    def recording_copy(self: Slots, slot: Slot, n_left: int = 0) -> Prefix:
        slot_ids.append(slot.id)
        return copy_state(self, slot, n_left)

    monkeypatch.setattr(Slots, "copy_state", recording_copy)
    return slot_ids


def find_cache(engine: Running, text: list[int]) -> str:
    """Return the kind of cache from which the next turn of a chat gets its text."""
    answer = engine.ask([*text, 5], 1)
    assert answer.started is not None
    return answer.started.cache


@pytest.mark.parametrize("prefix_length", [300, 20])  # at the end or the beginning of a file
@pytest.mark.parametrize("keys", [4, 40])
def test_editor_keystrokes_copy_nothing_and_keep_chats_in_place(
    load: Load,
    contextual_files: PairFiles,
    copied: list[int],
    prefix_length: int,
    keys: int,
) -> None:
    engine = load(contextual_files, parallel=3, n_ctx=2048, prefix_bytes=MIB)
    engine.pair.vocab.fim = FIM
    costs = engine.pair.prefixes.copy_cost
    costs.prefill_ms, costs.cell_ms = (lambda: 1e6), 0.0
    chats = [make_conversation(at, 200) for at in range(3)]
    for chat in chats:
        engine.ask(chat, 8)
    file, suffix = make_conversation(7, prefix_length), make_conversation(8, 250)
    for key in range(keys):
        typed = [*file, *make_conversation(9, key)]
        prompt = [FIM.prefix, *typed, FIM.suffix, *suffix, FIM.middle]
        answer = engine.ask(prompt, 4, priority="editor")
        if key:
            assert answer.done.timings.cache_n >= prefix_length
    assert len(copied) == 1  # the chat whose slot the editor took
    for chat in chats[1:]:
        assert find_cache(engine, chat) == "slot"
    assert find_cache(engine, chats[0]) == "memory"


def test_a_chat_that_branched_finds_its_old_branch(
    load: Load, contextual_files: PairFiles, copied: list[int]
) -> None:
    engine = load_single_slot(load, contextual_files)
    opening = make_conversation(1, 200)
    old = engine.ask([*opening, *make_conversation(2, 100)], 8).all_tokens
    engine.ask([*opening, *make_conversation(3, 100)], 8)
    assert len(copied) == 1
    assert engine.ask([*old, 5], 4).done.timings.cache_n >= len(old) - 1
