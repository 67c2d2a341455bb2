"""A kind of drafts is a class that the engine discovers, uses, calibrates and reports by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.texts.replay import COSTS
from localspec.engine.cache.slot import Slot
from localspec.engine.speculation.acceptance import GRID, Belief, Calibration
from localspec.engine.speculation.budget import INITIAL_KNOWN_ROUNDS, KNOWN_REFILL_ROUNDS
from localspec.engine.speculation.controller import Controller
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import Candidate, PassCosts
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.step import Drafting, SequenceStep
from localspec.protocol.frames import PairFiles, Sampling, SpeculationSettings
from tests.support.rescoring import NEAR_TIE, worst_gap
from tests.support.running import GREEDY, Running, drafting, skip_on

Load = Callable[..., Running]
PROMPT = [7, 8, 9]
SAME = Sampling(temperature=0.0, logit_bias={50: 100.0})  # the same token over and over


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registered kinds of drafters after a test."""
    monkeypatch.setattr(Drafter, "kinds", list(Drafter.kinds))


@pytest.fixture
def repeating(kinds: None) -> None:
    """Register a kind of drafter that proposes the last token again."""

    class RepeatDrafter(Drafter):
        kind, rank, initial_acceptance = "repeat", -1, 0.5

        @classmethod
        def serves(cls, resources: Resources) -> bool:
            return resources.asked.kind == "auto"

        def offer(self, request: DraftRequest) -> Candidate | None:
            return self.known(request.slot.tokens[-1:] * min(request.limit, 8), 5)


def test_the_kinds_are_ranked_for_a_fixed_depth() -> None:
    assert [kind.kind for kind in Drafter.kinds] == [
        "grammar",
        "draft",
        "mtp",
        "dflash",
        "eagle3",
        "ngram",
    ]


def test_new_kind_is_reported_in_the_statistics(
    repeating: None, contextual_files: PairFiles, load: Load
) -> None:
    engine = load(contextual_files)
    answer = engine.ask(PROMPT, 60, SAME, drafting(4, "auto"))
    speculation = answer.done.speculation
    assert answer.tokens == [50] * 60
    assert (speculation.kind, speculation.verification) == ("repeat", "match")
    assert speculation.drafted - 8 <= speculation.accepted
    assert speculation.accepted > 40
    assert engine.ask(PROMPT, 60, GREEDY, drafting(4)).done.speculation.kind == "draft"


@skip_on(
    "rpc", why="what is kept of a pair is for its machines, and each engine has another worker"
)
def test_calibration_of_a_new_kind_is_stored_for_the_next_load(
    repeating: None, contextual_files: PairFiles, load: Load, tmp_path: Path
) -> None:
    engine = load(contextual_files, state_dir=str(tmp_path))
    engine.ask(PROMPT, 60, SAME, drafting(4, "auto"))
    learned = engine.pair.learned.calibrations.answers["repeat"]
    assert learned.count.sum() > 40
    engine.pair.save()
    restored = load(contextual_files, state_dir=str(tmp_path)).pair.learned.calibrations.answers[
        "repeat"
    ]
    assert restored.count.tolist() == learned.count.tolist()


def test_a_new_kind_gives_the_tokens_of_plain_decoding(
    repeating: None, contextual_files: PairFiles, load: Load
) -> None:
    engine = load(contextual_files)
    truth = engine.ask(PROMPT, 60).tokens
    tokens = engine.ask(PROMPT, 60, GREEDY, SpeculationSettings()).tokens
    assert tokens == truth or worst_gap(contextual_files.target, PROMPT, tokens) < NEAR_TIE


def test_losing_known_tokens_yield_to_other_kinds(kinds: None) -> None:
    """They lose however certain they seem: these drafts are never right, and never learn it."""

    class SureDrafter(Drafter):
        kind, rank = "sure", -2

        @classmethod
        def serves(cls, resources: Resources) -> bool:
            return True

        def offer(self, request: DraftRequest) -> Candidate | None:
            return self.known([5] * 8, 9)

        def observe(self, request: DraftRequest, accepted: list[int], used: bool) -> None:
            pass

    class RightDrafter(SureDrafter):
        kind, rank, costly, proven = "right", -1, True, True

        def offer(self, request: DraftRequest) -> Candidate | None:
            return Candidate(self.belief, request.limit, 1.0)

        def propose(self, requests: list[DraftRequest]) -> None:
            for request in requests:
                request.tokens, request.buckets = [7, 7, 7], [9, 9, 9]

    resources: Any = None
    table = CostTable(COSTS)
    controller = Controller(lambda: CostProfile(table, None, 0.3), lambda _: False)
    sure = SureDrafter(resources, Belief(Calibration(0.98)))
    sure.belief.weights = np.where(GRID >= 0.98, 1.0, 0.0)
    drafting = Drafting([sure, RightDrafter(resources, Belief(Calibration(0.8)))])
    verifier: Any = SimpleNamespace(reject=False, matcher=None)
    slot: Any = SimpleNamespace(tokens=[1])
    tried, lost = [], 0.0
    for _ in range(60):
        step = SequenceStep([1], DraftRequest(slot, 8), drafting, verifier)
        controller.draft([step], PassCosts(table.padded_ms))
        tried.append(step.drafter.kind if step.drafter else "")
        lost += step.cost_ms or 0.0 if step.drafter is sure else 0.0
        right = tried[-1] == "right"
        controller.observe(step, [7] * (1 + right * len(step.drafts.tokens)))
    assert "sure" in tried
    assert lost <= (INITIAL_KNOWN_ROUNDS + KNOWN_REFILL_ROUNDS * 60) * (COSTS[1] + 0.3)
    assert tried.count("right") > 40


def test_failing_kind_is_replaced_by_another(
    kinds: None, contextual_files: PairFiles, load: Load
) -> None:
    closed: list[Slot] = []

    class BrokenDrafter(Drafter):
        kind, rank, initial_acceptance = "broken", -1, 0.9

        @classmethod
        def serves(cls, resources: Resources) -> bool:
            return True

        def offer(self, request: DraftRequest) -> Candidate | None:
            return Candidate(self.belief, request.limit, 0.001)

        def propose(self, requests: list[DraftRequest]) -> None:
            requests[0].tokens.append(5)
            raise ValueError("a bug")

        def close(self, slot: Slot) -> None:
            closed.append(slot)

    engine = load(contextual_files)
    truth = engine.ask(PROMPT, 40).tokens
    answer = engine.ask(PROMPT, 40, GREEDY, drafting(3, "auto"))
    assert len(closed) == 1
    assert answer.done.speculation.kind == "draft"
    tokens = answer.tokens
    assert tokens == truth or worst_gap(contextual_files.target, PROMPT, tokens) < NEAR_TIE
