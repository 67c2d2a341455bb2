"""What is reused is what a fresh context would have read: over llama.cpp's architectures.

Several texts grow side by side, are edited above, gone back to, branched, asked again and left; some
take each other's slots, some come back from memory or from the disk. Every token's log-probability is
held against a context that has read nothing else.

By hand with thousands of requests, of each architecture or of some:

    LOCALSPEC_REUSE_STEPS=5000 python -m pytest --timeout 0 -n 0 tests/engine/test_reuse.py -k gemma3
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.synthetic_heads import Architecture
from localspec.engine.cache.slot import OPENING_TOKENS
from localspec.engine.cache.slots import SlotRequest, Slots
from localspec.engine.llama import Batch, Context, ContextSettings, Model, NoKvSlot
from localspec.protocol.frames import Failed, PairFiles, Sampling
from tests.support import architectures
from tests.support.architectures import N_VOCAB, WINDOW
from tests.support.heads import contextual_heads
from tests.support.pairs import disturb
from tests.support.rescoring import assert_alike
from tests.support.running import PLAIN, Running, drafting, running
from tests.support.stops import StopAfter

MIB = 1 << 20
STEPS = int(os.environ.get("LOCALSPEC_REUSE_STEPS", "20"))
# Passes of other widths round otherwise, and how much that moves log-probabilities hangs on the model
# and the machine: it is measured over all of a text's, and the few of an answer may not go further.
MARGIN = 2.0
CELLS = 512  # so few for three texts at once that what left a window is overwritten all the time

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


def pair_of(architecture: str, models: Path) -> PairFiles:
    """A target and, as its draft, the same with a tenth of noise."""
    experts = architecture in WITH_EXPERTS
    target = architectures.write(architecture, models, experts=experts)
    draft = target.with_suffix(".draft.gguf")
    if not draft.exists():
        shutil.copy(target, draft)
        disturb(draft, np.random.default_rng(1), 0.1)
    return PairFiles(architecture, str(target), str(draft))


class Truth:
    """A context that forgets everything between two texts."""

    def __init__(self, model: Model) -> None:
        settings = ContextSettings(
            n_ctx=CELLS, n_batch=CELLS, n_seq=1, n_outputs=CELLS, n_threads=1
        )
        self._context = Context(model, settings)
        self._batch = Batch(CELLS)

    def rounding(self) -> float:
        """By how much log-probabilities of one text differ between passes of different widths."""
        dice = random.Random(5)
        text = [dice.randrange(N_VOCAB - 8) for _ in range(300)]
        wide, narrow, single = (self._read(text, width) for width in (300, 7, 1))
        return float(max(np.abs(wide - narrow).max(), np.abs(wide - single).max()))

    def _read(self, text: list[int], width: int) -> npt.NDArray[np.float64]:
        """(len(text), n_vocab): all log-probabilities, read so many tokens a pass."""
        self._context.clear()
        rows = []
        for start in range(0, len(text), width):
            self._batch.clear()
            for at, token in enumerate(text[start : start + width], start=start):
                self._batch.add(token, at, 0, True)
            self._context.decode(self._batch)
            rows += [
                self._context.logits(row).astype(np.float64) for row in range(self._batch.rows)
            ]
        table = np.array(rows)
        return table - np.logaddexp.reduce(table, axis=1, keepdims=True)

    def logprobs(self, text: list[int], last: int) -> list[float]:
        """Of the last so many tokens of a text."""
        self._context.clear()
        self._batch.clear()
        first = len(text) - last - 1
        rows = [self._batch.add(t, at, 0, at >= first) for at, t in enumerate(text[:-1])]
        self._context.decode(self._batch)
        return [self._logprob(rows[at], text[at + 1]) for at in range(first, len(text) - 1)]

    def _logprob(self, row: int, token: int) -> float:
        logits = self._context.logits(row).astype(np.float64)
        return float(logits[token] - np.logaddexp.reduce(logits))

    def close(self) -> None:
        self._context.close()


class Company:
    """Texts that grow in one engine, up to three at once."""

    def __init__(self, engine: Running, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.truth = Truth(engine.pair.shared.context.model)
        self.texts: list[list[int]] = []
        self.opening = self._words(90)
        self.running: dict[int, int] = {}  # request → how long its prompt is
        self.worst = 0.0  # in units of what rounding does
        self.rounding = MARGIN * self.truth.rounding() + 1e-4
        self.answers = self.reused = 0

    def _words(self, most: int) -> list[int]:
        # No special token among them: an answer may end, but its prompt looks like text.
        return [self.random.randrange(N_VOCAB - 8) for _ in range(self.random.randint(1, most))]

    def prompt(self) -> list[int]:
        """What somebody sends next."""
        dice = self.random
        what = dice.random()
        if not self.texts or what < 0.12:
            text = self._words(200)
        elif what < 0.2:
            text = [*self.opening, *self._words(80)]
        else:
            text = list(dice.choice(self.texts[-6:]))
            if what > 0.9:
                return text  # asked again
            if what > 0.6:  # edited above, or gone back to
                text = text[: dice.randint(1, len(text))]
            elif what > 0.5:
                text = text[: max(len(text) - dice.randint(1, 12), 1)]
            text += self._words(40)
        return text[: CELLS // 2] if len(text) > CELLS // 2 else text

    def start(self) -> None:
        dice = self.random
        drafter = self.engine.pair.drafter
        kinds = drafting(3, drafter.kind if drafter else "draft"), drafting(5, "ngram")
        speculative = dice.choice([PLAIN, PLAIN, *kinds, drafting(None, "auto")])
        # Copies cost nothing beside reading, or the other way round.
        self.engine.pair.prefixes.copy_cost.prefill_ms = lambda: dice.choice([1e6, 1e6, 1e-9])
        prompt = self.prompt()
        request = self.engine.start(
            prompt,
            dice.randint(1, 12),
            speculative=speculative,
            top_logprobs=0,
            conversation=dice.choice([None, "a1", "b2", "c3"]),
        )
        self.running[request] = len(prompt)

    def step(self) -> None:
        """Somebody starts, gives up, or all go on."""
        if len(self.running) < self.random.choice([1, 2, 3]):
            self.start()
        for _ in range(self.random.randint(1, 6)):
            if self.random.random() < 0.1:  # the next pass that may be is ended on its way
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
            return  # cancelled, or no room for it beside the others
        text = answer.all_tokens
        self.texts.append(text)
        shown = answer.logprobs
        tokens = len(answer.tokens)
        fresh = self.truth.logprobs(text, tokens)
        self.answers += 1
        self.reused += answer.started.cached_tokens
        for entry, true in zip(shown, fresh, strict=False):
            self.worst = max(self.worst, abs(entry.logprob - true) / self.rounding)

    def finish(self) -> None:
        self.engine.finish()
        self.collect()
        self.truth.close()


@contextmanager
def company(files: PairFiles, states: Path, seed: int, **more: object) -> Iterator[Company]:
    """Three slots, cells for fewer texts than that, and little memory for those without a slot."""
    # their states are larger
    recurrent = files.name.removesuffix("-contextual") in HYBRID + HYBRID_EXPERTS + RECURRENT
    settings = {
        "parallel": 3, "n_ctx": CELLS, "prefix_bytes": (16 if recurrent else 1) * MIB,
        "states_dir": str(states), "states_bytes": 1 << 30, **more,
    }  # fmt: skip
    with running(files, **settings) as engine:
        made = Company(engine, seed)
        yield made
        made.finish()


def worst_of(files: PairFiles, states: Path, steps: int, seed: int = 0) -> float:
    with company(files, states, seed) as texts:
        while texts.answers < steps:
            texts.step()
    assert texts.reused > 0
    return texts.worst


@pytest.fixture(autouse=True, scope="module")
def quick_profile() -> Iterator[None]:
    """What passes cost is not what these tests ask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localspec.engine.pair.profile.BUDGET_S", 0.01)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ALL)
