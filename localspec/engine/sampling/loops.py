"""Find answers that repeat themselves without an end.

Small models, and large ones whose quantization is poor, fall into loops: the same tokens again and again,
or the same passages in changing order. Text may also repeat itself for good reasons: equal rows of a table,
equal lines of code, a list of zeros. So a repetition counts as a loop only after it was much longer than
what people ask for, earlier for sentences than for data, and earlier in thoughts, which nobody reads, than
in an answer.

Anything that changes counts as progress: a counter in each line, a number in each row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from localspec.engine.sampling.thoughts import ThoughtLimit
from localspec.protocol.settings import LoopGuardScope

_GRAM = 16  # tokens by which a passage is recognized
_MASK = (1 << 61) - 1  # of the rolling hash, modulo a Mersenne prime
_BASE = 0x1F3D5B79
MIN_WORDS = 3  # different words in a period of a sentence; fewer are data
_WINDOW = 1024  # tokens over which passages in changing order are counted
_KNOWN_SHARE = 0.9  # of its tokens that end a passage which was there MIN_COPIES times before
_MIN_COPIES = 3


class LoopLimits(NamedTuple):
    """A threshold for loops: so many repeated tokens, of a period that was repeated so often."""

    tokens: int
    repeats: int


# For a period of words, and for one of data.
THOUGHTS = LoopLimits(512, 6), LoopLimits(1024, 16)
TEXT = LoopLimits(1024, 12), LoopLimits(3072, 48)


class LoopDetector:
    """Watches the tokens of a text for a period that repeats, or for passages that come again and again.

    Each token costs about two microseconds, whatever the length of the text.
    """

    def __init__(
        self,
        limits: tuple[LoopLimits, LoopLimits],
        is_word: Callable[[int], bool],
        count_allowed: Callable[[], int],
        *,
        passages: bool,
    ) -> None:
        """Begin a text.

        is_word: whether a token has letters. count_allowed: returns how often a period may be repeated at
        least; called at most once, when there seems to be a loop. passages: whether passages in changing
        order are a loop, too.
        """
        self._words, self._data = limits
        self._is_word, self._counts_passages = is_word, passages
        self._count_allowed, self._allowed = count_allowed, -1
        self._tokens: list[int] = []
        self._hash, self._leaving = 0, pow(_BASE, _GRAM, _MASK)
        self._last: dict[int, int] = {}  # by passage, where it ended last
        self._copies: dict[int, int] = {}  # by passage, how often it was there
        self._period = self._matched = 0  # the last `_matched` tokens repeat those `_period` before
        self._known: deque[bool] = deque(maxlen=_WINDOW)
        self._n_known = 0

    def push(self, token: int) -> bool:
        """Add a token. Return whether the text is in a loop."""
        tokens, place = self._tokens, len(self._tokens)
        tokens.append(token)
        self._hash = (self._hash * _BASE + token + 1) % _MASK
        if place >= _GRAM:
            self._hash = (self._hash - (tokens[place - _GRAM] + 1) * self._leaving) % _MASK
        if self._period and tokens[place - self._period] == token:
            self._matched += 1
        else:
            self._period = self._matched = 0
        if place + 1 < _GRAM:
            return False
        before = self._last.get(self._hash)
        self._last[self._hash] = place
        if before is not None and not self._period:
            self._period, self._matched = place - before, _GRAM
        if self._counts_passages:
            copies = self._copies[self._hash] = self._copies.get(self._hash, 0) + (
                before is not None
            )
            if len(self._known) == _WINDOW:
                self._n_known -= self._known[0]
            is_known = copies >= _MIN_COPIES and self._is_prose(tokens[-_GRAM:])
            self._known.append(is_known)
            self._n_known += is_known
        return self._is_periodic() or self._n_known >= _KNOWN_SHARE * _WINDOW

    def _is_periodic(self) -> bool:
        matched, period = self._matched, self._period
        if not period or matched < self._words.tokens:
            return False
        is_prose = period >= MIN_WORDS and self._is_prose(self._tokens[-min(period, 64) :])
        limits = self._words if is_prose else self._data
        if matched < max(limits.tokens, limits.repeats * period):
            return False
        if self._allowed < 0:
            self._allowed = self._count_allowed()
        return matched >= self._allowed * period

    def _is_prose(self, tokens: Sequence[int]) -> bool:
        """Return whether some tokens are a sentence and not data: they have MIN_WORDS different words."""
        return sum(self._is_word(token) for token in set(tokens)) >= MIN_WORDS


def count_repeats(tokens: Sequence[int], is_break: Callable[[int], bool]) -> int:
    """Return how often the most frequent line of a prompt is there, which an answer may take up.

    is_break: whether a token ends a line.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    start = 0
    for end, token in enumerate(tokens, start=1):
        if is_break(token):
            counts[tuple(tokens[start:end])] += 1
            start = end
    return max(counts.values(), default=0)


class LoopGuard:
    """Follows an answer, to end its thoughts on request, and watches it for loops where that is wanted.

    found: where there was a loop, "thoughts" or "text"; "": nowhere so far.
    """

    def __init__(
        self,
        thoughts: ThoughtLimit | None,
        is_word: Callable[[int], bool],
        *,
        limits_thoughts: bool,
        watches: LoopGuardScope,
        count_allowed: Callable[[], int],
    ) -> None:
        """Begin an answer.

        thoughts: knows where thoughts are; None: there are none. limits_thoughts: the verifier tells it each
        token already, because their length is limited. count_allowed: as of `LoopDetector`.
        """
        self.found: Literal["", "thoughts", "text"] = ""
        self._thoughts, self._follows = thoughts, thoughts is not None and not limits_thoughts
        self._is_word, self._watches, self._count_allowed = is_word, watches, count_allowed
        self._detector: LoopDetector | None = None
        self._was_thinking: bool | None = None

    def push(self, token: int) -> bool:
        """Note a token of the answer. Return whether it is in a loop that was not found yet."""
        thoughts = self._thoughts
        if thoughts is not None and self._follows:
            thoughts.consume(token)
        thinks = thoughts is not None and thoughts.is_thinking
        if thinks is not self._was_thinking:
            self._was_thinking, self._detector = thinks, None
            if self._watches == "all" or (thinks and self._watches != "off"):
                limits = THOUGHTS if thinks else TEXT
                self._detector = LoopDetector(
                    limits, self._is_word, self._count_allowed, passages=thinks
                )
        if self._detector is None or not self._detector.push(token):
            return False
        self._detector = None
        self.found = "thoughts" if thinks else "text"
        return True

    def leave_thoughts(self) -> None:
        """Note that a call has ended the thoughts, if there are any."""
        if self._thoughts is not None:
            self._thoughts.leave()

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is in its thoughts, and they are not being ended."""
        return self._thoughts is not None and self._thoughts.is_open

    def close_thoughts(self) -> ThoughtLimit | None:
        """End the thoughts now. Return the guide that does it, if no verifier has it yet.

        From now on the verifier must tell it each token.
        """
        thoughts = self._thoughts
        if thoughts is None:
            return None
        thoughts.close()
        is_new, self._follows = self._follows, False
        return thoughts if is_new else None
