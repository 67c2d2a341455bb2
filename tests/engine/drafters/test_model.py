"""The draft model: what it proposes follows from the text alone, whatever it drafted before."""

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
)
from localspec.protocol.frames import PairFiles
from tests.support.pairs import contextual_pair
from tests.support.recurrent import lfm2_pair
from tests.support.running import Running

Load = Callable[..., Running]
TEXT = [300, 17, 402, 255, 31, 340, 18, 77]


class Drafting:
    """A loaded pair's draft model and one slot."""

    def __init__(self, engine: Running) -> None:
        assert engine.pair.drafter is not None
        self.model: DraftModel = engine.pair.drafter
        self._slots: Slots = engine.pair.shared.slots
        self.slot: Slot = next(iter(self._slots))

    def propose(self, count: int, sampler: Sampler | None = None) -> DraftRequest:
        ask = DraftRequest(self.slot, count, sampler, lambda a: len(a.tokens) < count)
        self.model.propose([ask])
        return ask

    def fresh(self, text: Sequence[int], count: int) -> list[int]:
        self._slots.clear(self.slot)
        self.slot.tokens = list(text)
        return self.propose(count).tokens

    def verified(self, accepted: Sequence[int], correction: int) -> None:
        """The target kept these drafts and added a token of its own."""
        length = len(self.slot.tokens) + len(accepted)
        self.slot.tokens = [*self.slot.tokens, *accepted, correction]
        self._slots.roll_back_draft(self.slot, min(self.slot.n_past_draft, length))


@pytest.fixture(params=["attention", "hybrid"])
def drafting(request: pytest.FixtureRequest, models: Path, load: Load) -> Drafting:
    """A draft of each kind of memory beside the same target."""
    files = contextual_pair(models / "contextual")
    if request.param == "hybrid":
        files = PairFiles("mixed", files.target, lfm2_pair(models / "lfm2").draft)
    return Drafting(load(files))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_after_any_rejection_the_drafts_are_those_of_the_text(
    drafting: Drafting, accepted: int
) -> None:
    first = drafting.fresh(TEXT, 4)
    for correction in (5, 6, 7):
        drafting.verified(first[:accepted], correction)
        text = list(drafting.slot.tokens)
        again = drafting.propose(4).tokens
        state = drafting.slot.n_past_draft
        assert again == drafting.fresh(text, 4)
        assert drafting.slot.n_past_draft == state
        first = again


def test_what_was_drafted_and_accepted_is_not_read_again(models: Path, load: Load) -> None:
    drafting = Drafting(load(contextual_pair(models / "contextual")))
    first = drafting.fresh(TEXT, 4)
    drafting.verified(first[:3], 5)
    assert drafting.model.count_unread(drafting.slot) == 1
    drafting.propose(2)
    drafting.verified([], 6)
    assert drafting.model.count_unread(drafting.slot) == 1


def test_text_written_without_drafts_is_read_before_the_next(drafting: Drafting) -> None:
    drafting.fresh(TEXT, 3)
    drafting.verified([], 5)
    long = [*drafting.slot.tokens, *range(100, 160)]
    drafting.slot.tokens = long
    assert drafting.propose(3).tokens == drafting.fresh(long, 3)


def test_a_long_text_is_read_in_as_many_rounds_as_others_can_wait_for(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the drafts are those of one that read it at once."""
    text = [*TEXT, *range(100, 200)]
    truth = drafting.fresh(text, 3)
    monkeypatch.setattr(DraftModel, "token_prefill_ms", property(lambda _self: 10.0))
    assert drafting.fresh(text, 3) == []
    reads = [drafting.slot.n_past_draft]
    while not (drafts := drafting.propose(3).tokens):
        reads.append(drafting.slot.n_past_draft)
    assert reads == [25, 50, 75]
    assert drafts == truth


@pytest.mark.parametrize("right", [True, False])
def test_a_look_at_a_text_compares_its_end_with_what_would_have_been_drafted(
    drafting: Drafting, right: bool
) -> None:
    text = list(TEXT)
    for _ in range(PROBE_ROWS):
        text += drafting.fresh(text, 1)
    if not right:
        text[-PROBE_ROWS:] = [(token + 1) % 64 for token in text[-PROBE_ROWS:]]
    drafting.fresh(TEXT, 2)
    before = drafting.slot.n_past_draft
    belief = Belief(Calibration())
    mean = belief.mean
    drafting.model.probe(Slot(0, 0, text), belief)
    assert belief.mean > mean if right else belief.mean < mean
    assert belief.calibration.count.sum() == PROBE_ROWS
    assert drafting.slot.n_past_draft == before


def test_a_look_costs_the_same_however_long_the_text_and_leaves_nothing_behind(
    models: Path, load: Load
) -> None:
    engine = load(contextual_pair(models / "contextual"))
    drafting = Drafting(engine)
    context = drafting.model.context
    for length in (2, 9, 40, 400):
        belief = Belief(Calibration())
        rows = drafting.model._batch
        drafting.model.probe(Slot(0, 0, list(range(100, 100 + length))), belief)
        assert rows.rows <= PROBE_CONTEXT_TOKENS + PROBE_ROWS
        assert belief.calibration.count.sum() == min(PROBE_ROWS, length - 1)
        assert context.length(drafting.model._scratch) == 0


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from(
    drafting: Drafting,
) -> None:
    settings = Settings(temperature=1.0, top_k=8, seed=3)
    drafting.fresh(TEXT, 1)
    drafting.verified([], 5)
    ask = drafting.propose(5, Sampler(settings))
    assert len(ask.probs) == len(ask.tokens) == len(ask.buckets) == 5
    for token, probs in zip(ask.tokens, ask.probs, strict=True):
        assert probs.probability_of(token) > 0
        assert float(np.sum(probs.probs)) == pytest.approx(1.0)


def test_several_slots_draft_together_as_each_alone(models: Path, load: Load) -> None:
    engine = load(contextual_pair(models / "contextual"))
    drafting = Drafting(engine)
    texts = [[*range(start, start + 6 + start % 7)] for start in (10, 55, 200)]
    alone = [drafting.fresh(text, 4 + i) for i, text in enumerate(texts)]
    asks = []
    for i, (slot, text) in enumerate(zip(engine.pair.shared.slots, texts, strict=False)):
        engine.pair.shared.slots.clear(slot)
        slot.tokens = text
        asks.append(DraftRequest(slot, 0, None, lambda a, most=4 + i: len(a.tokens) < most))  # type: ignore[misc]
    drafting.model.propose(asks)
    assert [ask.tokens for ask in asks] == alone


def test_a_draft_that_wants_nothing_gets_nothing(drafting: Drafting) -> None:
    drafting.fresh(TEXT, 2)
    before = drafting.slot.n_past_draft
    assert drafting.propose(0).tokens == []
    assert drafting.slot.n_past_draft == before
