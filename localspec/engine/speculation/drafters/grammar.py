"""Tokens that a grammar forces, or the end of thoughts: they must come next whatever the model says."""

from __future__ import annotations

from localspec.engine.speculation.acceptance import Belief, bucket
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources

_CERTAIN = bucket(1.0)


class GrammarDrafter(Drafter):
    """Forced tokens, of a request with a grammar or a limit to its thoughts."""

    kind, rank, initial_acceptance = "grammar", 0, 0.94

    @classmethod
    def serves(cls, given: Resources) -> bool:
        return given.matcher is not None

    def __init__(self, given: Resources, belief: Belief) -> None:
        super().__init__(given, belief)
        self._matcher = given.matcher

    def offer(self, request: DraftRequest) -> Candidate | None:
        assert self._matcher is not None
        return self.known(self._matcher.forced()[: request.limit], _CERTAIN)
