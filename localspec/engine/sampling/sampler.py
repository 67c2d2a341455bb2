"""From one row of logits to a small distribution, in llama.cpp's order and meaning.

logit bias → repeat, frequency and presence penalties → DRY → top-k → typical → top-p → min-p →
temperature. Everything after the penalties works on a few candidates: with top-k the row is scanned
for its top and never sorted or exponentiated whole, so that a 150 k vocabulary costs a fraction of a
millisecond. A sampler holds no history of its own: it is given the tokens so far, so that a rejected
draft leaves nothing behind.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from localspec.engine.sampling.dry import Breakers, penalties
from localspec.engine.sampling.noise import delays
from localspec.protocol.frames import Sampling, TokenLogprob
from localspec.protocol.sampling import parameters

Logits = npt.NDArray[np.float32]
# Nats below the top (at temperature 1) from which on a token is no candidate: e^-30 is 1e-13, which
# even a long answer does not meet, and a peaked row of a large vocabulary has nothing else to offer.
NEVER = 30.0
_LARGEST = float(np.finfo(np.float32).max)


class Distribution(NamedTuple):
    """Candidate ids (n,) and their probabilities (n,), which sum to one."""

    ids: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]

    def of(self, token: int) -> float:
        """The probability of one token; 0 if it is no candidate."""
        at = np.flatnonzero(self.ids == token)
        return float(self.probs[at[0]]) if len(at) else 0.0

    def first(self, delays: npt.NDArray[np.float64]) -> int:
        """The token that comes first where each waits `delays` (n,) over its probability.

        With exponential delays that is a draw from the distribution (the Gumbel-max rule). Unlike a
        walk along cumulated probabilities it knows no order: a probability that changes in its last
        bits, or a candidate more or less at the edge of top-p, changes only a draw between that
        token and the one that comes first.
        """
        with np.errstate(divide="ignore"):  # what has no probability never comes
            return int(self.ids[(delays / self.probs).argmin()])

    def pick(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulated probabilities."""
        total = np.cumsum(self.probs)
        at = int(np.searchsorted(total, uniform * total[-1], side="right"))
        return int(self.ids[min(at, len(self.ids) - 1)])


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling as it will be done; every default is llama.cpp's."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    infill: bool = False
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.dry_multiplier > 0.0
        )


def model_defaults(metadata: Callable[[str], str | None]) -> dict[str, float]:
    """The settings a model's file asks for; left out is a value that no request may have either."""
    found: dict[str, float] = {}
    for name, kind, also in parameters():
        text = metadata(f"general.sampling.{also.gguf}") if also.gguf else None
        if text is None:
            continue
        try:
            value = float(text)
            whole = isinstance(getattr(Settings(), name), int)
            found[name] = msgspec.convert(int(value) if whole else value, kind)
        except (ValueError, OverflowError):  # no number, none that is finite, or beyond the limits
            continue
    return found


def resolve(asked: Sampling, defaults: Mapping[str, float]) -> Settings:
    """What was asked, over what the model's file says, over llama.cpp's defaults."""
    told: Mapping[str, Any] = defaults
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in Settings.__dataclass_fields__
        if (value := getattr(asked, name)) is not None
    }
    if chosen.get("dry_base", 1.0) < 1.0:  # as llama-server
        del chosen["dry_base"]
    return replace(Settings(), **{**told, **chosen})


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
        # Greedy is the likeliest of what is left, so the narrowing must see more than one.
        self._open = replace(settings, temperature=1.0) if settings.greedy else settings
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed & 0xFFFFFFFFFFFFFFFF))
        self._breakers = breakers or {}
        self._gap = 10.0  # how far below the top the k-th candidate was last time, in nats
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
            _penalise(row, history, settings)
            if settings.dry_multiplier > 0.0:
                _dry(row, history, settings, self._breakers)
        if mask is not None:
            row[~mask] = -np.inf
            if row.max() == -np.inf:  # the grammar leaves only what a bias forbids: it goes before
                row[mask] = 0.0
        return row

    def distribution(self, row: Logits) -> Distribution:
        """The distribution to draw from, of an adjusted row; one certain token when greedy."""
        greedy = self.settings.greedy
        if greedy and self._narrowed is None:
            return _certain(int(row.argmax()))
        found = self._truncated(row, self._open)
        if self._narrowed is not None:
            found = self._narrowed(found)
        return _certain(int(found.ids[found.probs.argmax()])) if greedy else found

    def sample(self, row: Logits, place: int) -> int:
        """One token from an adjusted row. place: how many tokens of the answer come before it."""
        if self.settings.greedy:
            return int(self.distribution(row).ids[0]) if self._narrowed else int(row.argmax())
        found = self.distribution(row)
        return found.first(delays(self.seed, place, found.ids))

    def _truncated(self, row: Logits, settings: Settings) -> Distribution:
        """The candidates that top-k, typical, top-p and min-p leave, at a temperature above 0."""
        k = settings.top_k
        if 0 < k < len(row):
            ids = self._top(row, k)
            below = _below(row, ids)
            return _truncated(ids, below, float(np.exp(below).sum()), settings)
        if settings.top_p >= 1.0 and settings.min_p <= 0.0 and settings.typical_p >= 1.0:
            ids = np.flatnonzero(row > -np.inf)  # nothing is cut, so nothing is sorted
            return Distribution(ids, _tempered(_below(row, ids), settings.temperature))
        with np.errstate(over="ignore"):  # further below than float32 reaches: never drawn
            everything = np.exp(row - row.max())
        total = float(everything.sum(dtype=np.float64))
        ids = _head(everything, total, settings)
        return _truncated(ids, _below(row, ids), total, settings)

    def _top(self, row: Logits, k: int) -> npt.NDArray[np.int64]:
        """Ids of the k highest logits, unordered. Looks only at those near the top: how near is
        remembered from the row before, and widened until there are k, or what is left is NEVER drawn.
        """
        top = float(row.max())
        never = NEVER * max(self.settings.temperature, 1.0)
        ids = np.flatnonzero(row >= top - self._gap)
        while len(ids) < k and self._gap < never:
            self._gap = min(self._gap * 1.5, never)
            ids = np.flatnonzero(row >= top - self._gap)
        if len(ids) > k:
            ids = ids[np.argpartition(row[ids], -k)[-k:]]
            self._gap = top - float(row[ids].min()) + 1.0  # rows of one text are much alike
        return ids[row[ids] > -np.inf]


