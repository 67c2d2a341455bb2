"""Sample one token from a row of logits, with llama.cpp's order of steps and meaning.

The steps are logit bias → repeat, frequency and presence penalties → DRY → top-n-sigma → top-k → typical →
top-p → min-p → XTC → temperature, which may depend on the entropy. Everything after the penalties works on
a few candidates. With top-k, the row is never sorted or exponentiated as a whole, so that sampling from a
150 k vocabulary takes a fraction of a millisecond. Callers pass the tokens so far, and what
penalties know of them is brought into line with that, so that a rejected draft leaves nothing behind.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Logits, NativeSampler
from localspec.engine.sampling.distribution import Distribution, Truncation, delays, uniform_at
from localspec.engine.sampling.guide import Guide
from localspec.engine.sampling.penalties import Breakers, Penalties
from localspec.engine.sampling.settings import Settings
from localspec.protocol.frames import TokenLogprob

# Only so many candidates are compared with each other, because the comparison is quadratic. Editors request
# 40.
_MAX_COMPARED_CANDIDATES = 256


def infill_sampler(candidates: Distribution, rule: NativeSampler) -> Distribution:
    """Return the candidates that may come next in a hole of a text, by llama.cpp's "infill" sampler.

    A model often continues when it should stop, because end-of-text tokens are rare in its training data.
    The rule lets it stop when an end is not much less likely than the average candidate, or when no text
    token is likely. It merges a token with candidates that begin with it, to decide which remain.
    """
    order = np.argsort(-candidates.probs, kind="stable")[:_MAX_COMPARED_CANDIDATES]
    ids, probs = candidates.ids[order], candidates.probs[order]
    with np.errstate(divide="ignore"):
        remaining = rule.apply(ids, np.log(probs))["id"]
    if len(remaining) == 1:  # It may be the end, which was no candidate.
        return Distribution.certain(int(remaining[0]))
    keep = np.isin(ids, remaining)
    return Distribution(ids[keep], probs[keep] / probs[keep].sum())


class MinimumLength(Guide):
    """A guide that forbids the tokens in `ends` at the first `min_tokens` places of an answer."""

    def __init__(self, min_tokens: int, ends: Iterable[int], n_vocab: int) -> None:
        self._min_tokens = min_tokens
        self._ends = frozenset(ends)
        self._count = 0
        self._allowed = np.ones(n_vocab, dtype=np.bool_)
        self._allowed[list(self._ends)] = False

    def mask(self) -> npt.NDArray[np.bool_] | None:
        return self._allowed if self._count < self._min_tokens else None

    def consume(self, token: int) -> None:
        self._count += 1

    def take_back(self, count: int) -> None:
        self._count -= count

    def count_valid(self, tokens: Sequence[int]) -> int:
        for index, token in enumerate(tokens[: max(self._min_tokens - self._count, 0)]):
            if token in self._ends:
                return index
        return len(tokens)


class Sampler:
    """The sampler of one request, with its settings, seed and DRY breakers.

    The randomness of a token depends on its place in the answer. Plain decoding and speculative decoding
    under the `match` rule therefore draw the same tokens. The stream of `uniform` serves drafting and the
    rejection rule.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        breakers: Breakers | None = None,
        narrowed: Callable[[Distribution], Distribution] | None = None,
    ) -> None:
        """Prepare sampling with `settings`.

        breakers: DRY's sequence breakers as tokens.
        narrowed: filters the candidates after every step of the settings except temperature 0.
        """
        self.settings = settings
        self._narrowed = narrowed
        # Whether the result is always the highest logit of the row, so that no distribution is needed.
        self._always_highest = settings.greedy and narrowed is None and not settings.excludes
        # Greedy sampling picks the likeliest candidate after narrowing, so narrowing must see them all.
        self._truncation = Truncation(
            replace(settings, temperature=1.0) if settings.greedy else settings
        )
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed & 0xFFFFFFFFFFFFFFFF))
        self._penalties = Penalties(settings, breakers or {})
        self._bias_ids = np.fromiter(settings.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(settings.logit_bias.values(), dtype=np.float32)

    def uniform(self) -> float:
        """Return the next number in [0, 1) of the stream for drafts and the rejection rule."""
        return float(self._random.random())

    def adjusted(
        self,
        row: Logits,
        text: Sequence[int],
        mask: npt.NDArray[np.bool_] | None = None,
        drafts: Sequence[int] = (),
    ) -> Logits:
        """Return `row` (n_vocab,) after bias, penalties and a grammar's mask.

        This is a copy, or the same array if none of them applies. text, drafts: the tokens so far. If `text`
        is the list of the last call, it has only grown since.
        """
        settings = self.settings
        if not (len(self._bias) or settings.penalised or mask is not None):
            return row
        row = row.copy()
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if settings.penalised:
            self._penalties.apply(row, text, drafts)
        if mask is not None:
            row[~mask] = -np.inf
            if row.max() == -np.inf:
                # The bias forbids every token that the grammar allows. The grammar prevails.
                row[mask] = 0.0
        return row

    def distribution(self, row: Logits, place: int = 0) -> Distribution:
        """Return the distribution to draw from, given an adjusted row; a single token if greedy.

        place: the number of tokens of the answer before this one. Whether XTC applies is drawn once per
        place, with the same result for draft and target. Speculative decoding is exact in both cases, and
        so it is exact overall.
        """
        if self._always_highest:
            return Distribution.certain(int(row.argmax()))
        settings = self.settings
        without_top = settings.excludes and uniform_at(self.seed, place) <= settings.xtc_probability
        candidates = self._truncation.distribution(row, without_top=without_top)
        if self._narrowed is not None:
            candidates = self._narrowed(candidates)
        if not settings.greedy:
            return candidates
        return Distribution.certain(int(candidates.ids[candidates.probs.argmax()]))

    def sample(self, row: Logits, place: int) -> int:
        """Draw one token from an adjusted row. place: the number of tokens of the answer before it."""
        if self._always_highest:
            return int(row.argmax())
        return self.draw(self.distribution(row, place), place)

    def draw(self, candidates: Distribution, place: int) -> int:
        """Draw the token of a place of the answer from its distribution."""
        if self.settings.greedy:
            return int(candidates.ids[0])
        return candidates.draw_by_delays(delays(self.seed, place, candidates.ids))


def logprob(row: Logits, token: int, top: int, piece: Callable[[int], bytes]) -> TokenLogprob:
    """Return the target's log-probability of `token` and of the `top` most probable tokens.

    The probabilities are those at temperature 1, before any penalty. piece: returns a token's bytes.
    """
    peak = float(row.max())
    log_total = peak + float(np.log(np.exp(row - np.float32(peak)).sum(dtype=np.float64)))
    ids = np.argpartition(row, -top)[-top:] if top > 0 else np.empty(0, np.int64)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    likeliest = [(i, piece(i), float(row[i]) - log_total) for i in ids.tolist()]
    return TokenLogprob(token, piece(token), float(row[token]) - log_total, likeliest)


def prompt_logprob(
    row: Logits, token: int, top: int, piece: Callable[[int], bytes]
) -> TokenLogprob:
    """Return `logprob` of a prompt token, with its rank (1 for the most probable token)."""
    entry = logprob(row, token, top, piece)
    entry.rank = int((row > row[token]).sum()) + 1
    return entry


def drawn_logprob(
    drawn: Distribution, token: int, top: int, piece: Callable[[int], bytes]
) -> TokenLogprob:
    """Return the log-probability with which `token` was drawn, and the `top` likeliest candidates."""
    order = np.argsort(-drawn.probs, kind="stable")[:top]
    pairs = zip(drawn.ids[order].tolist(), drawn.probs[order].tolist(), strict=True)
    likeliest = [(i, piece(i), math.log(prob)) for i, prob in pairs if prob > 0.0]
    probability = max(drawn.probability_of(token), 1e-300)
    return TokenLogprob(token, piece(token), math.log(probability), likeliest)
