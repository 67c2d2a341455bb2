"""The proposals of a draft model depend on the text alone, whatever it drafted before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from localspec.engine.cache.slot import Slot
from localspec.engine.cache.slots import Slots
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.draft_model import (
    PROBE_CONTEXT_TOKENS,
    PROBE_ROWS,
    DraftModel,
    probability,
)
from localspec.protocol.frames import PairFiles
from tests.support.pairs import contextual_pair
from tests.support.recurrent import lfm2_pair
from tests.support.running import Running

Load = Callable[..., Running]
TEXT = [300, 17, 402, 255, 31, 340, 18, 77]


class DraftHarness:
    """The draft model of a loaded pair, and a slot."""

    def __init__(self, engine: Running) -> None:
        assert engine.pair.drafter is not None
        self.model: DraftModel = engine.pair.drafter
        self._slots: Slots = engine.pair.shared.slots
        self.slot: Slot = next(iter(self._slots))

    def propose(
        self, count: int, sampler: Sampler | None = None, *, reject: bool = False
    ) -> DraftRequest:
        request = DraftRequest(self.slot, count, sampler, reject, lambda a: len(a.tokens) < count)
        self.model.propose([request])
        return request

    def draft_anew(self, text: Sequence[int], count: int) -> list[int]:
        self._slots.clear(self.slot)
        self.slot.tokens = list(text)
        return self.propose(count).tokens

    def accept(self, accepted: Sequence[int], correction: int) -> None:
        """Accept these drafts and append the target's correction."""
        length = len(self.slot.tokens) + len(accepted)
        self.slot.tokens = [*self.slot.tokens, *accepted, correction]
        self._slots.roll_back_draft(self.slot, min(self.slot.n_past_draft, length))


@pytest.fixture(params=["attention", "hybrid"])
def drafting(request: pytest.FixtureRequest, models: Path, load: Load) -> DraftHarness:
    """Load a draft with each kind of memory beside the same target."""
    files = contextual_pair(models / "contextual")
    if request.param == "hybrid":
        files = PairFiles("mixed", files.target, lfm2_pair(models / "lfm2").draft)
    return DraftHarness(load(files))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_drafts_after_a_rejection_depend_on_the_text_alone(
    drafting: DraftHarness, accepted: int
) -> None:
    drafts = drafting.draft_anew(TEXT, 4)
    for correction in (5, 6, 7):
        drafting.accept(drafts[:accepted], correction)
        text = list(drafting.slot.tokens)
        next_drafts = drafting.propose(4).tokens
        state = drafting.slot.n_past_draft
        assert next_drafts == drafting.draft_anew(text, 4)
        assert drafting.slot.n_past_draft == state
        drafts = next_drafts


def test_accepted_drafts_are_not_read_again(models: Path, load: Load) -> None:
    drafting = DraftHarness(load(contextual_pair(models / "contextual")))
    drafts = drafting.draft_anew(TEXT, 4)
    drafting.accept(drafts[:3], 5)
    assert drafting.model.count_unread(drafting.slot) == 1
    drafting.propose(2)
    drafting.accept([], 6)
    assert drafting.model.count_unread(drafting.slot) == 1


def test_text_generated_without_drafts_is_read_before_drafting(drafting: DraftHarness) -> None:
    drafting.draft_anew(TEXT, 3)
    drafting.accept([], 5)
    long = [*drafting.slot.tokens, *range(100, 160)]
    drafting.slot.tokens = long
    assert drafting.propose(3).tokens == drafting.draft_anew(long, 3)