def _below(row: Logits, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """How far the logits (n,) of `ids` are below the row's highest, as numbers up to 0."""
    return np.asarray(row[ids].astype(np.float64) - float(row.max()))


def _certain(token: int) -> Distribution:
    return Distribution(np.array([token]), np.ones(1))


def _head(weights: Logits, total: float, settings: Settings) -> npt.NDArray[np.int64]:
    """Ids among which top-p and min-p will cut, unordered, where top-k is off.

    weights (n_vocab,): exp(logit - highest); total: their sum. A typical set can lie anywhere, so
    it needs all ids.
    """
    if settings.typical_p >= 1.0 and settings.min_p > 0.0:
        return np.flatnonzero(weights >= settings.min_p * (1 - 1e-6))
    if settings.typical_p >= 1.0 and settings.top_p < 1.0:
        floor = 1e-3
        while floor > 1e-30:
            ids = np.flatnonzero(weights >= floor)
            if float(weights[ids].sum(dtype=np.float64)) >= settings.top_p * total:
                return ids
            floor *= 0.05
    return np.flatnonzero(weights > 0.0)


def _truncated(
    ids: npt.NDArray[np.int64],
    below: npt.NDArray[np.float64],
    total: float,
    settings: Settings,
) -> Distribution:
    """Sort, then typical → top-p → min-p → temperature, each on what the one before left.

    below (n,): logit - highest of the ids; total: the sum of exp(below) that makes probabilities.
    """
    order = np.argsort(-below, kind="stable")
    ids, below = ids[order], below[order]
    weights = np.exp(below)
    if settings.typical_p < 1.0:
        probs = weights / total
        surprise = -np.log(np.maximum(probs, 1e-300))
        rank = np.argsort(np.abs(surprise - (probs * surprise).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(probs[rank]), settings.typical_p)) + 1
        keep = np.sort(rank[:count])
        ids, below, weights = ids[keep], below[keep], weights[keep]
        total = float(weights.sum())
    if settings.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(weights / total), settings.top_p)) + 1
        ids, below, weights = ids[:count], below[:count], weights[:count]
    if settings.min_p > 0.0:
        kept = weights >= weights[0] * settings.min_p
        ids, below = ids[kept], below[kept]
    return Distribution(ids, _tempered(below, settings.temperature))


def _tempered(below: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
    """Probabilities (n,) of logits at a temperature above 0."""
    # A temperature that is nothing in float32 is as good as nothing, and divides a finite number.
    weights = np.exp((below - below.max()) / max(temperature, 1e-30))
    return np.asarray(weights / weights.sum())


def _penalise(row: Logits, history: Sequence[int], settings: Settings) -> None:
    """Repeat, frequency and presence penalties over the last `repeat_last_n` tokens, in place."""
    span = len(history) if settings.repeat_last_n < 0 else settings.repeat_last_n
    if span == 0:
        return
    counts = Counter(history[-span:])
    ids = np.fromiter(counts.keys(), dtype=np.int64)
    times = np.fromiter(counts.values(), dtype=np.float64)
    values = row[ids].astype(np.float64)
    values = np.where(
        values <= 0.0, values * settings.repeat_penalty, values / settings.repeat_penalty
    )
    values -= times * settings.frequency_penalty + settings.presence_penalty
    possible = values > -np.inf
    row[ids[possible]] = np.clip(values[possible], -_LARGEST, _LARGEST)


def _dry(row: Logits, history: Sequence[int], settings: Settings, breakers: Breakers) -> None:
    """DRY over the last `dry_penalty_last_n` tokens, in place."""
    last = settings.dry_penalty_last_n
    span = history if last < 0 or last >= len(history) else history[len(history) - last :]
    multiplier, base = settings.dry_multiplier, settings.dry_base
    for token, lost in penalties(
        span, breakers, multiplier, base, settings.dry_allowed_length
    ).items():
        row[token] -= lost


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
