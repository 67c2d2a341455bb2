"""Reused prefixes give the results of a fresh context, for llama.cpp's architectures.

Several texts grow in parallel, are edited, cut back, branched, repeated and left; some take each other's
slots, and some are restored from memory or from disk. The log-probability of every token is compared
with that of a context that has read nothing else.

To run thousands of requests by hand, for all architectures or for one:

    LOCALSPEC_REUSE_STEPS=5000 python -m pytest --timeout 0 -n 0 tests/engine/test_reuse.py -k gemma3
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.synthetic_heads import Architecture
from localspec.engine.cache.slot import OPENING_TOKENS, TargetMemory
from localspec.engine.cache.slots import SlotRequest, Slots
from localspec.engine.llama import Batch, Context, ContextSettings, Model, NoKvSlot
from localspec.protocol.frames import Failed, PairFiles, Sampling
from tests.support import architectures
from tests.support.architectures import N_VOCAB, WINDOW
from tests.support.exploration import SEED, count_examples
from tests.support.heads import contextual_heads
from tests.support.pairs import disturb
from tests.support.rescoring import assert_alike
from tests.support.running import PLAIN, Load, Running, drafting, running
from tests.support.stops import StopAfter

MIB = 1 << 20
STEPS = count_examples(12, "LOCALSPEC_REUSE_STEPS")  # answers of each architecture
# Passes of different widths round differently, by an amount that depends on the model and the machine. It
# is measured over a whole text, and the log-probabilities of an answer may not differ by more.
MARGIN = 2.0
CELLS = 512  # so few for three texts that cells outside a window are overwritten all the time

WINDOWED = "gemma2 gemma3 gemma3n gemma4 cohere2 olmo2 plamo3".split()
WINDOWED_EXPERTS = "gpt-oss mimo2 step35".split()
DENSE = "llama qwen2 qwen3 phi3 glm4 starcoder2 gpt2 mpt mistral3 exaone4".split()
# The windows of the last two are longer than these texts.
EXPERTS = "qwen3moe phimoe deepseek2 olmoe granitemoe llama4 smallthinker".split()
HYBRID = "qwen35 jamba falcon-h1 granitehybrid lfm2 nemotron_h plamo2".split()
HYBRID_EXPERTS = "qwen3next qwen35moe lfm2moe kimi-linear".split()
RECURRENT = "mamba mamba2 rwkv6 rwkv7".split()
WITH_EXPERTS = WINDOWED_EXPERTS + EXPERTS + HYBRID_EXPERTS
ALL = WINDOWED + WINDOWED_EXPERTS + DENSE + EXPERTS + HYBRID + HYBRID_EXPERTS + RECURRENT


def write_noisy_pair(architecture: str, models: Path) -> PairFiles:
    """Write a target, and as its draft a copy with 10 % noise."""
    experts = architecture in WITH_EXPERTS
    target = architectures.write(architecture, models, experts=experts)
    draft = target.with_suffix(".draft.gguf")
    if not draft.exists():
        shutil.copy(target, draft)
        disturb(draft, np.random.default_rng(1), 0.1)
    return PairFiles(architecture, str(target), str(draft))


class FreshContext:
    """A context that forgets everything between two texts."""

    def __init__(self, model: Model) -> None:
        sizes = ContextSettings(n_ctx=CELLS, n_batch=CELLS, n_seq=1, n_outputs=CELLS, n_threads=1)
        self._context = Context(model, sizes)
        self._batch = Batch(CELLS)

    def rounding(self) -> float:
        """Return how much the log-probabilities of a text differ between passes of different widths."""
        rng = random.Random(5)
        text = [rng.randrange(N_VOCAB - 8) for _ in range(300)]
        wide, narrow, single = (self._read(text, width) for width in (300, 7, 1))
        return float(max(np.abs(wide - narrow).max(), np.abs(wide - single).max()))

    def _read(self, text: list[int], width: int) -> npt.NDArray[np.float64]:
        """Return all log-probabilities, of shape (len(text), n_vocab), read in passes of `width` tokens."""
        self._context.clear()
        rows = []
        for start in range(0, len(text), width):
            self._batch.clear()
            for at, token in enumerate(text[start : start + width], start=start):
                self._batch.add(token, at, 0, True)
            self._context.decode(self._batch)
            views = map(self._context.logits, range(self._batch.rows))
            rows += [logits.astype(np.float64) for logits in views]
        table = np.array(rows)
        return table - np.logaddexp.reduce(table, axis=1, keepdims=True)

    def logprobs(self, text: list[int], last: int) -> list[float]:
        """Return the log-probabilities of the last `last` tokens of a text."""
        self._context.clear()
        self._batch.clear()
        first = len(text) - last - 1
        rows = [self._batch.add(t, at, 0, at >= first) for at, t in enumerate(text[:-1])]
        self._context.decode(self._batch)
        logprobs = []
        for at in range(first, len(text) - 1):
            logits = self._context.logits(rows[at]).astype(np.float64)
            logprobs.append(float(logits[text[at + 1]] - np.logaddexp.reduce(logits)))
        return logprobs

    def close(self) -> None:
        self._context.close()


class ConcurrentTexts:
    """Texts that grow in one engine, up to three at once."""

    def __init__(self, engine: Running, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.truth = FreshContext(engine.pair.shared.context.model)
        self.texts: list[list[int]] = []
        self.opening = self._words(90)
        self.running: dict[int, int] = {}  # request → length of its prompt
        self.worst = 0.0  # in units of the rounding error
        self.rounding = MARGIN * self.truth.rounding() + 1e-4
        self.answers = self.reused = 0

    def _words(self, most: int) -> list[int]:
        # Special tokens are left out: an answer may end, but its prompt looks like text.
        return [self.random.randrange(N_VOCAB - 8) for _ in range(self.random.randint(1, most))]

    def prompt(self) -> list[int]:
        """Return the next prompt."""
        rng = self.random
        choice = rng.random()
        if not self.texts or choice < 0.12:
            text = self._words(200)
        elif choice < 0.2:
            text = [*self.opening, *self._words(80)]
        else:
            text = list(rng.choice(self.texts[-6:]))
            if choice > 0.9:
                return text  # repeated
            if choice > 0.6:  # edited above, or cut back
                text = text[: rng.randint(1, len(text))]
            elif choice > 0.5:
                text = text[: max(len(text) - rng.randint(1, 12), 1)]
            text += self._words(40)
        return text[: CELLS // 2] if len(text) > CELLS // 2 else text

    def start(self) -> None:
        rng = self.random
        drafter = self.engine.pair.drafter
        kinds = drafting(3, drafter.kind if drafter else "draft"), drafting(5, "ngram")
        speculative = rng.choice([PLAIN, PLAIN, *kinds, drafting(None, "auto")])
        # Copies cost nothing compared with prefill, or the other way round.
        self.engine.pair.prefixes.copy_cost.prefill_ms = lambda: rng.choice([1e6, 1e6, 1e-9])
        prompt = self.prompt()
        request = self.engine.start(
            prompt,
            rng.randint(1, 12),
            speculative=speculative,
            top_logprobs=0,
            conversation=rng.choice([None, "a1", "b2", "c3"]),
        )
        self.running[request] = len(prompt)

    def step(self) -> None:
        """Start a request, cancel one, or run some rounds."""
        if len(self.running) < self.random.choice([1, 2, 3]):
            self.start()
        for _ in range(self.random.randint(1, 6)):
            if self.random.random() < 0.1:  # the next pass that can be is aborted midway
                self.engine.engine.interruption.stop = StopAfter(self.random.randrange(120))
            self.engine.engine.step()
        if self.running and self.random.random() < 0.05:
            self.engine.engine.cancel(next(iter(self.running)))
        self.collect()

    def collect(self) -> None:
        for request in list(self.running):
            answer = self.engine.answers[request]
            if answer.ending is not None:
                del self.running[request]
                self.check(request)

    def check(self, request: int) -> None:
        answer = self.engine.answers.pop(request)
        if isinstance(answer.ending, Failed) or answer.started is None or not answer.tokens:
            return  # cancelled, or there was no room beside the others
        text = answer.all_tokens
        self.texts.append(text)
        fresh = self.truth.logprobs(text, len(answer.tokens))
        self.answers += 1
        self.reused += answer.started.cached_tokens
        for entry, true in zip(answer.logprobs, fresh, strict=False):
            self.worst = max(self.worst, abs(entry.logprob - true) / self.rounding)

    def finish(self) -> None:
        self.engine.finish()
        self.collect()
        self.truth.close()


@contextmanager
def open_texts(
    files: PairFiles, states: Path, seed: int, **more: object
) -> Iterator[ConcurrentTexts]:
    """Open an engine with three slots, cells for fewer texts, and little memory for evicted ones."""
    # their states are larger
    recurrent = files.name.removesuffix("-contextual") in HYBRID + HYBRID_EXPERTS + RECURRENT
    settings = {
        "parallel": 3, "n_ctx": CELLS, "prefix_bytes": (16 if recurrent else 1) * MIB,
        "states_dir": str(states), "states_bytes": 1 << 30, **more,
    }  # fmt: skip
    with running(files, **settings) as engine:
        texts = ConcurrentTexts(engine, seed)
        yield texts
        texts.finish()


def measure_worst(files: PairFiles, states: Path, steps: int) -> float:
    with open_texts(files, states, SEED - 1) as texts:
        while texts.answers < steps:
            texts.step()
    assert texts.reused > 0
    return texts.worst


@pytest.fixture(autouse=True, scope="module")
def quick_profile() -> Iterator[None]:
    """Shorten the measurement of pass costs, which do not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localspec.engine.pair.profile.BUDGET_S", 0.01)
        yield


