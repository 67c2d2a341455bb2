"""Chunks of text that are moved in the cache: how they are found, their accuracy, and exceptions."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec
from localspec.engine import scheduler
from localspec.engine.cache.slot import MAX_MOVES, REREAD_TOKENS, find_chunks
from localspec.protocol.frames import PairFiles
from tests.engine import test_reuse as reuse
from tests.engine.test_reuse import ConcurrentTexts, draw_tokens, open_texts, write_noisy_pair
from tests.support.architectures import N_VOCAB
from tests.support.exploration import SEED
from tests.support.running import Load

LEAST = 8
# These have multi-dimensional positions, or a window that is longer than these texts.
NOT_MOVED = ("glm4", "exaone4", "llama4", "smallthinker")


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 6),
    st.data(),
)
def test_chunks_occur_in_both_texts_in_the_same_order(
    cached: list[int], prompt: list[int], least: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, min(len(cached), len(prompt))))
    n_reread = data.draw(st.sampled_from([1, 5, REREAD_TOKENS]))
    prompt += [9] * n_reread
    new_end = old_end = start
    for chunk in find_chunks(cached, prompt, start, least, n_reread):
        assert chunk.length >= least
        assert chunk.old >= old_end
        assert chunk.new >= new_end
        assert cached[chunk.old : chunk.old + chunk.length] == prompt[chunk.new : chunk.end]
        new_end, old_end = chunk.end, chunk.old + chunk.length
    assert new_end <= len(prompt) - n_reread or new_end == start


@given(
    st.lists(st.integers(), min_size=4, max_size=80, unique=True).map(
        lambda values: [*range(len(values))]
    ),
    st.data(),
)
def test_all_unchanged_text_around_an_edit_is_found(text: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    n_deleted = data.draw(st.integers(0, len(text) - at))
    new = [1000 + number for number in range(data.draw(st.integers(0, 5)))]
    changed = [*text[:at], *new, *text[at + n_deleted :], -1]
    chunks = find_chunks(text, changed, at, 1)
    assert sum(chunk.length for chunk in chunks) == len(text) - at - n_deleted


def make_editor_prompts(seed: int, keys: int) -> list[list[int]]:
    """Return the prompts of a user who types far above the end of a file."""
    above, below = draw_tokens(seed, 120), draw_tokens(seed + 1, 400)
    line = draw_tokens(seed + 2, keys)
    return [[*above[:9], *line[: count + 1], *below] for count in range(keys)]


@pytest.fixture
def llama(models: Path) -> PairFiles:
    return write_noisy_pair("llama", models)


@pytest.mark.parametrize(("priority", "n_reread"), [("editor", REREAD_TOKENS), ("chat", 1)])
def test_edit_above_rereads_only_new_tokens_and_the_end(
    load: Load, llama: PairFiles, priority: str, n_reread: int
) -> None:
    engine = load(llama, parallel=2, n_ctx=1024)
    first, *later_prompts = make_editor_prompts(1, 6)
    engine.ask(first, 4, n_cache_reuse=LEAST)
    for prompt in later_prompts:
        answer = engine.ask(prompt, 4, n_cache_reuse=LEAST, priority=priority)
        assert answer.started is not None
        assert answer.started.cache == "shift"
        assert answer.done.timings.prompt_n == 1 + n_reread
        assert answer.done.timings.cache_shift_n == 400 - n_reread
    assert engine.pair.shared.context.length(2) == 0  # the sequence where chunks are parked


def test_rotated_snippets_and_text_after_deletions_are_moved(load: Load, llama: PairFiles) -> None:
    engine = load(llama, parallel=2, n_ctx=1024)
    head, near = draw_tokens(1, 9), draw_tokens(2, 340)
    pieces = [draw_tokens(9 + number, 50) for number in range(5)]

    def prompt(first: int, cut: int = 0) -> list[int]:
        ring = [token for number in range(first, first + 3) for token in pieces[number % 5]]
        return [*head, *ring, *near[cut:]]

    engine.ask(prompt(0), 2, n_cache_reuse=LEAST)
    for first in (1, 2, 3):
        answer = engine.ask(prompt(first), 2, n_cache_reuse=LEAST, priority="editor")
        assert answer.done.timings.prompt_n == 50 + REREAD_TOKENS
    answer = engine.ask(prompt(3, cut=5), 2, n_cache_reuse=LEAST, priority="editor")
    assert answer.done.timings.prompt_n == REREAD_TOKENS


def test_text_that_was_moved_often_is_read_again(load: Load, llama: PairFiles) -> None:
    engine = load(llama, parallel=1, n_ctx=1024)
    read_again = []
    for at, prompt in enumerate(make_editor_prompts(1, MAX_MOVES + 4)):
        answer = engine.ask(prompt, 1, n_cache_reuse=LEAST, priority="editor")
        if answer.done.timings.prompt_n > 1 + REREAD_TOKENS:
            read_again.append(at)
    assert read_again == [0, MAX_MOVES + 1]


def test_exact_and_plain_requests_never_reuse_moved_chunks(load: Load, llama: PairFiles) -> None:
    engine, fresh = (load(llama, parallel=2, n_ctx=1024) for _ in range(2))
    saved: dict[str, object] = {"conversation": "a1", "n_cache_reuse": LEAST}
    kinds: list[dict[str, object]] = [{}, {"exact": True}, saved]
    for seed, options in enumerate(kinds):
        for prompt in make_editor_prompts(10 * seed, 5):
            engine.ask(prompt, 4, n_cache_reuse=LEAST)
        answer = engine.ask(prompt, 8, top_logprobs=0, **options)
        reference = fresh.ask(prompt, 8, top_logprobs=0, exact=bool(options.get("exact")))
        assert answer.tokens == reference.tokens
        assert answer.done.timings.cache_shift_n == 0
        assert answer.done.timings.cache_n <= 14  # up to the position of the first edit


def test_cancelled_request_leaves_no_parked_chunks(load: Load, llama: PairFiles) -> None:
    engine = load(llama, parallel=1, n_ctx=1024, n_batch=64)
    above, below = draw_tokens(1, 60), draw_tokens(3, 400)
    engine.ask([*above, *below], 2, n_cache_reuse=LEAST)
    leaving = engine.start([*above, *draw_tokens(4, 300), *below], 8, n_cache_reuse=LEAST)
    engine.engine.step()
    context = engine.pair.shared.context
    assert context.length(1) > 0
    engine.engine.cancel(leaving)
    assert context.length(1) == 0
    slot = next(iter(engine.pair.shared.slots))
    n_past = slot.n_past
    assert 60 < n_past < 360
    assert context.length(slot.id) == n_past
    answer = engine.ask([*above, *draw_tokens(4, 300), 5], 4)
    assert answer.done.timings.cache_n == n_past


@pytest.mark.parametrize("architecture", [*reuse.WINDOWED[:2], "gpt-oss", "qwen35", "mamba2"])
def test_model_without_plain_cache_rereads(architecture: str, load: Load, models: Path) -> None:
    engine = load(write_noisy_pair(architecture, models), parallel=1, n_ctx=1024)
    for prompt in make_editor_prompts(1, 3):
        answer = engine.ask(prompt, 2, n_cache_reuse=LEAST)
        assert answer.done.timings.cache_shift_n == 0


class Editors(ConcurrentTexts):
    """Half of the requests may move chunks; the others are compared with a fresh context."""

    def start(self) -> None:
        running_before = set(self.running)
        super().start()
        if self.random.random() < 0.5:
            (request,) = set(self.running) - running_before
            self.engine.engine.cancel(request)
            del self.running[request]
            self.engine.answers.pop(request)
            self.edit()

    def edit(self) -> None:
        rng = self.random
        text = list(rng.choice(self.texts[-4:])) if self.texts else self._words(200)
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(text) + 1)
            n_deleted, n_new = rng.choice([0, 0, 1, 30]), rng.choice([0, 1, 1, 40])
            text[at : at + n_deleted] = [rng.randrange(N_VOCAB - 8) for _ in range(n_new)]
        if text := text[:250]:
            request = self.engine.start(text, rng.randint(1, 6), n_cache_reuse=LEAST)
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
        edits = {r: n for r, n in self.running.items() if n < 0}
        for request in edits:
            del self.running[request]
        super().collect()
        self.running |= edits

    moved = 0


@pytest.fixture
def editors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chunks move up to the end of texts of a few hundred tokens."""
    monkeypatch.setattr("localspec.engine.pair.profile.BUDGET_S", 0.01)
    monkeypatch.setattr("tests.engine.test_reuse.ConcurrentTexts", Editors)
    monkeypatch.setattr(scheduler, "REREAD_TOKENS", 1)


