"""Apply the penalties on repetition: the repeat, frequency and presence penalties, and DRY.

DRY (p-e-w, 2024) penalises a token that would extend a repeated sequence, the more the longer the sequence.
As in llama.cpp, a repeated sequence does not reach back across a sequence breaker. A breaker is a text of one
or more tokens, and a token that contains a whole breaker is never penalised.

What is known of a text is kept and extended by each token, because a row would otherwise cost a pass over the
whole text in Python: 41 ms of DRY at 100 000 tokens, times 63 drafts. Now a row takes some 0.2 ms there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Logits, is_picture
from localspec.engine.sampling.settings import Settings
from localspec.errors import InvalidRequest

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_LN_MAX_FLOAT32 = 88.7228391
MAX_BREAKER_BYTES = 40  # A longer breaker is cut, as in llama.cpp.
MAX_TAIL_TOKENS = 20  # Tokens of a breaker after its first; more are cut, as in llama.cpp.
# A larger penalty would not matter, because every other token is likelier at this one. The bound keeps the
# logit finite, since a grammar may allow no other token.
MAX_DRY_PENALTY = 1e6
_MAX_COUNTED_TOKENS = 512  # A longer window is not counted anew for each row.
_MAX_LISTED_MATCHES = 256  # Among more, followers are found by a pass over the vocabulary.

# First token of a breaker → the sequences of tokens that complete it; an empty one if it is complete.
Breakers = Mapping[int, Sequence[Sequence[int]]]
_Ids = npt.NDArray[np.integer]
_NONE: _Ids = np.empty(0, np.int32)


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
        self.find = lru_cache(1)(self._find)

    def _find(self, texts: tuple[str, ...]) -> Breakers:
        """Return the breakers as tokens."""
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


class _Dry(NamedTuple):
    """What DRY needs to know of a text.

    places, lengths: where the last token stands before, and how many tokens up to there are those at the end.
    breaker, tail: where the last breaker begins (-1: nowhere), and how many tokens it has after its first.
    """

    places: _Ids
    lengths: _Ids
    breaker: int
    tail: int


class Penalties:
    """The penalties of one request, for the growing text of its sequence and for drafts after it.

    No penalty counts the pictures among the tokens.
    """

    def __init__(self, settings: Settings, breakers: Breakers) -> None:
        self._settings = settings
        self._tails = {token: {tuple(tail) for tail in tails} for token, tails in breakers.items()}
        # A token that contains a whole breaker is never penalised.
        self._never = np.array(
            [token for token, tails in self._tails.items() if () in tails], np.int32
        )
        self._tail_sizes = sorted({len(tail) for tails in self._tails.values() for tail in tails})
        last_n = settings.repeat_last_n
        self._counts_all = last_n < 0 or last_n > _MAX_COUNTED_TOKENS
        self._text: Sequence[int] = ()  # The list that `apply` was given.
        self._n_read = 0  # Tokens of it that are in `_ids`, or are pictures.
        self._drafts: list[int] = []  # Tokens in `_ids` after the text.
        self._ids = _NONE  # A buffer, of which `_n` tokens are used.
        self._n = 0
        # By token, within the window of the repeat penalties: how often it is there, and whether.
        self._counts, self._counted = _NONE, np.empty(0, np.bool_)
        self._scratch = _NONE  # Zeros, one for each place in `_ids` and one more.
        self._dry = self._dry_of_text = _Dry(_NONE, _NONE, -1, 0)

    def apply(self, row: Logits, text: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Apply every penalty to `row`, in place, for the token after `text` and `drafts`.

        If `text` is the list of the last call, it has only grown since.
        """
        if text is not self._text or len(text) < self._n_read:
            self._begin(text, len(row))
        self._follow(text, list(drafts))
        self._penalise_repeats(row)
        if self._settings.dry_multiplier > 0.0:
            self._penalise_sequences(row)

    def _begin(self, text: Sequence[int], n_vocab: int) -> None:
        """Read a whole text."""
        self._text, self._n_read, self._drafts = text, len(text), []
        tokens = np.array(text, np.int32)
        tokens = tokens[tokens >= 0]  # Places of pictures are negative.
        self._n = len(tokens)
        self._ids = np.concatenate([tokens, np.zeros(self._n + 1024, np.int32)])
        self._scratch = np.zeros(len(self._ids) + 1, np.int32)
        if self._counts_all:
            window = self._ids[self._window_start(self._settings.repeat_last_n) : self._n]
            self._counts = np.bincount(window, minlength=n_vocab)
            self._counted = self._counts > 0
        if self._settings.dry_multiplier > 0.0:
            ids: list[int] = tokens.tolist()
            matches = np.array(_prefix_matches(ids[::-1])[::-1], np.int32)
            places = np.flatnonzero(matches[:-1])
            self._dry = _Dry(places, matches[places], *_find_last_breaker(ids, self._tails))
        self._dry_of_text = self._dry

    def _follow(self, text: Sequence[int], drafts: list[int]) -> None:
        """Read what `text` has gained, and `drafts` after it."""
        new = [token for token in text[self._n_read :] if not is_picture(token)]
        self._n_read = len(text)
        known = len(self._drafts)
        if (new or drafts)[:known] != self._drafts:
            for token in reversed(self._drafts):
                if self._counts_all:
                    self._count(token, -1)
                self._n -= 1
            self._drafts, self._dry = [], self._dry_of_text
        if new:
            for token in new[len(self._drafts) :]:
                self._append(token)
            self._drafts, self._dry_of_text = [], self._dry
        for token in drafts[len(self._drafts) :]:
            self._append(token)
            self._drafts.append(token)

    def _append(self, token: int) -> None:
        if self._n == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._scratch = np.zeros(len(self._ids) + 1, np.int32)
        if self._settings.dry_multiplier > 0.0:
            self._extend_matches(token)
        self._ids[self._n] = token
        self._n += 1
        if self._counts_all:
            self._count(token, 1)

    def _count(self, token: int, change: int) -> None:
        """Count the last token, or no longer, and the one that it pushes out of the window."""
        before = self._window_start(self._settings.repeat_last_n) - 1
        pushed_out = [int(self._ids[before])] if before >= 0 else []
        self._counts[token] += change
        self._counts[pushed_out] -= change
        for changed in (token, *pushed_out):
            self._counted[changed] = self._counts[changed] > 0

    def _window_start(self, last_n: int) -> int:
        return max(self._n - last_n, 0) if last_n >= 0 else 0

    def _penalise_repeats(self, row: Logits) -> None:
        """Apply repeat, frequency and presence penalties over the last `repeat_last_n` tokens."""
        settings = self._settings
        if self._counts_all:
            ids = np.flatnonzero(self._counted)
            times = self._counts[ids]
        else:
            window = self._ids[self._window_start(settings.repeat_last_n) : self._n]
            counts = Counter(window.tolist())
            ids = np.fromiter(counts.keys(), np.int64)
            times = np.fromiter(counts.values(), np.int64)
        values = row[ids].astype(np.float64)
        values = np.where(
            values <= 0.0, values * settings.repeat_penalty, values / settings.repeat_penalty
        )
        values -= times * settings.frequency_penalty + settings.presence_penalty
        possible = values > -np.inf
        row[ids[possible]] = np.clip(values[possible], -_MAX_FLOAT32, _MAX_FLOAT32)

    def _extend_matches(self, token: int) -> None:
        """Extend the repeated sequences by a token that is about to be appended."""
        places, lengths, breaker, tail = self._dry
        # A sequence that ends at a place is one longer than the one that ended at the place before.
        self._scratch[places + 1] = lengths
        earlier = np.flatnonzero(self._ids[: self._n] == token)
        longer = self._scratch[earlier] + 1
        self._scratch[places + 1] = 0
        for size in self._tail_sizes:
            start = self._n - size
            if start < max(breaker, 0):
                break
            following = (*self._ids[start : self._n].tolist(), token)
            if following[1:] in self._tails.get(following[0], ()):
                breaker, tail = start, size
                break
        self._dry = _Dry(earlier, longer, breaker, tail)

    def _penalise_sequences(self, row: Logits) -> None:
        """Apply DRY over the last `dry_penalty_last_n` tokens.

        The penalty of a token is multiplier · base^(n - allowed), where the last n ≥ allowed tokens also
        stand before an earlier occurrence of it.
        """
        settings = self._settings
        base, allowed = settings.dry_base, settings.dry_allowed_length
        # Larger exponents would overflow float32. 0 means no bound, for a base of (almost) 1.
        max_power = int(_LN_MAX_FLOAT32 / math.log(base)) if base > 1.000001 else 0
        followers, lengths = self._find_followers(len(row))
        for length in np.unique(lengths).tolist():
            power = min(length - allowed, max_power) if max_power > 0 else length - allowed
            penalty = min(settings.dry_multiplier * base**power, MAX_DRY_PENALTY)
            row[followers[lengths == length]] -= penalty

    def _find_followers(self, n_vocab: int) -> tuple[_Ids, _Ids]:
        """Return the tokens that would extend a repeated sequence, and the length of the longest for each."""
        allowed, n = self._settings.dry_allowed_length, self._n
        begin = self._window_start(self._settings.dry_penalty_last_n)
        places, lengths, breaker, tail = self._dry
        limit = n - 1 - breaker - tail if breaker >= begin else n - begin
        if n - begin <= allowed or limit < allowed:
            return _NONE, _NONE
        lengths = np.minimum(lengths, np.minimum(places - (begin - 1), limit))
        long_enough = (places >= begin) & (lengths >= allowed)
        followers, lengths = self._ids[places[long_enough] + 1], lengths[long_enough]
        longest = np.full(n_vocab, -1, np.int32)  # By token.
        if not allowed:  # Any token may follow a sequence of none.
            longest[self._ids[begin + 1 : n]] = 0
        np.maximum.at(longest, followers, lengths)
        longest[self._never] = -1
        if allowed and len(followers) <= _MAX_LISTED_MATCHES:
            followers = np.array([t for t in {*followers.tolist()} if longest[t] >= 0], np.int32)
        else:
            followers = np.flatnonzero(longest >= 0)
        return followers, longest[followers]


def _find_last_breaker(
    ids: Sequence[int], tails: Mapping[int, set[tuple[int, ...]]]
) -> tuple[int, int]:
    """Return where the last breaker begins, -1 if there is none, and how many tokens follow its first."""
    for start in range(len(ids) - 1, -1, -1) if tails else ():
        following = [
            len(tail)
            for tail in tails.get(ids[start], ())
            if tail == tuple(ids[start + 1 : start + 1 + len(tail)])
        ]
        if following:
            return start, max(following)
    return -1, 0


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
