"""Chunks of a text that are moved in the cache: what is found, how near it is, who does not get it."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec
from localspec.engine import scheduler
from localspec.engine.cache.slot import MAX_MOVES, REREAD_TOKENS, find_chunks
from localspec.protocol.frames import PairFiles
from tests.engine.test_reuse import (
    DENSE,
    EXPERTS,
    STEPS,
    WINDOWED,
    Company,
    company,
    pair_of,
)
from tests.support.architectures import N_VOCAB
from tests.support.running import Running

LEAST = 8
# Positions of several numbers, or a window that is longer than these texts.
NOT_MOVED = ("glm4", "exaone4", "llama4", "smallthinker")


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 6),
    st.data(),
)
def test_chunks_are_what_both_texts_have_in_the_same_order(
    cached: list[int], prompt: list[int], least: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, min(len(cached), len(prompt))))
    anew = data.draw(st.sampled_from([1, 5, REREAD_TOKENS]))
    prompt += [9] * anew
    here = there = start
    for chunk in find_chunks(cached, prompt, start, least, anew):
        assert chunk.length >= least
        assert chunk.old >= there
        assert chunk.new >= here
        assert cached[chunk.old : chunk.old + chunk.length] == prompt[chunk.new : chunk.end]
        here, there = chunk.end, chunk.old + chunk.length
    assert here <= len(prompt) - anew or here == start


@given(
    st.lists(st.integers(), min_size=4, max_size=80, unique=True).map(
        lambda values: [*range(len(values))]
    ),
    st.data(),
)
def test_of_a_text_with_a_change_all_the_rest_is_found(
    text: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    gone = data.draw(st.integers(0, len(text) - at))
    new = [1000 + each for each in range(data.draw(st.integers(0, 5)))]
    changed = [*text[:at], *new, *text[at + gone :], -1]
    found = find_chunks(text, changed, at, 1)
    assert sum(chunk.length for chunk in found) == len(text) - at - gone


# ------------------------------------------------------------------------ one editor


def typed(seed: int, keys: int) -> list[list[int]]:
    """The prompts of somebody who types far above the end."""
    above, below, line = words(seed, 120), words(seed + 1, 400), words(seed + 2, keys)
    return [[*above[:9], *line[: count + 1], *below] for count in range(keys)]


def words(seed: int, count: int) -> list[int]:
    """Exactly so many."""
    dice = random.Random(seed)
    return [dice.randrange(N_VOCAB - 8) for _ in range(count)]


@pytest.fixture
def llama(models: Path) -> PairFiles:
    return pair_of("llama", models)


@pytest.mark.parametrize(("priority", "anew"), [("editor", REREAD_TOKENS), ("chat", 1)])
def test_an_edit_above_reads_what_is_new_and_the_end_as_much_as_an_editor_needs(
    load: Callable[..., Running], llama: PairFiles, priority: str, anew: int
) -> None:
    engine = load(llama, parallel=2, n_ctx=1024)
    first, *others = typed(1, 6)
    engine.ask(first, 4, n_cache_reuse=LEAST)
    for prompt in others:
        answer = engine.ask(prompt, 4, n_cache_reuse=LEAST, priority=priority)
        assert answer.started is not None
        assert answer.started.cache == "shift"
        assert answer.done.timings.prompt_n == 1 + anew
        assert answer.done.timings.cache_shift_n == 400 - anew
    assert engine.pair.shared.context.length(2) == 0  # where chunks wait


def test_pieces_of_a_ring_that_rotates_and_text_that_was_deleted_are_moved(
    load: Callable[..., Running], llama: PairFiles
) -> None:
    engine = load(llama, parallel=2, n_ctx=1024)
    head, pieces, near = words(1, 9), [words(9 + each, 50) for each in range(5)], words(2, 340)

    def prompt(first: int, cut: int = 0) -> list[int]:
        ring = [token for each in range(first, first + 3) for token in pieces[each % 5]]
        return [*head, *ring, *near[cut:]]

    engine.ask(prompt(0), 2, n_cache_reuse=LEAST)
    for first in (1, 2, 3):
        answer = engine.ask(prompt(first), 2, n_cache_reuse=LEAST, priority="editor")
        assert answer.done.timings.prompt_n == 50 + REREAD_TOKENS
    answer = engine.ask(prompt(3, cut=5), 2, n_cache_reuse=LEAST, priority="editor")
    assert answer.done.timings.prompt_n == REREAD_TOKENS


def test_a_text_that_was_moved_often_is_read_anew(
    load: Callable[..., Running], llama: PairFiles
) -> None:
    engine = load(llama, parallel=1, n_ctx=1024)
    read = [
        engine.ask(prompt, 1, n_cache_reuse=LEAST, priority="editor").done.timings.prompt_n
        for prompt in typed(1, MAX_MOVES + 4)
    ]
    assert [at for at, count in enumerate(read) if count > 1 + REREAD_TOKENS] == [0, MAX_MOVES + 1]


def test_who_did_not_ask_for_it_and_exact_answers_get_what_a_fresh_reading_gives(
    load: Callable[..., Running], llama: PairFiles
) -> None:
    engine = load(llama, parallel=2, n_ctx=1024)
    fresh = load(llama, parallel=2, n_ctx=1024)
    others: list[dict[str, object]] = [
        {},
        {"exact": True},
        {"conversation": "a1", "n_cache_reuse": LEAST},
    ]
    for seed, more in enumerate(others):
        for prompt in typed(10 * seed, 5):
            engine.ask(prompt, 4, n_cache_reuse=LEAST)
        answer = engine.ask(prompt, 8, top_logprobs=0, **more)
        again = fresh.ask(prompt, 8, top_logprobs=0, exact=bool(more.get("exact")))
        assert answer.tokens == again.tokens
        assert answer.done.timings.cache_shift_n == 0
        assert answer.done.timings.cache_n <= 14  # up to where a key was typed first


def test_a_request_that_leaves_while_its_chunks_wait_leaves_nothing_behind(
    load: Callable[..., Running], llama: PairFiles
) -> None:
    engine = load(llama, parallel=1, n_ctx=1024, n_batch=64)
    before, after = words(1, 60), words(3, 400)
    engine.ask([*before, *after], 2, n_cache_reuse=LEAST)
    leaving = engine.start([*before, *words(4, 300), *after], 8, n_cache_reuse=LEAST)
    engine.engine.step()
    context = engine.pair.shared.context
    assert context.length(1) > 0
    engine.engine.cancel(leaving)
    assert context.length(1) == 0
    slot = next(iter(engine.pair.shared.slots))
    read = slot.n_past
    assert 60 < read < 360
    assert context.length(slot.id) == read
    answer = engine.ask([*before, *words(4, 300), 5], 4)
    assert answer.done.timings.cache_n == read


@pytest.mark.parametrize("architecture", [*WINDOWED[:2], "gpt-oss", "qwen35", "mamba2"])
def test_a_model_whose_cache_is_no_plain_one_reads_again(
    architecture: str, load: Callable[..., Running], models: Path
) -> None:
    engine = load(pair_of(architecture, models), parallel=1, n_ctx=1024)
    for prompt in typed(1, 3):
        answer = engine.ask(prompt, 2, n_cache_reuse=LEAST)
        assert answer.done.timings.cache_shift_n == 0


# ------------------------------------------------------------------------ editors beside chats


class Editors(Company):
    """Half of the requests may move chunks; what the other half gets is held against a fresh context."""

    def start(self) -> None:
        before = set(self.running)
        super().start()
        if self.random.random() < 0.5:
            (request,) = set(self.running) - before
            self.engine.engine.cancel(request)
            del self.running[request]
            self.engine.answers.pop(request)
            self.edit()

    def edit(self) -> None:
        dice = self.random
        text = list(dice.choice(self.texts[-4:])) if self.texts else self._words(200)
        for _ in range(dice.randint(1, 2)):
            at = dice.randrange(len(text) + 1)
            gone = dice.choice([0, 0, 1, 30])
            text[at : at + gone] = [
                dice.randrange(N_VOCAB - 8) for _ in range(dice.choice([0, 1, 1, 40]))
            ]
        if text := text[:250]:
            request = self.engine.start(text, dice.randint(1, 6), n_cache_reuse=LEAST)
            self.running[request] = -1

    def collect(self) -> None:
        for request, length in list(self.running.items()):
            if length < 0 and (answer := self.engine.answers[request]).ending is not None:
                del self.running[request]
                if answer.tokens:
                    self.texts.append(answer.all_tokens)
                    timings = answer.done.timings
                    self.moved += timings.cache_shift_n
                    assert isinstance(timings.cache_exact_n, int)
                    assert timings.cache_exact_n <= timings.cache_n - timings.cache_shift_n
        super_running = {r: n for r, n in self.running.items() if n < 0}
        for request in super_running:
            del self.running[request]
        super().collect()
        self.running |= super_running

    moved = 0


@pytest.fixture
def editors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few hundred tokens, whose ends are not spared."""
    monkeypatch.setattr("localspec.engine.pair.profile.BUDGET_S", 0.01)
    monkeypatch.setattr("tests.engine.test_reuse.Company", Editors)
    monkeypatch.setattr(scheduler, "REREAD_TOKENS", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("editors")
@pytest.mark.parametrize("architecture", DENSE + EXPERTS)
def test_chats_beside_editors_get_what_a_fresh_context_would_have_read(
    architecture: str, models: Path, tmp_path: Path
) -> None:
    with company(pair_of(architecture, models), tmp_path, 0) as texts:
        assert isinstance(texts, Editors)
        while texts.answers < STEPS:
            texts.step()
            for slot in texts.engine.pair.shared.slots:
                assert slot.busy or texts.engine.pair.shared.context.length(slot.id) == slot.n_past
        movable = texts.engine.pair.shared.slots._parking.free
    assert texts.worst < 1
    assert bool(texts.moved) == movable
    assert movable or architecture in NOT_MOVED


@pytest.mark.slow
@pytest.mark.usefixtures("editors")
@pytest.mark.parametrize("architecture", ["mpt", "olmoe"])  # of others it is as near as rounding
def test_what_is_moved_unnoticed_would_be_noticed(
    architecture: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above, were chats to go on from what was moved."""
    monkeypatch.setattr("localspec.engine.cache.slot.Slot.count_exact", lambda _self, count: count)
    with company(pair_of(architecture, models), tmp_path, 0) as texts:
        while texts.answers < 100:
            texts.step()
    assert texts.worst > 1


# ------------------------------------------------------------------------ how near it is


def test_suggestions_are_mostly_those_of_a_fresh_reading(load: Callable[..., Running]) -> None:
    """The shipped pair, in a real file: pieces of others rotate, and lines far above are edited."""
    folder = Path(localspec.__file__).parent / "builtin"
    files = PairFiles("builtin", str(folder / "target.gguf"), None)
    engine, fresh = (load(files, parallel=1, n_ctx=1024) for _ in range(2))
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    fim, dice = engine.pair.vocab.fim, random.Random(1)

    def plain(start: int, count: int) -> list[int]:
        text = "".join(lines[start : start + count])
        return engine.pair.vocab.tokenize(text, add_special=False, parse_special=False)

    alike = asked = moved = 0
    for _ in range(4):
        at = dice.randrange(200, len(lines) - 60)
        near = [fim.prefix, *plain(at - 36, 36), fim.suffix, *plain(at + 1, 12), fim.middle]
        ring = [plain(dice.randrange(1500), 6) for _ in range(8)]
        for first in range(5):
            prompt = [token for piece in ring[first : first + 3] for token in piece] + near
            answer = engine.ask(prompt, 8, n_cache_reuse=32)
            true = fresh.ask(prompt, 8, cache_prompt=False)
            asked += 1
            alike += answer.tokens == true.tokens
            moved += answer.done.timings.cache_shift_n > 0
    print(f"{alike} of {asked} alike, {moved} of them moved")
    assert moved > asked // 2
    assert alike > 0.8 * asked
