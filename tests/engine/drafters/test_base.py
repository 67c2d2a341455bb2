"""A kind of drafts is a class: the engine finds it, asks it, teaches it and tells of it by its name."""

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
from localspec.engine.speculation.budget import KNOWN_REFILL_ROUNDS, KNOWN_ROUNDS
from localspec.engine.speculation.controller import Controller
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import Candidate, MeasuredDepth, PassCosts
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.step import Drafting, SequenceStep
from localspec.protocol.frames import PairFiles, Sampling, SpeculationSettings
from tests.support.rescoring import NEAR_TIE, worst_gap
from tests.support.running import GREEDY, Running, drafting, skip_on

Load = Callable[..., Running]
PROMPT = [7, 8, 9]
SAME = Sampling(temperature=0.0, logit_bias={50: 100.0})  # one token, over and over


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test defines is no kind of the next one."""
    monkeypatch.setattr(Drafter, "kinds", list(Drafter.kinds))


@pytest.fixture
def repeating(kinds: None) -> None:
    """A kind that proposes the last token again."""

    class RepeatDrafter(Drafter):
        kind, rank, initial_acceptance = "repeat", -1, 0.5

        @classmethod
        def serves(cls, given: Resources) -> bool:
            return given.asked.kind == "auto" and not given.reject

        def offer(self, request: DraftRequest) -> Candidate | None:
            return self.known(request.slot.tokens[-1:] * min(request.limit, 8), 5)


def test_the_kinds_are_ranked_for_a_fixed_depth() -> None:
    assert [kind.kind for kind in Drafter.kinds] == ["grammar", "draft", "mtp", "ngram"]


def test_a_new_kind_is_in_the_statistics(
    repeating: None, contextual_files: PairFiles, load: Load
) -> None:
    engine = load(contextual_files)
    answer = engine.ask(PROMPT, 60, SAME, drafting(4, "auto"))
    told = answer.done.speculation
    assert answer.tokens == [50] * 60
    assert (told.kind, told.verification) == ("repeat", "match")
    assert told.drafted - 8 <= told.accepted
    assert told.accepted > 40
    assert engine.ask(PROMPT, 60, GREEDY, drafting(4)).done.speculation.kind == "draft"


@skip_on(
    "rpc", why="what is kept of a pair is for its machines, and each engine has another worker"
)
def test_what_a_new_kind_is_worth_is_kept_for_the_next_load(
    repeating: None, contextual_files: PairFiles, load: Load, tmp_path: Path
) -> None:
    engine = load(contextual_files, state_dir=str(tmp_path))
    engine.ask(PROMPT, 60, SAME, drafting(4, "auto"))
    learned = engine.pair.learned.calibrations["repeat"]
    assert learned.count.sum() > 40
    engine.pair.save()
    again = load(contextual_files, state_dir=str(tmp_path)).pair.learned.calibrations["repeat"]
    assert again.count.tolist() == learned.count.tolist()


def test_a_new_kind_gives_the_tokens_of_plain_decoding(
    repeating: None, contextual_files: PairFiles, load: Load
) -> None:
    engine = load(contextual_files)
    truth = engine.ask(PROMPT, 60).tokens
    tokens = engine.ask(PROMPT, 60, GREEDY, SpeculationSettings()).tokens
    assert tokens == truth or worst_gap(contextual_files.target, PROMPT, tokens) < NEAR_TIE


def test_known_tokens_that_lose_too_much_leave_the_rounds_to_other_kinds(kinds: None) -> None:
    """However sure they seem: these are never right, and never say so."""

    class SureDrafter(Drafter):
        kind, rank = "sure", -2

        @classmethod
        def serves(cls, given: Resources) -> bool:
            return True

        def offer(self, request: DraftRequest) -> Candidate | None:
            return self.known([5] * 8, 9)

        def observe(self, request: DraftRequest, kept: list[int], used: bool) -> None:
            pass

    class RightDrafter(SureDrafter):
        kind, rank, costly, proven = "right", -1, True, True

        def offer(self, request: DraftRequest) -> Candidate | None:
            return Candidate(self.belief, request.limit, 1.0)

        def propose(self, requests: list[DraftRequest]) -> None:
            for request in requests:
                request.tokens, request.buckets = [7, 7, 7], [9, 9, 9]

    given: Any = None
    table = CostTable(COSTS)
    controller = Controller(lambda: CostProfile(table, None, 0.3), lambda _: False)
    sure = SureDrafter(given, Belief(Calibration(0.98)))
    sure.belief.weights = np.where(GRID >= 0.98, 1.0, 0.0)
    drafting = Drafting([sure, RightDrafter(given, Belief(Calibration(0.8)))], MeasuredDepth())
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
    assert lost <= (KNOWN_ROUNDS + KNOWN_REFILL_ROUNDS * 60) * (COSTS[1] + 0.3)
    assert tried.count("right") > 40


def test_a_kind_that_cannot_draft_steps_aside(
    kinds: None, contextual_files: PairFiles, load: Load
) -> None:
    closed: list[Slot] = []

    class BrokenDrafter(Drafter):
        kind, rank, initial_acceptance = "broken", -1, 0.9

        @classmethod
        def serves(cls, given: Resources) -> bool:
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
