"""The core of speculative decoding: which of the drafted tokens the target keeps.

A round has drafted K tokens d_1…d_K and the target has read them in one pass, so there are K+1 rows
of logits: row i is the target's opinion on what follows the first i of them. Every rule gives the
tokens to keep: the accepted drafts, then exactly one token of the target's own (a correction, or the
bonus token after the last draft). What else the pass has read is rolled back (`Slots.commit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from localspec.engine.llama import BadBatch, Context, Logits
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.guide import Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.protocol.frames import Speculative

# Row i, adjusted for the tokens kept so far in this round (penalties, grammar).
Rows = Callable[[int, list[int]], Logits]


def verify_match(rows: Rows, drafted: Sequence[int], sampler: Sampler, place: int) -> list[int]:
    """Keep drafts while they equal what the target samples: the tokens of plain decoding with the
    same seed, whatever was drafted. Greedy decoding is the case of temperature 0.

    place: how many tokens of the answer come before this round's.
    """
    kept: list[int] = []
    for i in range(len(drafted) + 1):
        token = sampler.sample(rows(i, kept), place + i)
        kept.append(token)
        if i == len(drafted) or token != drafted[i]:
            break
    return kept


def verify_sampled(sampled: Callable[[int], int], drafted: Sequence[int]) -> list[int]:
    """`verify_match` for greedy decoding where nothing but row i's likeliest token counts."""
    kept: list[int] = []
    for i in range(len(drafted) + 1):
        kept.append(sampled(i))
        if i == len(drafted) or kept[-1] != drafted[i]:
            break
    return kept


def verify_rejection(
    rows: Rows,
    drafted: Sequence[int],
    draft_probs: Sequence[Distribution],
    sampler: Sampler,
    place: int,
) -> list[int]:
    """Keep draft x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)): the
    target's distribution exactly, with more drafts kept (Leviathan et al. 2022, algorithm 1).

    draft_probs: for each draft the distribution q it was drawn from. place: as in `verify_match`.
    """
    kept: list[int] = []
    for i, token in enumerate(drafted):
        target = sampler.distribution(rows(i, kept), place + i)
        draft = draft_probs[i]
        if sampler.uniform() * draft.of(token) < target.of(token):
            kept.append(token)
            continue
        kept.append(residual(target, draft).pick(sampler.uniform()))
        return kept
    kept.append(sampler.sample(rows(len(drafted), kept), place + len(drafted)))
    return kept


def residual(target: Distribution, draft: Distribution) -> Distribution:
    """norm(max(0, p - q)): what to draw from after a rejection (Leviathan et al. 2022, Chen et al. 2023)."""
    order = np.argsort(draft.ids)
    at = np.searchsorted(draft.ids, target.ids, sorter=order)
    at = order[np.minimum(at, len(order) - 1)]
    q = np.where(draft.ids[at] == target.ids, draft.probs[at], 0.0)
    left = np.maximum(target.probs - q, 0.0)
    total = left.sum()
    if total <= 0.0:  # p == q up to rounding: a rejection had probability zero
        return target
    return Distribution(target.ids, left / total)


# ------------------------------------------------------------------------------- of one sequence


class Doubtful(Exception):
    """A token sampled on the device may come from logits that are no numbers."""


class Verifier:
    """Verifies the drafts of one sequence, and advances its grammar with what is kept.

    reject: by the rejection rule where drafts were drawn, else by match. likeliest: nobody looks at a row
    but for its likeliest token. on_device: the pass itself gives that, and no logits.
    """

    def __init__(self, sampler: Sampler, matcher: Guide | None, reject: bool) -> None:
        self.sampler = sampler
        self.matcher = matcher
        self.reject = reject
        self.likeliest = self.on_device = False
        # those that were looked at, valid until the target's next pass: its own, and adjusted
        self.rows: list[Logits] = []
        self.adjusted: list[Logits] = []
        self._consumed = 0  # tokens of a round not kept yet that the grammar has seen

    def verify(
        self, context: Context, first_row: int, tokens: list[int], drafts: DraftRequest
    ) -> list[int]:
        """What to keep of the last pass. tokens: the text before; its last one has `first_row`.

        Raises:
            Doubtful: a token is not to be trusted without its logits.
            NotFinite: the logits are no numbers.
            GrammarRejected: the grammar ran into its limits.
        """
        self.rows, self.adjusted = [], []

        def rows(i: int, kept: list[int]) -> Logits:
            row = context.finite(first_row + i)
            self.rows.append(row)
            mask = None
            if self.matcher is not None:
                self._consume(kept)
                mask = self.matcher.mask()
            history = tokens + kept if self.sampler.settings.penalised else tokens
            self.adjusted.append(self.sampler.adjusted(row, history, mask))
            return self.adjusted[-1]

        if self.on_device:
            kept = verify_sampled(lambda i: _sampled(context, first_row + i), drafts.tokens)
        elif self.likeliest:
            kept = verify_sampled(lambda i: context.likeliest(first_row + i), drafts.tokens)
        elif drafts.probs:
            kept = verify_rejection(
                rows, drafts.tokens, drafts.probs, self.sampler, drafts.generated
            )
        else:
            kept = verify_match(rows, drafts.tokens, self.sampler, drafts.generated)
        self._consume(kept)
        self._consumed = 0
        return kept

    def _consume(self, kept: list[int]) -> None:
        """Tell the grammar of tokens kept in this round that it has not seen."""
        if self.matcher is None:
            return
        for token in kept[self._consumed :]:
            self.matcher.consume(token)
        self._consumed = len(kept)

    def needs_no_logits(self, *, scored: bool) -> bool:
        """Does the highest logit of each row decide, and nobody look at the row itself?

        scored: log-probabilities are wanted.
        """
        settings = self.sampler.settings
        touched = settings.penalised or settings.infill or bool(settings.logit_bias)
        touched = touched or settings.excludes
        return settings.greedy and not touched and not scored and self.matcher is None

    def take_back(self) -> None:
        """The round that failed is not kept: the grammar is where it was before."""
        if self.matcher is not None and self._consumed:
            self.matcher.take_back(self._consumed)
        self._consumed = 0


def _sampled(context: Context, row: int) -> int:
    """The token sampled on the device, unless it is what a search for the highest NaN ends with: the first
    token on some, none on CUDA.
    """
    try:
        token = context.sampled_token(row)
    except BadBatch as error:
        raise Doubtful from error
    if token == 0:
        raise Doubtful
    return token


# ------------------------------------------------------------------------------- which rule


def rejects(
    asked: Speculative, sampler: Sampler, matcher: Guide | None, *, drawn: bool, scored: bool
) -> bool:
    """Verify by the rejection rule? `auto`: where nothing asks for the tokens of plain decoding.

    drawn: a draft model may serve the request, whose drafts can be drawn. scored: it wants tokens'
    log-probabilities.
    """
    settings, rule = sampler.settings, asked.verification
    if settings.greedy or not drawn:
        return False
    if rule != "auto":
        return rule == "rejection"
    narrowed = matcher is not None and matcher.narrows
    fixed = settings.seed is not None or narrowed or settings.penalised
    return not fixed and not scored and not asked.prediction
