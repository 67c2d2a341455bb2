"""What makes tokens less likely that repeat what was said: repeat, frequency, presence, and DRY.

DRY (p-e-w, 2024): a token that would go on with a repeat becomes less likely the longer the repeat. As in
llama.cpp's sampler of that name, a repeat does not reach back across a sequence breaker, which is a text
of one or of several tokens, and a token that holds a whole breaker is spared itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from localspec.engine.llama import Logits
from localspec.engine.sampling.settings import Settings
from localspec.errors import InvalidRequest

_LARGEST = float(np.finfo(np.float32).max)
MAX_BYTES = 40  # of a breaker; what is beyond is left out
MAX_TAIL = 20  # tokens of a breaker after its first
# More would change nothing: every other token is likelier by then. A grammar may leave no other.
MOST = 1e6
_LOG_LARGEST = 88.7228391  # ln of the largest float32

# First token of a breaker → the tokens that may follow it, none where it holds the whole.
Breakers = Mapping[int, Sequence[Sequence[int]]]


def penalise(row: Logits, history: Sequence[int], settings: Settings, breakers: Breakers) -> None:
    """Every penalty that the settings ask for over the tokens so far, in place."""
    _penalise_repeats(row, history, settings)
    if settings.dry_multiplier > 0.0:
        _penalise_sequences(row, history, settings, breakers)


def _penalise_repeats(row: Logits, history: Sequence[int], settings: Settings) -> None:
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


def _penalise_sequences(
    row: Logits, history: Sequence[int], settings: Settings, breakers: Breakers
) -> None:
    """DRY over the last `dry_penalty_last_n` tokens, in place."""
    last = settings.dry_penalty_last_n
    span = history if last < 0 or last >= len(history) else history[len(history) - last :]
    multiplier, base = settings.dry_multiplier, settings.dry_base
    for token, lost in dry_penalties(
        span, breakers, multiplier, base, settings.dry_allowed_length
    ).items():
        row[token] -= lost


class BreakerTable:
    """Which tokens of a vocabulary begin a breaker. Reads the vocabulary once, when first asked."""

    def __init__(
        self, words: Callable[[], Sequence[bytes]], tokenize: Callable[[bytes], list[int]]
    ) -> None:
        """words: each token as it reads alone at the start of a text. tokenize: nothing added to it."""
        self._words = words
        self._tokenize = tokenize
        self._backwards: list[tuple[bytes, int]] = []
        self._last: tuple[tuple[str, ...], Breakers] = ((), {})

    def find(self, texts: tuple[str, ...]) -> Breakers:
        """The breakers in tokens; the last ones asked for are remembered.

        Raises:
            InvalidRequest: one is no valid Unicode.
        """
        if texts == self._last[0]:
            return self._last[1]
        found: dict[int, list[Sequence[int]]] = {}
        for text in texts:
            try:
                # llama.cpp takes C strings
                raw = text.encode().split(b"\0")[0][:MAX_BYTES]
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"A sequence breaker is not valid Unicode: {error.reason}.",
                    param="dry_sequence_breakers",
                ) from error
            for token, tail in self._overlaps(raw):
                found.setdefault(token, []).append(tail)
        self._last = texts, found
        return found

    def _overlaps(self, breaker: bytes) -> Iterator[tuple[int, Sequence[int]]]:
        """Tokens that hold the breaker; those that end with its beginning, and its rest as tokens."""
        if not breaker:
            return
        words = self._words()
        if len(breaker) > 1 and not self._backwards:
            self._backwards = sorted((word[::-1], token) for token, word in enumerate(words))
        for token, word in enumerate(words):
            if breaker in word:
                yield token, ()
        for size in range(1, len(breaker)):
            beginning = breaker[:size][::-1]
            tail = self._tokenize(breaker[size:])[:MAX_TAIL]
            for at in range(bisect_left(self._backwards, (beginning, 0)), len(self._backwards)):
                word, token = self._backwards[at]
                if not word.startswith(beginning):
                    break
                if breaker not in words[token]:
                    yield token, tail


def dry_penalties(
    history: Sequence[int], breakers: Breakers, multiplier: float, base: float, allowed: int
) -> dict[int, float]:
    """What tokens lose: multiplier · base^(n - allowed), where n ≥ allowed tokens at the end of
    `history` stood before them elsewhere in it.
    """
    backwards = list(reversed(history))
    if len(backwards) <= allowed:
        return {}
    limit = _limit(backwards, breakers)
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for at, length in enumerate(_prefix_matches(backwards)):
        length = min(length, limit)
        if at and length >= allowed:
            follower = backwards[at - 1]
            longest[follower] = max(longest.get(follower, 0), length)
    most = int(_LOG_LARGEST / math.log(base)) if base > 1.000001 else 0
    lost = {}
    for token, length in longest.items():
        if any(not tail for tail in breakers.get(token, ())):
            continue
        power = min(length - allowed, most) if most > 0 else length - allowed
        lost[token] = min(multiplier * base**power, MOST)
    return lost


def _limit(backwards: Sequence[int], breakers: Breakers) -> int:
    """How many tokens stand after the last breaker."""
    for at, token in enumerate(backwards):
        longest = -1
        for tail in breakers.get(token, ()):
            size = len(tail)
            if longest < size <= at and list(tail) == backwards[at - size : at][::-1]:
                longest = size
        if longest >= 0:
            return at - longest
    return len(backwards)


def _prefix_matches(items: Sequence[int]) -> list[int]:
    """Z-function: how many items from each place on equal those from the start."""
    n = len(items)
    z = [0] * n
    left = right = 0
    for i in range(1, n):
        k = min(right - i, z[i - left]) if i < right else 0
        while i + k < n and items[k] == items[i + k]:
            k += 1
        z[i] = k
        if i + k > right:
            left, right = i, i + k
    return z
