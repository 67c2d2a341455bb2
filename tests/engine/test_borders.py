"""Where a text is gone back to whose state cannot be cut: at messages' beginnings, ever wider apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.cache.slot import (
    MIN_TOKENS,
    OPENING_TOKENS,
    choose_positions,
    choose_removable,
)
from localspec.protocol.frames import PairFiles
from tests.support import architectures
from tests.support.rescoring import assert_alike
from tests.support.running import Running

MARK = 0  # a control token of these texts


def text(messages: list[int]) -> list[int]:
    """Messages of so many tokens, each behind two control tokens."""
    return [token for length in messages for token in (MARK, 1, MARK, *[2] * length)]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.integers(0, 300))
def test_an_edit_reads_no_more_than_four_times_what_it_must(lengths: list[int], start: int) -> None:
    tokens = text(lengths)
    start = min(start, len(tokens) - 1)
    found = choose_positions(tokens, lambda token: token == MARK, start)
    end = len(tokens) - OPENING_TOKENS
    assert found == sorted(set(found))
    assert all(start < at <= end for at in found)
    for edit in range(start, end, 7):
        back = max((at for at in (start, *found) if at <= edit), default=0)
        assert end - back <= 4 * (end - edit) + 2 * MIN_TOKENS


@given(st.lists(st.integers(1, 900), min_size=3, max_size=12), st.integers(2, 9))
def test_the_instructions_and_the_end_stay_when_there_are_too_many(
    gaps: list[int], most: int
) -> None:
    kept = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    first, last = kept[0], kept[-1]
    while len(kept) > most:
        del kept[choose_removable(kept)]
    assert (kept[0], kept[-1]) == (first, last)


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2"])
def test_a_message_that_is_changed_is_gone_back_to(
    architecture: str, load: Callable[..., Running], models: Path
) -> None:
    """Beside another text, whose answer is its own as well."""
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
    other = engine.start(message(9, 150), 12)
    changed = [*chat[:502], *message(5, 90), *message(6, 80)]
    answer = engine.ask(changed, 8)
    assert answer.done.timings.cache_n == 502
    fresh = engine.ask([*message(1, 300), *message(7, 50)], 8)
    assert fresh.done.timings.cache_n == 301
    for done in (answer, fresh, engine.answers[other]):
        prompt = done.all_tokens[: done.done.prompt_tokens]
        anew = engine.ask(prompt, len(done.tokens), cache_prompt=False).tokens
        assert_alike(path, prompt, done.tokens, anew)
