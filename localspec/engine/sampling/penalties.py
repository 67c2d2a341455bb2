"""Penalties on repetition: the repeat, frequency and presence penalties, and DRY.

DRY (p-e-w, 2024) penalises a token that would extend a repeated sequence, the more the longer the sequence.
As in llama.cpp, a repeated sequence does not reach back across a sequence breaker. A breaker is a text of
one or more tokens, and a token that contains a whole breaker is never penalised.
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

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_LN_MAX_FLOAT32 = 88.7228391
MAX_BREAKER_BYTES = 40  # A longer breaker is cut, as in llama.cpp.
MAX_TAIL_TOKENS = 20  # Tokens of a breaker after its first; more are cut, as in llama.cpp.
# A larger penalty would not matter, because every other token is likelier at this one. The bound keeps the
# logit finite, since a grammar may allow no other token.
MAX_DRY_PENALTY = 1e6

# First token of a breaker → the sequences of tokens that complete it; an empty one if it is complete.
Breakers = Mapping[int, Sequence[Sequence[int]]]


def penalise(row: Logits, history: Sequence[int], settings: Settings, breakers: Breakers) -> None:
    """Apply every penalty of `settings` to `row`, in place; history: the tokens so far."""
    _penalise_repeats(row, history, settings)
    if settings.dry_multiplier > 0.0:
        _penalise_sequences(row, history, settings, breakers)


def _penalise_repeats(row: Logits, history: Sequence[int], settings: Settings) -> None:
    """Apply repeat, frequency and presence penalties over the last `repeat_last_n` tokens, in place."""
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
    row[ids[possible]] = np.clip(values[possible], -_MAX_FLOAT32, _MAX_FLOAT32)


def _penalise_sequences(
    row: Logits, history: Sequence[int], settings: Settings, breakers: Breakers
) -> None:
    """Apply DRY over the last `dry_penalty_last_n` tokens, in place."""
    last_n = settings.dry_penalty_last_n
    span = history if last_n < 0 or last_n >= len(history) else history[len(history) - last_n :]
    multiplier, base = settings.dry_multiplier, settings.dry_base
    for token, penalty in dry_penalties(
        span, breakers, multiplier, base, settings.dry_allowed_length
    ).items():
        row[token] -= penalty


class BreakerTable:
    """An index of the tokens of a vocabulary that begin a breaker, built at its first use."""

    def __init__(
        self, words: Callable[[], Sequence[bytes]], tokenize: Callable[[bytes], list[int]]
    ) -> None:
        """Store how to read the vocabulary, without reading it yet.

        words: returns the bytes of every token, as it reads at the start of a text. tokenize: adds no
        special tokens.
        """
        self._words = words
        self._tokenize = tokenize
        self._backwards: list[tuple[bytes, int]] = []
        self._last: tuple[tuple[str, ...], Breakers] = ((), {})

    def find(self, texts: tuple[str, ...]) -> Breakers:
        """Return the breakers as tokens; the result of the last call is remembered.

        Raises:
            InvalidRequest: a breaker is not valid Unicode.
        """
        if texts == self._last[0]:
            return self._last[1]
        breakers: dict[int, list[Sequence[int]]] = {}
        for text in texts:
            try:
                # llama.cpp reads C strings, which end at a NUL.
                raw = text.encode().split(b"\0")[0][:MAX_BREAKER_BYTES]
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"A sequence breaker is not valid Unicode: {error.reason}.",
                    param="dry_sequence_breakers",
                ) from error
            for token, tail in self._overlaps(raw):
                breakers.setdefault(token, []).append(tail)
        self._last = texts, breakers
        return breakers

    def _overlaps(self, breaker: bytes) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield each token that contains or begins `breaker`, with the tokens that complete it.

        A token that contains the whole breaker has no such tokens. One that ends with the beginning of
        the breaker has those of the remaining text.
        """
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
            tail = self._tokenize(breaker[size:])[:MAX_TAIL_TOKENS]
            for index in range(bisect_left(self._backwards, (beginning, 0)), len(self._backwards)):
                word, token = self._backwards[index]
                if not word.startswith(beginning):
                    break
                if breaker not in words[token]:
                    yield token, tail


def dry_penalties(
    history: Sequence[int], breakers: Breakers, multiplier: float, base: float, allowed: int
) -> dict[int, float]:
    """Return DRY's penalty for each token that would continue a repeated sequence.

    The penalty is multiplier · base^(n - allowed), where the last n ≥ allowed tokens of `history` also stand
    before an earlier occurrence of the token.
    """
    backwards = list(reversed(history))
    if len(backwards) <= allowed:
        return {}
    limit = _count_since_breaker(backwards, breakers)
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for index, length in enumerate(_prefix_matches(backwards)):
        length = min(length, limit)
        if index and length >= allowed:
            follower = backwards[index - 1]
            longest[follower] = max(longest.get(follower, 0), length)
    # Larger exponents would overflow float32. 0 means no bound, for a base of (almost) 1.
    max_power = int(_LN_MAX_FLOAT32 / math.log(base)) if base > 1.000001 else 0
    penalties = {}
    for token, length in longest.items():
        if any(not tail for tail in breakers.get(token, ())):
            continue
        power = min(length - allowed, max_power) if max_power > 0 else length - allowed
        penalties[token] = min(multiplier * base**power, MAX_DRY_PENALTY)
    return penalties


def _count_since_breaker(backwards: Sequence[int], breakers: Breakers) -> int:
    """Return how many tokens follow the last breaker; backwards: the tokens so far, last one first."""
    for index, token in enumerate(backwards):
        longest = -1
        for tail in breakers.get(token, ()):
            size = len(tail)
            if longest < size <= index and list(tail) == backwards[index - size : index][::-1]:
                longest = size
        if longest >= 0:
            return index - longest
    return len(backwards)


def _prefix_matches(items: Sequence[int]) -> list[int]:
    """Return the Z-function: for each place, how many items from there on equal those from the start."""
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
