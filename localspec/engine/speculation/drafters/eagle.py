"""EAGLE-3: a layer in a file of its own that reads what some layers of the target read.

An encoder makes one state of the inputs of three layers at a token. The layer reads it together with the
next token, and from there on its own states, as MTP heads do. It keeps a cache of its own. Li et al. 2025,
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import States
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.draft_model import (
    PROBE_CONTEXT_TOKENS,
    PROBE_ROWS,
    UNREAD_TAIL_TOKENS,
    ModelDrafter,
)
from localspec.engine.speculation.drafters.mtp import Heads


class EagleDrafter(ModelDrafter):
    """Drafts of an EAGLE-3 sidecar for one sequence."""

    kind, rank = "eagle3", 1
    called = "the EAGLE-3 draft"


class LayerHeads(Heads):
    """A sidecar that reads layers of the target, for several sequences."""

    kind = EagleDrafter.kind

    @staticmethod
    def count_outputs(sequences: int) -> int:
        """Return the most rows of a pass that have logits, if so many sequences draft at once.

        llama.cpp computes the logits of all rows of such a pass and returns the first ones, so that either
        every row has logits or none.
        """
        return max(sequences * (UNREAD_TAIL_TOKENS + 1), PROBE_CONTEXT_TOKENS + PROBE_ROWS)

    def first_unread(self, slot: Slot) -> int:
        """Return the first unread token. The first of a text is never read: no state comes before it."""
        return max(super().first_unread(slot), 1)

    _compares_all = True

    def _first_compared(self, n_tokens: int, count: int) -> int:
        del count
        return max(n_tokens - self.context.n_outputs, 1)

    def _make_states(self, states: States) -> States:
        return self.context.encode(states)

    def _add_text(
        self, slot: Slot, start: int, end: int, position: int, sequence: int, n_logits: int = 1
    ) -> int:
        n_rows = end - start if n_logits else 0
        return super()._add_text(slot, start, end, position, sequence, n_rows)

    def _read_texts(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return the requests whose text is read, and whose target has read something."""
        return super()._read_texts(
            [request for request in requests if len(request.slot.tokens) > 1]
        )
