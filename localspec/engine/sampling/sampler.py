"""From one row of logits to a small distribution, in llama.cpp's order and meaning.

logit bias → repeat, frequency and presence penalties → DRY → top-n-sigma → top-k → typical → top-p →
min-p → XTC → temperature, which may hang on the entropy. Everything after the penalties works on a few
candidates: with top-k the row is scanned for its top and never sorted or exponentiated whole, so that a
150 k vocabulary costs a fraction of a millisecond. A sampler holds no history of its own: it is given the
tokens so far, so that a rejected draft leaves nothing behind.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Logits
from localspec.engine.sampling.distribution import Distribution, Truncation, chance, delays
from localspec.engine.sampling.penalties import Breakers, penalise
from localspec.engine.sampling.settings import Settings
from localspec.protocol.frames import TokenLogprob


class Sampler:
    """Samples for one request: settings, randomness, and DRY's breakers in tokens.

    A token is drawn with randomness of its place in the answer, so that plain and speculative decoding
    under the `match` rule draw alike. The stream of `uniform` is for drafts and the rejection rule.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        breakers: Breakers | None = None,
        narrowed: Callable[[Distribution], Distribution] | None = None,
    ) -> None:
        """narrowed: what is left of the candidates, after all that the settings say but temperature 0."""
        self.settings = settings
        self._narrowed = narrowed
        # Is the likeliest of all what is chosen, whatever else there is?
        self._best = settings.greedy and narrowed is None and not settings.excludes
        # Greedy is the likeliest of what is left, so the narrowing must see more than one.
        self._truncation = Truncation(
            replace(settings, temperature=1.0) if settings.greedy else settings
        )
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed & 0xFFFFFFFFFFFFFFFF))
        self._breakers = breakers or {}
        self._bias_ids = np.fromiter(settings.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(settings.logit_bias.values(), dtype=np.float32)

    def uniform(self) -> float:
        return float(self._random.random())

    def adjusted(
        self, row: Logits, history: Sequence[int], mask: npt.NDArray[np.bool_] | None = None
    ) -> Logits:
        """`row` after bias, penalties and a grammar's mask; the same array where none applies."""
        settings = self.settings
        if not (len(self._bias) or settings.penalised or mask is not None):
            return row
        row = row.copy()
        if len(self._bias):
            row[self._bias_ids] += self._bias
        if settings.penalised:
            penalise(row, history, settings, self._breakers)
        if mask is not None:
            row[~mask] = -np.inf
            if row.max() == -np.inf:  # the grammar leaves only what a bias forbids: it goes before
                row[mask] = 0.0
        return row

    def distribution(self, row: Logits, place: int = 0) -> Distribution:
        """The distribution to draw from, of an adjusted row; one certain token when greedy.

        place: how many tokens of the answer come before. XTC is on or off by a draw for each, the same for
        drafts and for the target: for either case what is drawn is the target's, so it is altogether.
        """
        if self._best:
            return Distribution.certain(int(row.argmax()))
        asked = self.settings
        without = asked.excludes and chance(self.seed, place) <= asked.xtc_probability
        found = self._truncation.distribution(row, without_top=without)
        if self._narrowed is not None:
            found = self._narrowed(found)
        return Distribution.certain(int(found.ids[found.probs.argmax()])) if asked.greedy else found

    def sample(self, row: Logits, place: int) -> int:
        """One token from an adjusted row. place: how many tokens of the answer come before it."""
        if self._best:
            return int(row.argmax())
        found = self.distribution(row, place)
        if self.settings.greedy:
            return int(found.ids[0])
        return found.first(delays(self.seed, place, found.ids))


def logprob(row: Logits, token: int, top: int, piece: Callable[[int], bytes]) -> TokenLogprob:
    """The target's own log-probability of `token` (temperature 1, before any penalty), and the
    `top` most probable tokens beside it.
    """
    peak = float(row.max())
    log_total = peak + float(np.log(np.exp(row - np.float32(peak)).sum(dtype=np.float64)))
    best: list[tuple[int, bytes, float]] = []
    if top > 0:
        ids = np.argpartition(row, -top)[-top:]
        for i in ids[np.argsort(-row[ids], kind="stable")]:
            best.append((int(i), piece(int(i)), float(row[i]) - log_total))
    return TokenLogprob(token, piece(token), float(row[token]) - log_total, best)


def prompt_logprob(
    row: Logits, token: int, top: int, piece: Callable[[int], bytes]
) -> TokenLogprob:
    """Return `logprob` of a token that was given, and how many tokens are likelier than it, plus one."""
    entry = logprob(row, token, top, piece)
    entry.rank = int((row > row[token]).sum()) + 1
    return entry


def drawn_logprob(
    drawn: Distribution, token: int, top: int, piece: Callable[[int], bytes]
) -> TokenLogprob:
    """The log-probability with which `token` was drawn, and the `top` likeliest candidates of the draw."""
    order = np.argsort(-drawn.probs, kind="stable")[:top]
    best = [
        (int(drawn.ids[at]), piece(int(drawn.ids[at])), math.log(drawn.probs[at]))
        for at in order
        if drawn.probs[at] > 0.0
    ]
    return TokenLogprob(token, piece(token), math.log(max(drawn.of(token), 1e-300)), best)
