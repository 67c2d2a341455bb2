"""What heads and sidecars propose, recorded, and checks that it depends on the text alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from localspec.engine.cache.slot import HiddenStates
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.protocol.frames import SpeculationSettings
from tests.support.rescoring import NEAR_TIE, assert_alike
from tests.support.running import Answer, Running

PROMPTS = [[300, 17, 402, 255, 31, 340, 18, 77], [12, 99, 7], [480, 3, 55, 210, 9], [66] * 20]


class Proposal(NamedTuple):
    """The drafts proposed after a text, and how many nats the runner-up of each draft was behind."""

    text: tuple[int, ...]
    drafts: tuple[int, ...]
    gaps: tuple[float, ...]

    def agrees_with(self, reference: Proposal) -> bool:
        """Return whether both drafted the same after the same text, apart from near-ties."""
        for token, reference_token, gap in zip(
            self.drafts, reference.drafts, self.gaps, strict=True
        ):
            if token != reference_token:
                return gap < NEAR_TIE
        return self.text == reference.text


class Proposals(list[Proposal]):
    """Every proposal of an engine from now on; `settings` gives those of a request by its depth."""

    def __init__(
        self,
        engine: Running,
        monkeypatch: pytest.MonkeyPatch,
        settings: Callable[[int], SpeculationSettings],
    ) -> None:
        super().__init__()
        self.engine, self.settings = engine, settings
        drafter = engine.pair.drafter
        assert drafter is not None, engine.pair.no_draft
        propose_drafts, append_draft = drafter.propose, drafter._append_draft
        gaps: dict[DraftRequest, list[float]] = {}

        def record_gap(request: DraftRequest, row: int) -> None:
            logits = drafter._read_logits(row, request.tokens)
            second, best = np.partition(logits, -2)[-2:].tolist()
            gaps.setdefault(request, []).append(best - second)
            append_draft(request, row)

        def propose(requests: Any) -> None:
            gaps.clear()
            propose_drafts(requests)
            for request in requests:
                draft_gaps = tuple(gaps.get(request, ()))[: len(request.tokens)]
                self.append(Proposal(tuple(request.slot.tokens), tuple(request.tokens), draft_gaps))

        monkeypatch.setattr(drafter, "propose", propose)
        monkeypatch.setattr(drafter, "_append_draft", record_gap)

    def draft_from_empty_slot(self, text: tuple[int, ...], depth: int) -> Proposal:
        """Return the drafts after `text` when an empty slot reads it and nothing runs beside it."""
        self.engine.forget()
        self.clear()
        self.engine.ask(list(text[:-1]), depth + 2, speculative=self.settings(depth))
        assert self[0].text == text
        return self[0]

    def is_of_its_text(self, proposal: Proposal) -> bool:
        """Return whether an empty slot proposes the same after its text."""
        return proposal.agrees_with(self.draft_from_empty_slot(proposal.text, len(proposal.drafts)))

    def check_all_depths(self) -> list[Answer]:
        """Run four requests at once, with every depth and every number of accepted drafts."""
        engine = self.engine
        engine.forget()
        plain = [engine.ask(prompt, 40).tokens for prompt in PROMPTS]
        engine.forget()
        ids = [
            engine.start(prompt, 40, speculative=self.settings(depth))
            for prompt, depth in zip(PROMPTS, (1, 2, 3, 4), strict=True)
        ]
        engine.finish()
        answers = [engine.answers[request] for request in ids]
        for prompt, answer, tokens in zip(PROMPTS, answers, plain, strict=True):
            assert_alike(engine.pair.files.target, prompt, answer.tokens, tokens)
        assert {len(proposal.drafts) for proposal in self} >= {1, 2, 3, 4}
        assert all(map(self.is_of_its_text, self[1::7]))
        return answers

    def check_prompts_read_together(self) -> None:
        """Mix prompts of different lengths with running texts in passes, and then let each text draft."""
        for prompt in PROMPTS:
            self.engine.start(prompt, 12)
            self.engine.engine.step()
        self.engine.finish()
        assert not self
        for answer in list(self.engine.answers.values()):
            self.engine.ask(answer.all_tokens, 5, speculative=self.settings(3))
        drafted = [proposal for proposal in self if len(proposal.drafts) == 3][:4]
        assert drafted
        assert all(map(self.is_of_its_text, drafted))

    def check_wrong_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give each token the state of the one before: a control, in which drafts must differ."""
        original = HiddenStates.states_before

        def shifted(states: HiddenStates, first: int, last: int) -> Any:
            return np.roll(original(states, first, last), 1, axis=1)

        texts = [(*prompt, self.engine.ask(prompt, 1).tokens[0]) for prompt in PROMPTS]
        right = [self.draft_from_empty_slot(text, 3) for text in texts]
        monkeypatch.setattr(HiddenStates, "states_before", shifted)
        wrong = [self.draft_from_empty_slot(text, 3) for text in texts]
        assert not all(map(Proposal.agrees_with, right, wrong))

    def check_text_cut_back(self, back: int) -> tuple[int, Answer]:
        """Leave out the last tokens of a text and go on differently.

        Returns the length of the text before, and the answer to the changed one.
        """
        self.engine.forget()
        opening = self.engine.ask(PROMPTS[0], 21, speculative=self.settings(4)).all_tokens
        self.clear()
        changed = [*opening[: len(opening) - back], 44, 45]
        answer = self.engine.ask(changed, 8, speculative=self.settings(3))
        assert self.is_of_its_text(self[0])
        return len(opening), answer
