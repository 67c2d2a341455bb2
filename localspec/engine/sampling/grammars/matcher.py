"""Guides that apply one grammar to a whole answer, with bounded numbers if it is JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.sources import reason
from localspec.engine.sampling.guide import Guide
from localspec.errors import GrammarRejected

Mask = npt.NDArray[np.bool_]


class WholeMatcher(Guide):
    """A guide that applies a grammar from the first token of an answer on."""

    forbids_often = True

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self.matcher = matcher
        self.n_vocab = n_vocab
        self._tokens_after_end = 0  # Tokens consumed after the grammar had ended.

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self.matcher.is_stopped()

    def mask(self) -> Mask:
        """Return the mask as `Guide.mask` does, which allows all tokens once the grammar has ended.

        Raises:
            GrammarRejected: the grammar ran into its limits.
        """
        allowed: Mask = np.frombuffer(self.matcher.compute_logit_bias(), dtype=np.uint8) != 0
        self._check()
        return allowed[: self.n_vocab]

    def consume(self, token: int) -> None:
        if self.matcher.is_stopped():
            self._tokens_after_end += 1
            return
        self.matcher.consume_token(token)
        self._check()

    def take_back(self, count: int) -> None:
        consumed = max(count - self._tokens_after_end, 0)
        self._tokens_after_end = max(self._tokens_after_end - count, 0)
        self.matcher.rollback(consumed)
        self._check()

    def count_valid(self, tokens: Sequence[int]) -> int:
        return int(self.matcher.validate_tokens(list(tokens)))

    def forced_tokens(self) -> list[int]:
        return [int(token) for token in self.matcher.compute_ff_tokens()]

    def _check(self) -> None:
        if self.matcher.is_error():
            raise GrammarRejected(f"The grammar ran into its limits: {reason(self.matcher)}")


# Digits of an integer or a fraction. This suffices for 64-bit integers, and for the precision of any double.
MAX_DIGITS = 20
MAX_EXPONENT_DIGITS = 3
_DIGITS = frozenset(b"0123456789")


class Numerals:
    """The digits in a vocabulary's tokens.

    leading (n_vocab,): the number of digits that each token begins with. zeros (n_vocab,): whether each token
    consists of zeros only.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        counts = [len(piece) - len(piece.lstrip(b"0123456789")) for piece in pieces]
        self.leading: npt.NDArray[np.int32] = np.array(counts, dtype=np.int32)
        zeros = [bool(piece) and not piece.strip(b"0") for piece in pieces]
        self.zeros: Mask = np.array(zeros, dtype=np.bool_)


class _Position(NamedTuple):
    """A position within JSON text. digits_left: the number of digits that may still follow in a number."""

    in_string: bool = False
    escaped: bool = False
    digits_left: int = MAX_DIGITS


def _advance(position: _Position, piece: bytes) -> _Position:
    """Return the position after the bytes of a token."""
    in_string, escaped, digits_left = position
    for byte in piece:
        if escaped:
            escaped = False
        elif in_string:
            in_string, escaped = byte != 0x22, byte == 0x5C
        elif byte in _DIGITS:
            digits_left = max(digits_left - 1, 0)
        elif byte in b"eE":
            digits_left = MAX_EXPONENT_DIGITS
        elif byte not in b"+-" or digits_left != MAX_EXPONENT_DIGITS:
            in_string, digits_left = byte == 0x22, MAX_DIGITS
    return _Position(in_string, escaped, digits_left)


class BoundedNumbers(WholeMatcher):
    """A guide that applies a JSON grammar with bounded numbers.

    JSON grammars allow any number of digits, and a small model at temperature 0 may never end a number such
    as 1/3. The answer is then cut off and is not JSON. This guide ends a run of digits outside of strings
    after a bounded count, wherever the grammar allows anything else.
    """

    def __init__(self, whole: WholeMatcher, numerals: Numerals, begun: bytes = b"") -> None:
        """Take over the grammar of `whole`, which has consumed `begun`, the beginning of the answer."""
        super().__init__(whole.matcher, whole.n_vocab)
        self._numerals = numerals
        self._positions = [_advance(_Position(), begun)]  # Before each token and now.

    def mask(self) -> Mask:
        """Return the grammar's mask without tokens that have too many digits."""
        allowed, position = super().mask(), self._positions[-1]
        if position.in_string or position.digits_left >= MAX_DIGITS:
            return allowed
        n_vocab = len(allowed)
        ending = allowed & (self._numerals.leading[:n_vocab] <= position.digits_left)
        if ending.any():
            return ending
        if not position.digits_left:
            # The grammar requires a digit. Only zeros could lead to the same state for ever.
            nonzero = allowed & ~self._numerals.zeros[:n_vocab]
            if nonzero.any():
                return nonzero
        return allowed

    def consume(self, token: int) -> None:
        super().consume(token)
        self._positions.append(_advance(self._positions[-1], self._numerals.pieces[token]))

    def take_back(self, count: int) -> None:
        super().take_back(count)
        if count:
            del self._positions[-count:]

    def count_valid(self, tokens: Sequence[int]) -> int:
        n_valid, count, position = super().count_valid(tokens), 0, self._positions[-1]
        while count < n_valid and (
            position.in_string or self._numerals.leading[tokens[count]] <= position.digits_left
        ):
            position = _advance(position, self._numerals.pieces[tokens[count]])
            count += 1
        if count == n_valid:
            return count
        for token in tokens[:count]:
            self.consume(token)
        while count < len(tokens) and self.mask()[tokens[count]]:
            self.consume(tokens[count])
            count += 1
        self.take_back(count)
        return count