@pytest.mark.slow
@pytest.mark.explore
@pytest.mark.usefixtures("editors")
@pytest.mark.parametrize("architecture", reuse.DENSE + reuse.EXPERTS)
def test_chats_beside_editors_match_fresh(architecture: str, models: Path, tmp_path: Path) -> None:
    with open_texts(write_noisy_pair(architecture, models), tmp_path, SEED - 1) as texts:
        assert isinstance(texts, Editors)
        while texts.answers < reuse.STEPS:
            texts.step()
            for slot in texts.engine.pair.shared.slots:
                assert slot.busy or texts.engine.pair.shared.context.length(slot.id) == slot.n_past
        movable = texts.engine.pair.shared.slots._parking.free
    assert texts.worst < 1
    assert bool(texts.moved) == movable
    assert movable or architecture in NOT_MOVED


@pytest.mark.slow
@pytest.mark.usefixtures("editors")
# For other models the difference is within rounding.
@pytest.mark.parametrize("architecture", ["mpt", "olmoe"])
def test_reuse_of_moved_chunks_by_chats_is_detected(
    architecture: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: chats continue from moved chunks."""
    monkeypatch.setattr("localspec.engine.cache.slot.Slot.count_exact", lambda _self, count: count)
    with open_texts(write_noisy_pair(architecture, models), tmp_path, 0) as texts:
        while texts.answers < 100:
            texts.step()
    assert texts.worst > 1


def test_suggestions_mostly_match_those_of_a_fresh_context(load: Load) -> None:
    """The shipped pair completes a real file, while snippets rotate and lines far above are edited."""
    folder = Path(localspec.__file__).parent / "builtin"
    files = PairFiles("builtin", str(folder / "target.gguf"), None)
    engine, fresh = (load(files, parallel=1, n_ctx=1024) for _ in range(2))
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    fim, rng = engine.pair.vocab.fim, random.Random(1)

    def tokenize_lines(start: int, count: int) -> list[int]:
        text = "".join(lines[start : start + count])
        return engine.pair.vocab.tokenize(text, add_special=False, parse_special=False)

    alike = total = moved = 0
    for _ in range(4):
        at = rng.randrange(200, len(lines) - 60)
        above, below = tokenize_lines(at - 16, 16), tokenize_lines(at + 1, 6)
        near = [fim.prefix, *above, fim.suffix, *below, fim.middle]
        ring = [tokenize_lines(rng.randrange(1500), 4) for _ in range(8)]
        for first in range(5):
            prompt = [token for piece in ring[first : first + 3] for token in piece] + near
            answer = engine.ask(prompt, 8, n_cache_reuse=32)
            true = fresh.ask(prompt, 8, cache_prompt=False)
            total += 1
            alike += answer.tokens == true.tokens
            moved += answer.done.timings.cache_shift_n > 0
    print(f"{alike} of {total} alike, {moved} of them moved")
    assert moved > total // 2
    assert alike > 0.8 * total
