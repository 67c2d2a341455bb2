"""An end to JSON's numbers.

A grammar lets a number have as many digits as the model likes, and a small model at temperature 0 likes to go
on: an answer of thirds is then cut off and is no JSON. Here a run of digits outside of strings ends after a
bounded count, wherever the grammar lets anything else come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.sampling.grammars.matcher import Mask, WholeMatcher

# Of an integer's or a fraction's digits: enough for 64-bit integers, and for any double that is written
# without an exponent.
MAX_DIGITS = 20
MAX_EXPONENT_DIGITS = 3
_DIGITS = frozenset(b"0123456789")


class Numerals:
    """What of a vocabulary concerns numbers. `leading`: the digits that each token begins with."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        counts = [len(piece) - len(piece.lstrip(b"0123456789")) for piece in pieces]
        self.leading: npt.NDArray[np.int32] = np.array(counts, dtype=np.int32)
        zeros = [bool(piece) and not piece.strip(b"0") for piece in pieces]
        self.zeros: Mask = np.array(zeros, dtype=np.bool_)


class _Position(NamedTuple):
    """Where in JSON an answer is. `left`: the digits that may follow in a number."""

    in_string: bool = False
    escaped: bool = False
    left: int = MAX_DIGITS


def _advance(position: _Position, piece: bytes) -> _Position:
    in_string, escaped, left = position
    for byte in piece:
        if escaped:
            escaped = False
        elif in_string:
            in_string, escaped = byte != 0x22, byte == 0x5C
        elif byte in _DIGITS:
            left = max(left - 1, 0)
        elif byte in b"eE":
            left = MAX_EXPONENT_DIGITS
        elif byte not in b"+-" or left != MAX_EXPONENT_DIGITS:
            in_string, left = byte == 0x22, MAX_DIGITS
    return _Position(in_string, escaped, left)


class BoundedNumbers:
    """The state of an answer in a JSON grammar, with bounded numbers. Used as a WholeMatcher is."""

    narrows = True

    def __init__(self, matcher: WholeMatcher, numerals: Numerals, begun: bytes = b"") -> None:
        """begun: what of the answer the matcher has consumed before."""
        self._matcher = matcher
        self._numerals = numerals
        self._positions = [_advance(_Position(), begun)]  # before each token, and now

    @property
    def ended(self) -> bool:
        return self._matcher.ended

    def begin_round(self) -> bool:
        return self._matcher.begin_round()

    def wait(self, seconds: float) -> None:
        self._matcher.wait(seconds)

    def mask(self) -> Mask:
        """As a WholeMatcher's, without the digits that are too many."""
        return self._bounded(self._matcher.mask())

    def consume(self, token: int) -> None:
        self._matcher.consume(token)
        self._positions.append(_advance(self._positions[-1], self._numerals.pieces[token]))

    def take_back(self, count: int) -> None:
        self._matcher.take_back(count)
        if count:
            del self._positions[-count:]

    def valid(self, tokens: Sequence[int]) -> int:
        count = self._matcher.valid(tokens)
        position = self._positions[-1]
        for at, token in enumerate(tokens[:count]):
            if not position.in_string and self._numerals.leading[token] > position.left:
                return self._valid_with_masks(tokens, at)
            position = _advance(position, self._numerals.pieces[token])
        return count

    def forced(self) -> list[int]:
        return self._matcher.forced()

    def _valid_with_masks(self, tokens: Sequence[int], sure: int) -> int:
        """As `valid`, one mask after the other behind the first `sure` tokens."""
        for token in tokens[:sure]:
            self.consume(token)
        count = sure
        while count < len(tokens) and self.mask()[tokens[count]]:
            self.consume(tokens[count])
            count += 1
        self.take_back(count)
        return count

    def _bounded(self, allowed: Mask) -> Mask:
        position = self._positions[-1]
        if position.in_string or position.left >= MAX_DIGITS:
            return allowed
        n_vocab = len(allowed)
        ending = allowed & (self._numerals.leading[:n_vocab] <= position.left)
        if ending.any():
            return ending
        if not position.left:  # a digit must come: zeros alone may lead to nothing else for ever
            other = allowed & ~self._numerals.zeros[:n_vocab]
            if other.any():
                return other
        return allowed
