"""Exact mode: a lane of its own, and the self-test that finds its width.

That is one at which a pass gives the same logits wherever a token stands in it.
"""

from __future__ import annotations

import numpy as np

from localspec.engine.cache.prefixes import Prefixes
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import Batch, Context, Logits
from localspec.engine.pair.lane import EXACT_CHUNK, Lane
from localspec.engine.pair.models import Models
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.drafters.model import DraftModel
from localspec.engine.speculation.drafters.mtp import Sidecar
from localspec.errors import InvalidRequest

CANDIDATES = range(4, 9)
_SPAN = 3  # passes' worth of tokens compared


class ExactMode:
    """The exact lane of a pair, made at first use.

    made: the lane, once it is. width: of its passes, once a self-test has found it, here or at an
    earlier load. reason: why there can be none, once that is known.
    """

    def __init__(
        self,
        models: Models,
        draft: Context | None,
        costs: CostTable,
        prefixes: Prefixes,
        width: int | None,
        drafter: DraftModel | None = None,
    ) -> None:
        """draft: the context that drafts for this lane, too; of heads that read the target's cache the lane
        has one of its own, with a drafter like `drafter`.
        """
        self.made: Lane | None = None
        self.width = width if width in CANDIDATES else None
        self.reason: str | None = None
        if not models.target.cuttable:
            self.reason = "this model's state cannot be padded and rolled back"
        if lacks := models.settings.exact_lacks:
            self.reason = (
                f"its own cache of {lacks >> 20} MiB does not fit in memory beside the context of "
                f"{models.n_ctx} tokens; use a smaller `context`, or `exact = true`, which plans for both"
            )
        self._models = models
        self._draft, self._drafter = draft, drafter
        self._costs = costs
        self._prefixes = prefixes

    def lane(self) -> Lane:
        """The lane.

        Raises:
            InvalidRequest: no width passes the self-test on this machine, or the model cannot roll back.
        """
        if self.made is None and self.reason is None:
            self.made = self._make()
        if self.made is None:
            raise InvalidRequest(f"Exact mode is not possible here: {self.reason}.", param="exact")
        return self.made

    def _make(self) -> Lane | None:
        models, n_batch = self._models, self._models.settings.n_batch
        rows = max(n_batch, EXACT_CHUNK)
        context = models.context(
            models.target,
            sequences=1,
            outputs=rows,  # of a prompt that is scored, each row of a chunk has its logits
            chooses=True,
            exact=True,
            rows=rows,
        )
        batch = Batch(rows)
        self.width = self.width or choose_width(context, batch, self._costs)
        if self.width is None:
            context.close()
            self.reason = "no pass width gives the same logits in every row"
            return None
        draft = self._draft
        if draft is not None and draft.heads:
            context.emit_states()
        if draft is not None and draft.borrows:
            draft = models.context(
                draft.model, sequences=1, outputs=1, heads=True, target=context, exact=True
            )
        slots = Slots(context, draft, models.parallel, 1, self._prefixes, exact=True)
        lane = Lane(context, batch, slots, self._costs, self.width)
        if draft is not None and isinstance(self._drafter, Sidecar):
            lane.drafter = self._drafter.beside(draft, slots.evict)
        return lane


def choose_width(context: Context, batch: Batch, costs: CostTable) -> int | None:
    """The cheapest width of 4…8 that passes on this machine with this model; None if none does."""
    for width in sorted(CANDIDATES, key=costs.ms):
        if passes(context, batch, width):
            return width
    return None


def passes(context: Context, batch: Batch, width: int) -> bool:
    """Is each token's row bit-identical whether its pass advanced one token or `width` tokens?

    The same text is read twice, always `width` rows at a time: once keeping only the first row of each
    pass (as plain decoding does, the rest is padding), once keeping all of them (all drafts accepted).
    """
    step = max(context.n_vocab // 97, 1)
    tokens = [(7 + at * step) % context.n_vocab for at in range(_SPAN * width)]
    slowly = _read(context, batch, tokens, width, 1)
    at_once = _read(context, batch, tokens, width, width)
    mixed = _read(context, batch, tokens, width, 2)
    return all(
        np.array_equal(a, b) and np.array_equal(a, c)
        for a, b, c in zip(slowly, at_once, mixed, strict=True)
    )


def _read(
    context: Context, batch: Batch, tokens: list[int], width: int, advance: int
) -> list[Logits]:
    context.remove(0, 0)
    rows: list[Logits] = []
    for start in range(0, len(tokens), advance):
        batch.clear()
        for at in range(width):
            inside = start + at < len(tokens) and at < advance
            batch.add(tokens[start + at] if inside else tokens[start], start + at, 0, True)
        context.decode(batch)
        for at in range(min(advance, len(tokens) - start)):
            rows.append(context.logits(at).copy())
        context.remove(0, start + advance)
    context.remove(0, 0)
    return rows