@pytest.mark.slow
@pytest.mark.explore
@pytest.mark.parametrize("architecture", ALL)
def test_reused_text_matches_a_fresh_context(
    architecture: str, models: Path, tmp_path: Path
) -> None:
    files = write_noisy_pair(architecture, models)
    assert measure_worst(files, tmp_path, STEPS) < 1


@pytest.mark.slow
@pytest.mark.explore
@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35"])
def test_reused_prefixes_with_heads_match_a_fresh_context(
    architecture: Architecture, models: Path, tmp_path: Path
) -> None:
    assert measure_worst(contextual_heads(models / "heads", architecture), tmp_path, STEPS) < 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*WINDOWED_EXPERTS, "gemma2", "gemma3", "plamo3"])
def test_reuse_of_an_overwritten_window_is_detected(
    architecture: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the positions that llama.cpp still holds are ignored."""
    monkeypatch.setattr(TargetMemory, "pin", lambda _self, _slot: None)
    monkeypatch.setattr(Model, "min_continuable_length", lambda _self, _first: 0)
    files = write_noisy_pair(architecture, models)
    assert measure_worst(files, tmp_path, max(STEPS, 60)) > 1


@pytest.fixture(scope="module")
def windowed(models: Path) -> PairFiles:
    """Write a pair with a window of 32 in every second layer."""
    return write_noisy_pair("gpt-oss", models)


def draw_tokens(seed: int, count: int) -> list[int]:
    """Return exactly `count` random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(N_VOCAB - 8) for _ in range(count)]


