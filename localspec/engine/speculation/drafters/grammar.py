"""Tokens that a grammar, or the end of the thoughts, forces: they come next whatever the model predicts."""

from __future__ import annotations

from localspec.engine.speculation.acceptance import Belief, bucket
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources

_CERTAIN_BUCKET = bucket(1.0)


class GrammarDrafter(Drafter):
    """The forced tokens of a request with a grammar or a limit to its thoughts."""

    kind, rank, initial_acceptance = "grammar", 0, 0.94

    @classmethod
    def serves(cls, resources: Resources) -> bool:
        return resources.matcher is not None

    def __init__(self, resources: Resources, belief: Belief) -> None:
        super().__init__(resources, belief)
        self._matcher = resources.matcher

    def offer(self, request: DraftRequest) -> Candidate | None:
        assert self._matcher is not None
        return self.known(self._matcher.forced()[: request.limit], _CERTAIN_BUCKET)
