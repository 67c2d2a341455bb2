"""Uncuttable states are stored at the beginnings of messages, at growing distances."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.cache import slot
from localspec.engine.cache.slot import MAX_MARKS, Changes, choose_positions, choose_removable
from localspec.protocol.frames import PairFiles
from tests.support import architectures
from tests.support.rescoring import assert_alike
from tests.support.running import Load

MARK = 0  # a control token of these texts


def is_mark(token: int) -> bool:
    return token == MARK


def make_text(messages: list[int]) -> list[int]:
    """Return messages of these lengths, each after two control tokens."""
    return [token for length in messages for token in (MARK, 1, MARK, *[2] * length)]


chats = st.lists(st.integers(1, 900), min_size=1, max_size=12)


@given(chats, st.integers(0, 300))
def test_edit_has_little_read_in_vain(lengths: list[int], start: int) -> None:
    tokens = make_text(lengths)
    start = min(start, len(tokens) - 1)
    positions = choose_positions(tokens, is_mark, start, MAX_MARKS)
    end = len(tokens) - slot.OPENING_TOKENS
    assert positions == sorted(set(positions))
    assert all(start < at <= end for at in positions)
    for edit in range(start, end, 7):
        back = max((at for at in (start, *positions) if at <= edit), default=0)
        # Where a border lies between two places at growing distances, it stands for both of them.
        assert end - back <= slot.PLACE_GROWTH**2 * (end - edit) + 3 * slot.MIN_TOKENS


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 600)), min_size=1, max_size=5))
def test_no_position_is_within_a_picture(parts: list[tuple[int, int]]) -> None:
    tokens = [token for text, picture in parts for token in ([2] * text + [-1] * picture)] + [2] * 9
    forks = range(0, len(tokens), 50)
    for position in choose_positions(tokens, is_mark, 0, MAX_MARKS, forks):
        assert tokens[position] > 0 or tokens[position - 1] > 0


@given(chats, st.integers(1, 20), st.lists(st.integers(1, 2000), max_size=3))
def test_few_positions_are_the_best(lengths: list[int], count: int, forks: list[int]) -> None:
    tokens = make_text(lengths)
    end = len(tokens) - slot.OPENING_TOKENS
    forks = [fork for fork in forks if fork <= end]
    positions = choose_positions(tokens, is_mark, 0, count, forks)
    assert len(positions) <= count
    if positions:
        assert positions[-1] == end
    if count >= len(set(forks)) + 2:
        assert set(forks) <= set(positions)


@given(st.lists(st.integers(1, 900), min_size=3, max_size=12), st.integers(2, 9))
def test_first_and_last_positions_are_never_removed(gaps: list[int], most: int) -> None:
    positions = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    first, last = positions[0], positions[-1]
    while len(positions) > most:
        del positions[choose_removable(positions)]
    assert (positions[0], positions[-1]) == (first, last)


@given(st.lists(st.integers(1, 900), min_size=4, max_size=12), st.data())
def test_forks_are_removed_last(gaps: list[int], data: st.DataObject) -> None:
    positions = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    fork = data.draw(st.sampled_from(positions[1:-1]))
    while len(positions) > 3:
        del positions[choose_removable(positions, [fork])]
    assert fork in positions


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2"])
def test_text_is_restored_where_it_changed(architecture: str, load: Load, models: Path) -> None:
    """Another text runs beside it, and also keeps its own answer."""
    path = str(architectures.write(architecture, models))
    files = PairFiles(architecture, path)
    engine = load(files, parallel=3, n_ctx=2048, prefix_bytes=64 << 20)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    vocab = engine.pair.vocab
    control = next(token for token in range(vocab.size) if vocab.is_control(token))

    def message(seed: int, length: int) -> list[int]:
        return [control, *((seed * 131 + at * at * 7 + at) % 400 + 20 for at in range(length))]

    chat = [*message(1, 300), *message(2, 200), *message(3, 100), *message(4, 80)]
    engine.ask(chat, 4)
    other_id = engine.start(message(9, 150), 12)
    changed = [*chat[:502], *message(5, 90), *message(6, 80)]
    answer = engine.ask(changed, 8)
    assert answer.done.timings.cache_n == 502
    fresh = engine.ask([*message(1, 300), *message(7, 50)], 8)
    assert fresh.done.timings.cache_n == 301
    for finished in (answer, fresh, engine.answers[other_id]):
        prompt = finished.all_tokens[: finished.done.prompt_tokens]
        anew = engine.ask(prompt, len(finished.tokens), cache_prompt=False).tokens
        assert_alike(path, prompt, finished.tokens, anew)


words = st.lists(st.integers(0, 9), min_size=slot.CHANGE_TOKENS, max_size=slot.CHANGE_TOKENS)


@given(
    st.lists(st.integers(10, 90), max_size=60), st.lists(st.integers(10, 90), max_size=60), words
)
def test_changed_text_is_found(before: list[int], after: list[int], reminder: list[int]) -> None:
    changes = Changes()
    assert changes.find([*before, *reminder, *after], 0) == []
    changes.learn([1, 2, *reminder, 3], 2)
    found = changes.find([*before, *reminder, *after], 0)
    assert found == ([len(before)] if before else [])
    assert changes.find([*before, *after], 0) == []
    changes.learn([1, 2, *reminder[1:]], 2)  # too short to be known again
    assert changes.find([*before, *after, *reminder[1:]], 0) == []


@given(st.lists(st.integers(0, 400), min_size=2 * slot.MAX_CHANGES, max_size=2 * slot.MAX_CHANGES))
def test_only_the_latest_changes_are_remembered(starts: list[int]) -> None:
    changes = Changes()
    for start in starts:
        changes.learn([start, 1, 2, 3], 0)
    latest = list(dict.fromkeys(reversed(starts)))[: slot.MAX_CHANGES]
    for start in set(starts):
        assert bool(changes.find([9, start, 1, 2, 3], 0)) == (start in latest)
    text = [token for _ in range(20) for token in (9, starts[-1], 1, 2, 3)]
    assert len(changes.find(text, 0)) == slot.MAX_CHANGES_IN_PROMPT