def test_long_text_is_read_in_several_rounds(
    drafting: DraftHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts are then those after reading it at once."""
    text = [*TEXT, *range(100, 200)]
    truth = drafting.draft_anew(text, 3)
    monkeypatch.setattr(DraftModel, "token_prefill_ms", property(lambda _self: 10.0))
    assert drafting.draft_anew(text, 3) == []
    reads = [drafting.slot.n_past_draft]
    while not (drafts := drafting.propose(3).tokens):
        reads.append(drafting.slot.n_past_draft)
    assert reads == [25, 50, 75]
    assert drafts == truth


@pytest.mark.parametrize("right", [True, False])
def test_probe_compares_the_end_of_a_text_with_its_drafts(
    drafting: DraftHarness, right: bool
) -> None:
    text = list(TEXT)
    for _ in range(PROBE_ROWS):
        text += drafting.draft_anew(text, 1)
    if not right:
        text[-PROBE_ROWS:] = [(token + 1) % 64 for token in text[-PROBE_ROWS:]]
    drafting.draft_anew(TEXT, 2)
    n_past_draft = drafting.slot.n_past_draft
    belief = Belief(Calibration())
    mean = belief.mean
    drafting.model.probe(Slot(0, 0, text), belief)
    assert belief.mean > mean if right else belief.mean < mean
    assert belief.calibration.count.sum() == PROBE_ROWS
    assert drafting.slot.n_past_draft == n_past_draft


def test_probe_has_a_constant_cost_and_leaves_nothing_behind(models: Path, load: Load) -> None:
    engine = load(contextual_pair(models / "contextual"))
    drafting = DraftHarness(engine)
    context = drafting.model.context
    for length in (2, 9, 40, 400):
        belief = Belief(Calibration())
        rows = drafting.model._batch
        drafting.model.probe(Slot(0, 0, list(range(100, 100 + length))), belief)
        assert rows.rows <= PROBE_CONTEXT_TOKENS + PROBE_ROWS
        assert belief.calibration.count.sum() == min(PROBE_ROWS, length - 1)
        assert context.length(drafting.model._scratch) == 0


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(
    drafting: DraftHarness,
) -> None:
    settings = Settings(temperature=1.0, top_k=8, seed=3)
    drafting.draft_anew(TEXT, 1)
    drafting.accept([], 5)
    request = drafting.propose(5, Sampler(settings), reject=True)
    assert len(request.probs) == len(request.tokens) == len(request.buckets) == 5
    for token, probs in zip(request.tokens, request.probs, strict=True):
        assert probs.probability_of(token) > 0
        assert float(np.sum(probs.probs)) == pytest.approx(1.0)


def test_drafts_to_be_matched_are_drawn_as_the_targets_tokens_are(drafting: DraftHarness) -> None:
    """A target with the draft's own logits would keep them all."""
    settings = Settings(temperature=1.0, top_k=8, seed=3)
    drafting.draft_anew(TEXT, 1)
    drafting.accept([], 5)
    matched = drafting.propose(5, Sampler(settings))
    drafting.draft_anew(TEXT, 1)
    drafting.accept([], 5)
    drawn = drafting.propose(5, Sampler(settings), reject=True)
    assert matched.probs == []
    for place, (token, probs) in enumerate(zip(matched.tokens, drawn.probs, strict=True)):
        assert token == Sampler(settings).draw(probs, place)
        if drawn.tokens[place] != token:
            break  # the texts differ from here on


def test_several_slots_draft_together_as_each_alone(models: Path, load: Load) -> None:
    engine = load(contextual_pair(models / "contextual"))
    drafting = DraftHarness(engine)
    texts = [[*range(start, start + 6 + start % 7)] for start in (10, 55, 200)]
    alone = [drafting.draft_anew(text, 4 + i) for i, text in enumerate(texts)]
    requests = []
    for i, (slot, text) in enumerate(zip(engine.pair.shared.slots, texts, strict=False)):
        engine.pair.shared.slots.clear(slot)
        slot.tokens = text
        requests.append(DraftRequest(slot, 0, more=lambda a, most=4 + i: len(a.tokens) < most))  # type: ignore[misc]
    drafting.model.propose(requests)
    assert [request.tokens for request in requests] == alone


def test_request_for_no_drafts_gets_none(drafting: DraftHarness) -> None:
    drafting.draft_anew(TEXT, 2)
    n_past_draft = drafting.slot.n_past_draft
    assert drafting.propose(0).tokens == []
    assert drafting.slot.n_past_draft == n_past_draft


@pytest.mark.parametrize("size", [7, 400, 4097, 32_000, 151_936])
@pytest.mark.parametrize("seed", range(3))
def test_the_confidence_of_a_row_is_nearly_its_softmax(size: int, seed: int) -> None:
    """Rows are flat, as of a doubtful model, or have some tokens far above all others."""
    rng = np.random.default_rng(seed)
    for spread, lead in ((0.0, 0.0), (1.0, 3.0), (2.5, 10.0), (2.5, 14.0), (3.0, 25.0)):
        row = rng.normal(0, spread, size).astype(np.float32)
        likely = rng.choice(size, min(20, size), replace=False)
        row[likely] = lead - rng.exponential(2.0, len(likely)) * (spread > 0)
        row[rng.choice(size, size // 10, replace=False)] = -np.inf
        token = int(row.argmax())
        share = 1 / float(np.exp(row.astype(np.float64) - row[token]).sum())
        assert probability(row, token) == pytest.approx(share, rel=0.1, abs=1e-3), (spread, lead)