@pytest.mark.parametrize("pinned", [True, False])
def test_text_is_continued_only_where_its_window_is_intact(
    load: Load, windowed: PairFiles, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """Another text would take the oldest cells of an idle slot, although the slot counts them as read."""
    if not pinned:
        monkeypatch.setattr(TargetMemory, "pin", lambda _self, _slot: None)
    engine = load(windowed, parallel=2)
    context = engine.pair.shared.context
    for length, reused in ((200, 200), (120, 120), (60, 60 if pinned else 0)):
        engine.forget()
        engine.ask(draw_tokens(1, 100), 1)
        engine.ask(draw_tokens(2, 200), 1)
        # It takes the slot of the first text, and fifty cells of the second where they are not kept.
        engine.ask(draw_tokens(3, 150), 1)
        second_slot = next(slot for slot in engine.pair.shared.slots if slot.n_past == 200)
        first = context.first_position(second_slot.id)
        assert first == 0 if pinned else 60 - WINDOW < first <= 120 - WINDOW
        prompt = [*draw_tokens(2, 200)[:length], 7, 8]
        answer = engine.ask(prompt, 8)
        assert answer.done.timings.cache_n == reused
        anew = engine.ask(prompt, 8, cache_prompt=False).tokens
        assert_alike(windowed.target, prompt, answer.tokens, anew)


def test_idle_windows_are_kept_while_cells_last(load: Load, windowed: PairFiles) -> None:
    """Where a text was cut, llama.cpp looks for cells from there on, where those of another text follow."""
    engine, fresh = load(windowed, parallel=4, n_ctx=1024), load(windowed, parallel=1)
    texts = [draw_tokens(seed, 150) for seed in range(3)]
    for text in texts:
        engine.ask(text, 1)
    for turn in range(3):
        for at, text in enumerate(texts):
            changed = [*text[: 100 - 20 * turn], *draw_tokens(10 * turn + at, 60)]
            answer = engine.ask(changed, 4)
            assert answer.done.timings.cache_n == 100 - 20 * turn
            anew = fresh.ask(changed, 4, cache_prompt=False).tokens
            assert_alike(windowed.target, changed, answer.tokens, anew)


def test_exact_answers_with_a_window_stay_exact(load: Load, windowed: PairFiles) -> None:
    """A restored window occupies other cells, so its sums would run in a different order."""
    engine = load(windowed, parallel=1, n_ctx=1024, prefix_bytes=64 << 20)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    prompt = draw_tokens(1, 300)
    fresh = engine.ask(prompt, 24, exact=True, top_logprobs=0)
    branch = [*draw_tokens(1, 200), *draw_tokens(3, 100)]
    for other_prompt in (draw_tokens(2, 400), branch, draw_tokens(4, 20)):
        engine.ask(other_prompt, 4, exact=True)
        repeated = engine.ask(prompt, 24, exact=True, top_logprobs=0, speculative=drafting(3))
        assert repeated.tokens == fresh.tokens
        assert [t.logprob for t in repeated.logprobs] == [t.logprob for t in fresh.logprobs]


@pytest.mark.parametrize("architecture", ["qwen35", "falcon-h1", "mamba2", "lfm2"])
def test_uncuttable_state_returns_to_its_marks(architecture: str, load: Load, models: Path) -> None:
    """Templates drop the thoughts of an answer in the next turn, and users edit their messages."""
    files = write_noisy_pair(architecture, models)
    engine = load(files, parallel=1, prefix_bytes=64 << 20)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    fresh = load(files, parallel=1)

    def count_read_tokens(prompt: list[int]) -> int:
        answer = engine.ask(prompt, 8)
        assert answer.tokens == fresh.ask(prompt, 8, cache_prompt=False).tokens
        return answer.done.timings.prompt_n

    question = draw_tokens(1, 150)
    endless = Sampling(temperature=0.0, ignore_eos=True)
    thoughtful = engine.ask(question, 90, endless).all_tokens
    # The answer without its thoughts, and the next question.
    second_prompt = [*question[:-1], *draw_tokens(2, 30)]
    assert count_read_tokens(second_prompt) == OPENING_TOKENS - 1 + 30
    third_prompt = [*second_prompt, *draw_tokens(3, 120)]
    assert count_read_tokens(third_prompt) <= OPENING_TOKENS + 150
    assert count_read_tokens([*second_prompt, *draw_tokens(4, 120)]) <= OPENING_TOKENS + 150
    assert count_read_tokens(draw_tokens(5, 100)) == 100
    # Restored from memory, but not to its end.
    assert count_read_tokens([*third_prompt[:-1], 9]) <= OPENING_TOKENS
    assert count_read_tokens([*thoughtful, 3]) == 2


def test_evicted_window_is_restored_at_the_start_of_a_turn(load: Load, windowed: PairFiles) -> None:
    """Its copy holds the last window only, which also applies to the text of a busy slot."""
    engine = load(windowed, parallel=2, n_ctx=1024, prefix_bytes=64 * MIB)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    fresh = load(windowed, parallel=1)
    endless = Sampling(temperature=0.0, ignore_eos=True)
    question = draw_tokens(1, 150)
    thoughtful = engine.ask(question, 90, endless).all_tokens
    for seed in (2, 3, 4):
        engine.ask(draw_tokens(seed, 100), 1)
    busy = engine.start([*thoughtful, 3], 40, endless)
    engine.engine.step()
    branch = [*question[:-1], *draw_tokens(5, 30)]
    second = engine.start(branch, 8, endless)
    engine.finish()
    for request, prompt, count, n_read in (
        (busy, [*thoughtful, 3], 40, 2),
        (second, branch, 8, OPENING_TOKENS - 1 + 30),
    ):
        answer = engine.answers[request]
        assert answer.done.timings.prompt_n == n_read
        assert answer.tokens == fresh.ask(prompt, count, endless, cache_prompt=False).tokens


@pytest.mark.parametrize("names", [("llama", "gpt-oss"), ("gpt-oss", "gemma3")])
def test_both_hold_the_windows_of_reused_text(names: tuple[str, str], models: Path) -> None:
    """Target or draft have a window, and the texts of three slots share few cells."""
    sizes = ContextSettings(n_ctx=CELLS, n_batch=CELLS, n_seq=3, n_outputs=3, n_threads=1)
    with ExitStack() as stack:
        paths = [write_noisy_pair(name, models).target for name in names]
        loaded = [stack.enter_context(Model(path)) for path in paths]
        target, draft = (stack.enter_context(Context(model, sizes)) for model in loaded)
        slots, batch, rng = Slots(target, draft, 0, 3), Batch(CELLS), random.Random(3)
        texts, reused = [draw_tokens(0, 120)], 0
        for _ in range(120):
            base = rng.choice(texts[-4:])
            kept = base[: rng.randint(1, len(base))]
            prompt = [*kept, *draw_tokens(rng.randrange(999), 40)][:170]
            slot = slots.acquire(SlotRequest(prompt))
            reused += slot.n_past_draft
            for context, length in ((target, slot.n_past), (draft, slot.n_past_draft)):
                first, window = context.first_position(slot.id), context.model.n_swa
                assert context.length(slot.id) == length
                assert first <= (max(length - window + 1, 0) if window else 0)
                batch.clear()
                for at in range(length, len(prompt) - 1):
                    batch.add(prompt[at], at, slot.id, False)
                while batch.rows:
                    try:
                        context.decode(batch)
                        break
                    except NoKvSlot:
                        assert slots.evict()
            slot.n_past = slot.n_past_draft = len(prompt) - 1
            slots.release(slot)
            texts.append(prompt)
        assert reused > 0


def test_min_continuable_length_follows_the_window(models: Path) -> None:
    for architecture, first, least in (
        ("gpt-oss", -1, 0),
        ("gpt-oss", 0, 0),
        ("gpt-oss", 1, WINDOW),  # the token there attends to itself and the 31 before it
        ("gpt-oss", 50, 50 + WINDOW - 1),
        ("llama4", 1, 8192),  # in chunks: the first token of a chunk attends to none before it
        ("llama4", 8192, 8192),
        ("llama4", 8193, 2 * 8192),
    ):
        with Model(write_noisy_pair(architecture, models).target) as model:
            assert model.min_continuable_length(first) == least
