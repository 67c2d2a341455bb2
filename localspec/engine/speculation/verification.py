"""The core of speculative decoding: which of the drafted tokens the target keeps.

A round has drafted K tokens d_1…d_K and the target has read them in one pass. So there are K+1 rows of
logits, where row i is the target's prediction after the first i of them. Every rule returns the tokens to
keep: the accepted drafts, then exactly one token of the target's own (a correction, or the bonus token after
the last draft). What else the pass has read is rolled back (`Slots.commit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from localspec.engine.llama import BadBatch, Context, Logits
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.guide import CombinedGuide, Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.protocol.frames import SpeculationSettings

# Returns the logits of row i, adjusted for the tokens kept so far in this round (penalties, grammar).
Rows = Callable[[int, list[int]], Logits]


def verify_match(rows: Rows, drafted: Sequence[int], sampler: Sampler, n_before: int) -> list[int]:
    """Keep drafts while they equal what the target samples.

    The tokens are those of plain decoding with the same seed, whatever was drafted. Greedy decoding is the
    case of temperature 0.

    n_before: tokens of the answer before this round.
    """
    kept_tokens: list[int] = []
    for i in range(len(drafted) + 1):
        token = sampler.sample(rows(i, kept_tokens), n_before + i)
        kept_tokens.append(token)
        if i == len(drafted) or token != drafted[i]:
            break
    return kept_tokens


def verify_sampled(sample_row: Callable[[int], int], drafted: Sequence[int]) -> list[int]:
    """Verify as `verify_match` does, for greedy decoding where only the likeliest token of a row counts."""
    kept_tokens: list[int] = []
    for i in range(len(drafted) + 1):
        kept_tokens.append(sample_row(i))
        if i == len(drafted) or kept_tokens[-1] != drafted[i]:
            break
    return kept_tokens


def verify_block(
    rows: Rows,
    drafted: Sequence[int],
    draft_probs: Sequence[Distribution],
    sampler: Sampler,
    n_before: int,
) -> list[int]:
    """Keep as many drafts as a joint test of all of them allows, then one token of the target's own.

    The result has exactly the target's distribution, and no rule keeps more drafts on average (block
    verification, Sun et al. 2024, algorithm 2). A draft that the target likes more than the draft model does
    makes up for one before it that it likes less. A single draft x is kept with probability
    min(1, p(x)/q(x)), as by the rejection rule of Leviathan et al. 2022.

    draft_probs: for each draft, the distribution q that it was drawn from. n_before: tokens of the answer
    before this round.
    """
    n_kept, rest = 0, None
    weight = (
        1.0  # p_i of the paper: the share of the drawn beginnings of this kind that may be kept
    )
    for i, token in enumerate(drafted):
        target = sampler.distribution(rows(i, list(drafted[:i])), n_before + i)
        excess, total = residual(target, draft_probs[i], weight)
        if i == 0 or sampler.uniform() * (total + 1.0 - weight) < total:
            n_kept, rest = i, excess
        ratio = target.probability_of(token) / draft_probs[i].probability_of(token)
        weight = min(1.0, weight * ratio)
        if weight == 0.0:
            break
    if rest is None or sampler.uniform() < weight:
        row = rows(len(drafted), list(drafted))
        return [*drafted, sampler.sample(row, n_before + len(drafted))]
    return [*drafted[:n_kept], rest.pick(sampler.uniform())]


def residual(
    target: Distribution, draft: Distribution, weight: float
) -> tuple[Distribution, float]:
    """Return norm(max(0, weight · p - q)), and its sum before it was normalized (Sun et al. 2024)."""
    order = np.argsort(draft.ids)
    at = np.searchsorted(draft.ids, target.ids, sorter=order)
    at = order[np.minimum(at, len(order) - 1)]
    q = np.where(draft.ids[at] == target.ids, draft.probs[at], 0.0)
    excess = np.maximum(weight * target.probs - q, 0.0)
    total = float(excess.sum())
    # Where p == q up to rounding, nothing is left, and it is not drawn from.
    return Distribution(target.ids, excess / total) if total > 0.0 else target, total


class DoubtfulToken(Exception):
    """A token sampled on the device may come from NaN or infinite logits."""


class Verifier:
    """Verifies the drafts of one sequence, and advances its grammar with what is kept.

    reject: use the rejection rule for drafts that were drawn from a distribution, else match.
    likeliest: only the likeliest token of each row matters. on_device: the pass itself computes that token,
    and gives no logits.
    """

    def __init__(self, sampler: Sampler, matcher: Guide | None, reject: bool) -> None:
        self.sampler = sampler
        self.matcher = matcher
        self.reject = reject
        self.needs_only_argmax = self.on_device = False
        # The rows that were used, original and adjusted. They are valid until the target's next pass.
        self.rows: list[Logits] = []
        self.adjusted: list[Logits] = []
        self._consumed = 0  # tokens of an unfinished round that the grammar has consumed

    def verify(
        self, context: Context, first_row: int, tokens: list[int], drafts: DraftRequest
    ) -> list[int]:
        """Return the tokens to keep of the last pass.

        tokens: the text before; its last token was read in `first_row`.

        Raises:
            DoubtfulToken: A token cannot be trusted without its logits.
            NotFinite: The logits are NaN or infinite.
            GrammarRejected: The grammar ran into its limits.
        """
        self.rows, self.adjusted = [], []

        def rows(i: int, kept_tokens: list[int]) -> Logits:
            row = context.finite_logits(first_row + i)
            self.rows.append(row)
            mask = None
            if self.matcher is not None:
                self._consume(kept_tokens)
                mask = self.matcher.mask()
            self.adjusted.append(self.sampler.adjusted(row, tokens, mask, kept_tokens))
            return self.adjusted[-1]

        if self.on_device:
            kept_tokens = verify_sampled(lambda i: _sampled(context, first_row + i), drafts.tokens)
        elif self.needs_only_argmax:
            kept_tokens = verify_sampled(
                lambda i: context.argmax_token(first_row + i), drafts.tokens
            )
        elif drafts.probs:
            kept_tokens = verify_block(
                rows, drafts.tokens, drafts.probs, self.sampler, drafts.generated
            )
        else:
            kept_tokens = verify_match(rows, drafts.tokens, self.sampler, drafts.generated)
        if self.matcher is not None and self._consumed >= len(kept_tokens):
            # Drafts after those that are kept were tried.
            self.matcher.take_back(self._consumed - len(kept_tokens) + 1)
            self._consumed = len(kept_tokens) - 1
        self._consume(kept_tokens)
        self._consumed = 0
        del self.rows[len(kept_tokens) :], self.adjusted[len(kept_tokens) :]
        return kept_tokens

    def _consume(self, kept_tokens: list[int]) -> None:
        """Advance the grammar by the kept tokens of this round that it has not consumed."""
        if self.matcher is None:
            return
        for token in kept_tokens[self._consumed :]:
            self.matcher.consume(token)
        self._consumed = len(kept_tokens)

    def needs_no_logits(self, *, scored: bool) -> bool:
        """Whether only the likeliest token of each row is needed, and never the logits themselves.

        scored: the request wants log-probabilities.
        """
        settings = self.sampler.settings
        touched = settings.penalised or settings.infill or bool(settings.logit_bias)
        touched = touched or settings.excludes
        return settings.greedy and not touched and not scored and self.matcher is None

    def restrict(self, guide: Guide) -> None:
        """Add a guide from the next token on. It prevails over what there is."""
        self.matcher = guide if self.matcher is None else CombinedGuide(guide, self.matcher)
        self.needs_only_argmax = False

    def take_back(self) -> None:
        """Move the grammar back to where it was before a round that failed."""
        if self.matcher is not None and self._consumed:
            self.matcher.take_back(self._consumed)
        self._consumed = 0


def _sampled(context: Context, row: int) -> int:
    """Return the token sampled on the device. Raises DoubtfulToken if it may be the result of NaN logits.

    A search for the highest of NaN logits gives the first token on some devices, and none on CUDA.
    """
    try:
        token = context.sampled_token(row)
    except BadBatch as error:
        raise DoubtfulToken from error
    if token == 0:
        raise DoubtfulToken
    return token


def uses_rejection(
    speculative: SpeculationSettings,
    sampler: Sampler,
    matcher: Guide | None,
    *,
    can_draw_drafts: bool,
    scored: bool,
) -> bool:
    """Whether to verify by the rejection rule. `auto` does unless the request needs plain decoding's tokens.

    can_draw_drafts: a draft model may serve the request, and its drafts can be drawn from a distribution.
    scored: the request wants log-probabilities.
    """
    settings, rule = sampler.settings, speculative.verification
    if settings.greedy or not can_draw_drafts:
        return False
    if rule != "auto":
        return rule == "rejection"
    narrowed = matcher is not None and matcher.forbids_often
    fixed = settings.seed is not None or narrowed or settings.penalised
    return not fixed and not scored and not speculative.prediction
