"""Exact mode: a lane of its own, and the self-test that finds the width of its passes.

With that width a pass gives the same logits wherever a token stands in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from localspec.engine.cache.prefixes import PrefixStore
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import Batch, Context, Logits
from localspec.engine.pair.lane import EXACT_CHUNK_TOKENS, Lane
from localspec.engine.pair.models import PairModels
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.drafters.draft_model import DraftModel
from localspec.engine.speculation.drafters.mtp import Sidecar
from localspec.errors import InvalidRequest

# At least three drafts: copied text is worth them without a draft model.
CANDIDATE_WIDTHS = range(4, 17)
_TEST_PASSES = 3  # the self-test compares the tokens of this many passes


class ExactMode:
    """The exact lane of a pair, made at first use.

    made: the lane, once it is made. width: of its passes, once a self-test has found it, now or at an earlier
    load. reason: why there can be no exact lane, once that is known.
    """

    def __init__(
        self,
        models: PairModels,
        draft: Context | None,
        costs: CostTable,
        prefixes: PrefixStore,
        width: int | None,
    ) -> None:
        """Prepare the lane without making it.

        draft: the context that drafts for this lane, too. If it belongs to heads that read the target's
        cache, the lane gets a context of its own, with a drafter like that of `draft_with`.
        """
        self.made: Lane | None = None
        self.width = width if width in CANDIDATE_WIDTHS else None
        self.reason: str | None = None
        if not models.target.cuttable:
            self.reason = "this model's state cannot be padded and rolled back"
        if missing_bytes := models.settings.exact_lacks:
            self.reason = (
                f"its own cache of {missing_bytes >> 20} MiB does not fit in memory beside the context of "
                f"{models.n_ctx} tokens; use a smaller `context`, or `exact = true`, which plans for both"
            )
        self._models, self._draft, self._costs, self._prefixes = models, draft, costs, prefixes
        self._drafter: DraftModel | None = None
        self._acceptance: Calibration | None = None

    def draft_with(
        self, drafter: DraftModel | None, calibrations: Mapping[str, Calibration]
    ) -> None:
        """Set the drafter of the shared lane, and what is known of its drafts by their kind."""
        self._drafter = drafter
        self._acceptance = calibrations[drafter.kind] if drafter is not None else None

    def expected_ms(self) -> float:
        """Return the milliseconds that a token is expected to take; infinite: there can be no exact lane."""
        if self.reason is not None:
            return math.inf
        widths = [self.width] if self.width is not None else CANDIDATE_WIDTHS
        return 1 / max(map(self._expected_rate, widths))

    def lane(self) -> Lane:
        """Return the lane, which is made at the first call.

        Raises InvalidRequest if no width passes the self-test on this machine, or the model cannot roll back.
        """
        if self.made is None and self.reason is None:
            self.made = self._make_lane()
        if self.made is None:
            raise InvalidRequest(f"Exact mode is not possible here: {self.reason}.", param="exact")
        return self.made

    def _make_lane(self) -> Lane | None:
        models, draft = self._models, self._draft
        rows = max(models.settings.n_batch, EXACT_CHUNK_TOKENS)
        context = models.make_context(
            models.target,
            sequences=1,
            outputs=rows,  # when a prompt is scored, each row of a chunk needs logits
            chooses=True,
            exact=True,
            rows=rows,
        )
        batch = Batch(rows)
        promising = sorted(CANDIDATE_WIDTHS, key=self._expected_rate, reverse=True)
        self.width = self.width or next(
            (width for width in promising if passes_self_test(context, batch, width)), None
        )
        if self.width is None:
            context.close()
            self.reason = "no pass width gives the same logits in every row"
            return None
        if draft is not None and draft.heads:
            context.emit_states(draft.model.target_layers)
        if draft is not None and draft.borrows:
            draft = models.make_context(
                draft.model, sequences=1, outputs=1, heads=True, target=context, exact=True
            )
        slots = Slots(context, draft, models.parallel, 1, self._prefixes, exact=True)
        lane = Lane(context, batch, slots, self._costs, self.width)
        if draft is not None and isinstance(self._drafter, Sidecar):
            lane.drafter = self._drafter.copy_for(draft, slots.evict)
        return lane

    def _expected_rate(self, width: int) -> float:
        """Return the tokens per millisecond that passes of this width promise at the best depth.

        Without a draft model all but one row are padding.
        """
        pass_ms = self._costs.ms(width)
        if self._drafter is None or self._acceptance is None:
            return 1 / pass_ms
        n_tokens = Belief(self._acceptance).survival((), width - 1).cumsum()
        drafting_ms = np.arange(width) * self._drafter.draft_ms
        drafting_ms[1:] += self._drafter.round_ms
        return float((n_tokens / (pass_ms + drafting_ms)).max())


def passes_self_test(context: Context, batch: Batch, width: int) -> bool:
    """Whether each token's row is bit-identical however many tokens its passes advance.

    The same text is read three times, always `width` rows at a time. Plain decoding keeps only the first row
    of each pass and the rest is padding; with all drafts accepted all rows are kept; the third run keeps two.
    """
    step = max(context.n_vocab // 97, 1)
    tokens = [(7 + index * step) % context.n_vocab for index in range(_TEST_PASSES * width)]
    one_by_one, at_once, mixed = (
        _read_rows(context, batch, tokens, width, advance) for advance in (1, width, 2)
    )
    return np.array_equal(one_by_one, at_once) and np.array_equal(one_by_one, mixed)


def _read_rows(
    context: Context, batch: Batch, tokens: list[int], width: int, advance: int
) -> list[Logits]:
    context.remove(0, 0)
    rows: list[Logits] = []
    for start in range(0, len(tokens), advance):
        batch.clear()
        for offset in range(width):
            is_kept = start + offset < len(tokens) and offset < advance
            batch.add(tokens[start + offset] if is_kept else tokens[start], start + offset, 0, True)
        context.decode(batch)
        for offset in range(min(advance, len(tokens) - start)):
            rows.append(context.logits(offset).copy())
        context.remove(0, start + advance)
    context.remove(0, 0)
    return rows