def test_what_is_reused_is_what_a_fresh_context_would_have_read(
    architecture: str, models: Path, tmp_path: Path
) -> None:
    files = pair_of(architecture, models)
    assert worst_of(files, tmp_path, STEPS) < 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35"])
def test_what_is_reused_beside_heads_is_what_a_fresh_context_would_have_read(
    architecture: Architecture, models: Path, tmp_path: Path
) -> None:
    assert worst_of(contextual_heads(models / "heads", architecture), tmp_path, STEPS) < 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*WINDOWED_EXPERTS, "gemma2", "gemma3", "plamo3"])
def test_a_window_taken_for_whole_would_be_noticed(
    architecture: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above, were llama.cpp not asked what it still holds."""
    monkeypatch.setattr(Model, "min_continuable_length", lambda _self, _first: 0)
    files = pair_of(architecture, models)
    assert worst_of(files, tmp_path, max(STEPS, 60)) > 1


@pytest.fixture(scope="module")
def windowed(models: Path) -> PairFiles:
    """A window of 32, in every second layer."""
    return pair_of("gpt-oss", models)


def words(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(N_VOCAB - 8) for _ in range(count)]


def test_a_text_whose_beginning_was_overwritten_is_gone_on_from_only_where_its_window_is_there(
    load: Callable[..., Running], windowed: PairFiles
) -> None:
    """The oldest cells of an idle slot go to another text, though the slot counts its tokens as read."""
    engine = load(windowed, parallel=2)
    context = engine.pair.shared.context
    for length, reused in ((200, 200), (120, 120), (60, 0)):
        engine.forget()
        engine.ask(words(1, 100), 1)
        engine.ask(words(2, 200), 1)
        engine.ask(words(3, 150), 1)  # in the place of the first, and fifty cells of the second
        first = next(
            context.first_position(s.id) for s in engine.pair.shared.slots if s.n_past == 200
        )
        assert 60 - WINDOW < first <= 120 - WINDOW
        prompt = [*words(2, 200)[:length], 7, 8]
        answer = engine.ask(prompt, 8)
        assert answer.done.timings.cache_n == reused
        anew = engine.ask(prompt, 8, cache_prompt=False).tokens
        assert_alike(windowed.target, prompt, answer.tokens, anew)


def test_exact_answers_of_a_window_are_exact_after_other_texts(
    load: Callable[..., Running], windowed: PairFiles
) -> None:
    """A window put back from memory lies in other cells, and its sums would have another order."""
    engine = load(windowed, parallel=1, n_ctx=1024, prefix_bytes=64 << 20)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    prompt = words(1, 300)
    fresh = engine.ask(prompt, 24, exact=True, top_logprobs=0)
    for other in (words(2, 400), [*words(1, 200), *words(3, 100)], words(4, 20)):
        engine.ask(other, 4, exact=True)
        again = engine.ask(prompt, 24, exact=True, top_logprobs=0, speculative=drafting(3))
        assert again.tokens == fresh.tokens
        assert [t.logprob for t in again.logprobs] == [t.logprob for t in fresh.logprobs]


@pytest.mark.parametrize("architecture", ["qwen35", "falcon-h1", "mamba2", "lfm2"])
def test_a_state_that_cannot_be_cut_is_gone_back_to_where_it_was_noted(
    architecture: str, load: Callable[..., Running], models: Path
) -> None:
    """Templates drop an answer's thoughts in the next turn, and people edit what they said."""
    files = pair_of(architecture, models)
    engine = load(files, parallel=1, prefix_bytes=64 << 20)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    fresh = load(files, parallel=1)

    def read(prompt: list[int]) -> int:
        answer = engine.ask(prompt, 8)
        assert answer.tokens == fresh.ask(prompt, 8, cache_prompt=False).tokens
        return answer.done.timings.prompt_n

    question = words(1, 150)
    endless = Sampling(temperature=0.0, ignore_eos=True)
    thoughtful = engine.ask(question, 90, endless).all_tokens
    second = [*question[:-1], *words(2, 30)]  # the answer without its thoughts, the next question
    assert read(second) == OPENING_TOKENS - 1 + 30
    third = [*second, *words(3, 120)]
    assert read(third) <= OPENING_TOKENS + 150
    assert read([*second, *words(4, 120)]) <= OPENING_TOKENS + 150
    assert read(words(5, 100)) == 100
    assert read([*third[:-1], 9]) <= OPENING_TOKENS  # back from memory, and not to its end
    assert read([*thoughtful, 3]) == 2


def test_a_window_that_left_its_slot_is_gone_back_to_where_a_turn_began(
    load: Callable[..., Running], windowed: PairFiles
) -> None:
    """Its copy holds the last window only; also where another slot has it, and is busy."""
    engine = load(windowed, parallel=2, n_ctx=1024, prefix_bytes=64 * MIB)
    engine.pair.prefixes.copy_cost.prefill_ms = lambda: 1e6
    fresh = load(windowed, parallel=1)
    endless = Sampling(temperature=0.0, ignore_eos=True)
    question = words(1, 150)
    thoughtful = engine.ask(question, 90, endless).all_tokens
    for other in (2, 3, 4):
        engine.ask(words(other, 100), 1)
    busy = engine.start([*thoughtful, 3], 40, endless)
    engine.engine.step()
    branch = [*question[:-1], *words(5, 30)]
    second = engine.start(branch, 8, endless)
    engine.finish()
    for request, prompt, count, read in (
        (busy, [*thoughtful, 3], 40, 2),
        (second, branch, 8, OPENING_TOKENS - 1 + 30),
    ):
        answer = engine.answers[request]
        assert answer.done.timings.prompt_n == read
        assert answer.tokens == fresh.ask(prompt, count, endless, cache_prompt=False).tokens


@pytest.mark.parametrize("names", [("llama", "gpt-oss"), ("gpt-oss", "gemma3")])
def test_both_memories_hold_the_windows_of_what_is_gone_on_from(
    names: tuple[str, str], models: Path
) -> None:
    """Of target and draft, whichever has one; cells are few, and texts of three slots share them."""
    sizes = ContextSettings(n_ctx=CELLS, n_batch=CELLS, n_seq=3, n_outputs=3, n_threads=1)
    with ExitStack() as stack:
        loaded = [stack.enter_context(Model(pair_of(name, models).target)) for name in names]
        target, draft = (stack.enter_context(Context(model, sizes)) for model in loaded)
        slots, batch, dice = Slots(target, draft, 0, 3), Batch(CELLS), random.Random(3)
        texts, reused = [words(0, 120)], 0
        for _ in range(120):
            base = dice.choice(texts[-4:])
            prompt = [*base[: dice.randint(1, len(base))], *words(dice.randrange(999), 40)][:170]
            slot = slots.acquire(SlotRequest(prompt))
            reused += slot.n_past_draft
            for context, held in ((target, slot.n_past), (draft, slot.n_past_draft)):
                first, window = context.first_position(slot.id), context.model.n_swa
                assert context.length(slot.id) == held
                assert first <= (max(held - window + 1, 0) if window else 0)
                batch.clear()
                for at in range(held, len(prompt) - 1):
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


def test_how_far_a_text_can_be_cut_is_how_far_back_its_next_token_sees(models: Path) -> None:
    for architecture, first, least in (
        ("gpt-oss", -1, 0),
        ("gpt-oss", 0, 0),
        ("gpt-oss", 1, WINDOW),  # the token there sees itself and those before it, 32 together
        ("gpt-oss", 50, 50 + WINDOW - 1),
        ("llama4", 1, 8192),  # in chunks: the first token of one sees none before it
        ("llama4", 8192, 8192),
        ("llama4", 8193, 2 * 8192),
    ):
        with Model(pair_of(architecture, models).target) as model:
            assert model.min_continuable_length(first) == least
