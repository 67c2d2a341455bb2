"""N-gram lookup: what followed the last tokens when they occurred before.

They are looked up in the prompt, the answer so far, a text that the client predicts, and earlier requests
(Saxena 2023, "prompt lookup decoding"; OpenAI's `prediction`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import is_picture
from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.cost import MAX_ROUND_ROWS
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources

# The effect of each threshold is measured with `scripts/bench tasks replay`: 12 answers of Qwen2.5-Coder
# 0.5B and 48 commits and pages, each with nothing learned before. "-2.3 %" is the change of the geometric
# mean of the speeds if the value is changed as stated, "worst" that of the answer that loses most.
#
# | Threshold             | Value | Changed to | Mean   | Worst |
# |-----------------------|------:|-----------:|-------:|------:|
# | GRAM_TOKENS           |     3 |          2 | -0.8 % | -10 % |
# |                       |       |          4 | -0.1 % |  -3 % |
# | MAX_MATCH_TOKENS      |    48 |         24 | -2.3 % | -13 % |
# | MAX_POSITIONS         |     8 |          1 | -0.2 % |  -3 % |
# | MAX_LOOKUP_TOKENS     |    63 |         31 | -1.4 % |  -9 % |
# | MAX_DEPARTURE_TOKENS  |    24 |    0: never| -0.4 % | -18 % |
# | MAX_CHANGES           |    64 |    0: none | -0.6 % | -21 % |
# | DISPUTE_MARGIN_TOKENS |     4 |          0 | -0.2 % |  -3 % |

GRAM_TOKENS = 3  # shortest match worth following
MAX_MATCH_TOKENS = 48  # a longer match is not measured, because it is no more reliable
MAX_POSITIONS = 8  # latest occurrences that are compared for the longest match
# Tokens of a copied passage that are verified in one pass. Kernels work in groups of rows, and a pass of 64
# rows fills its groups.
MAX_LOOKUP_TOKENS = MAX_ROUND_ROWS - 1
MAX_DEPARTURE_TOKENS = 24  # an answer that left a text must be back within so many tokens of either
RETURN_TOKENS = 3  # tokens in a row that show that it is back
MAX_CHANGES = 64  # remembered per answer
DISPUTE_MARGIN_TOKENS = 4  # a match must be longer by this where another one continues differently
KEY_TOKENS = 6  # shortest match in a text of another request
CAPACITY_TOKENS = 1 << 20  # of other requests' texts in memory; with their index 16 MiB
MAX_PLACES = 64  # with one key, the latest
WINDOW_TOKENS = 512  # returned of what followed in another request's text
_CONTEXT_TOKENS = 64  # returned before them, to measure the match
# The bucket of acceptance of each strength of a match. Bucket 0 is for places where a change is expected.
_STRENGTH_EDGES = (2, 3, 4, 5, 9, 12, 16, 24, 48)
_BUCKETS = [sum(strength >= edge for edge in _STRENGTH_EDGES) for strength in range(49)]


# The calibration of n-gram drafts that fits any pair, as from `Calibration.as_dict`.
#
# Written by `scripts/bench tasks replay FOLDER --learn`, from answers of Qwen2.5-Coder 0.5B and from commits
# and pages, which `scripts/bench tasks record FOLDER --learned` and `history FOLDER` had put there.
NGRAM_CALIBRATION = json.loads(Path(__file__).with_suffix(".json").read_bytes())


# The memory of earlier requests' tokens, to draft from.
#
# Its size is bounded, and a conversation's tokens are forgotten with the conversation.


_HASH_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)  # fmt: skip
_HASH_FACTOR_INTS = [int(factor) for factor in _HASH_FACTORS]
_WORD_MASK = (1 << 64) - 1


class _Span(NamedTuple):
    """Where the tokens of one request lie, and the conversation that they belong to."""

    start: int
    end: int
    conversation: str | None


class NgramMemory:
    """A ring of the last CAPACITY_TOKENS tokens. A lookup takes microseconds.

    A position is found by the hash of its last KEY_TOKENS tokens, and of the latest MAX_PLACES with that hash
    the one with the longest match: so a question that was asked before finds its own answer, however often
    others ended in the same words. The tokens are compared, so that nothing that was overwritten or forgotten
    is ever found.
    """

    def __init__(self, capacity: int = CAPACITY_TOKENS) -> None:
        self._capacity = capacity
        self._bits = max(capacity.bit_length(), 8)
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)  # allocated at first use
        # Per hash, the end of a key; 0: none.
        self._places: npt.NDArray[np.int32] = np.empty(0, np.int32)
        # Per end of a key, that of the same hash before it.
        self._earlier: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._next = 0
        self._spans: deque[_Span] = deque()

    def add(self, tokens: Sequence[int], conversation: str | None) -> None:
        """Add the tokens of a request, or the end of them if they exceed the capacity."""
        text = np.array(tokens[-self._capacity :], np.int32)
        if len(text) <= KEY_TOKENS:
            return
        if not len(self._tokens):
            self._tokens = np.full(self._capacity, -1, np.int32)
            self._places = np.zeros(1 << self._bits, np.int32)
            self._earlier = np.zeros(self._capacity, np.int32)
        if self._next + len(text) > self._capacity:
            self._overwrite(self._next, self._capacity)
            self._next = 0
        start, end = self._next, self._next + len(text)
        self._overwrite(start, end)
        self._spans.append(_Span(start, end, conversation))
        self._tokens[start:end] = text
        if end < self._capacity:
            self._tokens[end] = -1  # the tokens behind belong to another text
        wide = text.astype(np.uint64)
        # Nothing follows the key at the very end.
        hashes = np.zeros(len(text) - KEY_TOKENS, np.uint64)
        for offset in range(KEY_TOKENS):
            hashes += wide[offset : offset + len(hashes)] * _HASH_FACTORS[offset]
        slots = hashes >> np.uint64(64 - self._bits)
        order = np.argsort(slots, kind="stable")
        slots, ends = slots[order], (order + start + KEY_TOKENS).astype(np.int32)
        earlier = self._places[slots]
        repeated = np.flatnonzero(slots[1:] == slots[:-1])
        earlier[repeated + 1] = ends[repeated]
        self._earlier[ends] = earlier
        self._places[slots] = ends  # of equal slots the last one stays
        self._next = end

    def _overwrite(self, start: int, end: int) -> None:
        """Remove all requests with tokens in [start, end), which are the oldest."""
        while self._spans and start < self._spans[0].end and self._spans[0].start < end:
            old = self._spans.popleft()
            self._tokens[old.start : old.end] = -1

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int, int] | None:
        """Find the longest match with the last tokens.

        Returns a text, the position in it after the match, and the length of the match.
        """
        if not self._spans or len(tokens) < KEY_TOKENS:
            return None
        key = zip(tokens[-KEY_TOKENS:], _HASH_FACTOR_INTS, strict=True)
        hashed = sum(token * factor for token, factor in key) & _WORD_MASK
        if not (listed := self._list_places(hashed >> (64 - self._bits))):
            return None
        # A row for each place, with its last tokens in reverse.
        places = np.array(listed)
        last = np.array(tokens[: -MAX_MATCH_TOKENS - 1 : -1])
        at = places[:, None] - np.arange(1, len(last) + 1)
        earlier = np.where(at >= 0, self._tokens[at], -1)
        lengths = np.logical_and.accumulate((earlier == last) & (earlier >= 0), axis=1).sum(axis=1)
        if (length := int(lengths.max())) < KEY_TOKENS:
            return None
        place = int(places[lengths.argmax()])  # of equal ones the latest
        start = max(place - _CONTEXT_TOKENS, 0)
        text = self._tokens[start : place + WINDOW_TOKENS].tolist()
        place -= start
        return text[: text.index(-1, place)] if -1 in text[place:] else text, place, length

    def _list_places(self, slot: int) -> list[int]:
        """Return the last ends of keys in a slot of the index, the latest first."""
        places, place = list[int](), int(self._places[slot])
        while place and len(places) < MAX_PLACES:
            places.append(place)
            place = int(self._earlier[place])
        return places

    @property
    def texts(self) -> list[tuple[str | None, list[int]]]:
        """The texts, oldest first, each with its conversation."""
        return [
            (span.conversation, self._tokens[span.start : span.end].tolist())
            for span in self._spans
        ]

    def forget(self, conversation: str | None) -> None:
        """Remove the tokens of a conversation, or of all if it is None."""
        if conversation is None:
            self._tokens = self._places = self._earlier = np.empty(0, np.int32)
            self._next = 0
            self._spans.clear()
            return
        for span in self._spans:
            if span.conversation == conversation:
                self._tokens[span.start : span.end] = -1
        self._spans = deque(span for span in self._spans if span.conversation != conversation)

    def __len__(self) -> int:
        """Return the number of tokens that can be found."""
        return sum(span.end - span.start for span in self._spans)


# The index of n-grams: where the last tokens of a text occurred before, in microseconds.


# Bits of a token id in a gram's key; no vocabulary has two million tokens.
_BITS = 63 // GRAM_TOKENS


class SortedGrams:
    """The ends of all n-grams of a fixed text. It takes about 0.1 µs and 16 bytes per token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        text = np.array(tokens, np.int64)
        # The position after each gram. The one at the very end has nothing after it.
        ends = max(len(text) - GRAM_TOKENS, 0)
        keys = np.zeros(ends, np.int64)
        for offset in range(GRAM_TOKENS):
            keys = keys << _BITS | text[offset : offset + ends]
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._keys = keys[self._order]

    def find_ends(self, gram: Sequence[int]) -> list[int]:
        """Return the latest MAX_POSITIONS ends of a gram, in order."""
        key = 0
        for token in gram:
            key = key << _BITS | token
        first = self._keys.searchsorted(key, "left")
        last = int(self._keys.searchsorted(key, "right"))
        ends = self._order[max(int(first), last - MAX_POSITIONS) : last]
        return [int(place) + GRAM_TOKENS for place in ends]


class GrowingGrams:
    """The ends of all n-grams of a growing text, from a position on."""

    def __init__(self, start: int) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._n_indexed = max(start, GRAM_TOKENS)

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self._n_indexed, len(tokens)):
            # `end` is the position after the gram, so a gram at the very end does not match itself.
            gram = tuple(tokens[end - GRAM_TOKENS : end])
            places = self._ends.setdefault(gram, [])
            places.append(end)
            if len(places) > MAX_POSITIONS:
                del places[0]
        self._n_indexed = max(self._n_indexed, len(tokens))

    def find_ends(self, gram: tuple[int, ...]) -> list[int]:
        return self._ends.get(gram, [])


def measure_match(
    text: Sequence[int], end: int, tokens: Sequence[int], known: int = GRAM_TOKENS
) -> int:
    """Return how many tokens before `end` in `text` equal the last of `tokens`; `known` surely do."""
    limit = min(end, len(tokens), MAX_MATCH_TOKENS)
    length = known
    while length < limit and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


# Following an earlier text through the changes that an answer makes to it.
#
# A trail is a place in a text that the answer repeats. Where the answer departs from the text, the trail
# looks a few tokens ahead for the place where it comes back. A change on the way is expected again where the
# same tokens come, so a name that was replaced once is replaced in the drafts.


class ExpectedTokens(NamedTuple):
    """Tokens that may come.

    strength: how reliable they are, as the length of a match. doubtful: indices at which a change is
    expected. disputed: another token has followed elsewhere.
    """

    tokens: list[int]
    strength: int
    doubtful: tuple[int, ...] = ()
    disputed: bool = False


NO_TOKENS = ExpectedTokens([], 0)


@dataclass(slots=True, eq=False)
class Change:
    """What an answer wrote in place of some tokens. wrong: it was expected again, and did not come."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    wrong: bool = False


class Changes:
    """The changes of one answer, by the first of the tokens that were replaced."""

    def __init__(self) -> None:
        self._known: dict[int, list[Change]] = {}
        self._count = 0

    def learn(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Note that `new` was written in place of `old`. Pure insertions and deletions are ignored."""
        if not old or not new:
            return
        known = self._known.setdefault(old[0], [])
        for change in known:
            if change.old == tuple(old):
                change.new, change.wrong = tuple(new), False
                return
        if self._count < MAX_CHANGES:
            self._count += 1
            known.append(Change(tuple(old), tuple(new)))
            known.sort(key=lambda change: -len(change.old))

    def find(self, text: Sequence[int], place: int) -> Change | None:
        """Return the change that is expected at a place of a text; None: there is none."""
        for change in self._known.get(text[place], ()):
            if not change.wrong and tuple(text[place : place + len(change.old)]) == change.old:
                return change
        return None


class _Step(NamedTuple):
    """A token that is expected. before: the place of the text at which the answer then is.

    change: the change that it belongs to. done: how much of that comes before it.
    """

    token: int
    before: int
    change: Change | None = None
    done: int = 0


@dataclass(slots=True)
class _Departure:
    """Where the answer left the text, and what it has `written` since.

    old, new: how much of the text, and of what was written, lies before the place where it may be back.
    """

    start: int
    written: list[int] = field(default_factory=list)
    old: int = 0
    new: int = 0


class Trail:
    """A place in a text that the answer repeats. run: tokens in a row that were as expected.

    lost: the answer is somewhere else. elsewhere: the text is that of another request.
    """

    def __init__(
        self,
        text: Sequence[int],
        place: int,
        run: int,
        changes: Changes,
        *,
        is_current: bool = False,
        elsewhere: bool = False,
    ) -> None:
        """is_current: the text is that of the answer itself. elsewhere: it is of another request."""
        self.text, self.is_current, self.elsewhere = text, is_current, elsewhere
        self._end = len(text)  # end of the text as it was before the token that is written
        self.run = min(run, MAX_MATCH_TOKENS)
        self.lost = False
        self._changes = changes
        self._departure: _Departure | None = None
        self._steps: list[_Step] = []  # the tokens that are expected next
        self._place = place  # the place of the text after them

    @property
    def place(self) -> int:
        """The place of the text that the answer has come to."""
        return self._steps[0].before if self._steps else self._place

    def is_at(self, text: Sequence[int], place: int) -> bool:
        """Whether the answer is at this place of that text according to the trail."""
        return (
            self.text is text and self.place == place and not (self._steps and self._steps[0].done)
        )

    def predict(self, count: int) -> ExpectedTokens:
        """Return the next tokens, at most `count`."""
        self._look_ahead(count)
        steps = self._steps[:count]
        if not steps or not self.run:
            return NO_TOKENS
        tokens = [step.token for step in steps]
        doubtful = tuple(index for index, step in enumerate(steps) if step.change and not step.done)
        # What the answer repeats of itself may go on.
        if self.is_current and 0 < len(tokens) == self._end - self.place:
            tokens = (tokens * (count // len(tokens) + 1))[:count]
        return ExpectedTokens(tokens, self.run, doubtful)

    def _look_ahead(self, count: int) -> None:
        text, steps = self.text, self._steps
        end = min(self._end, len(text))
        while len(steps) < count and self._place < end:
            change = self._changes.find(text, self._place)
            if change is None:
                steps.append(_Step(text[self._place], self._place))
                self._place += 1
                continue
            replacement = enumerate(change.new)
            steps.extend(_Step(token, self._place, change, offset) for offset, token in replacement)
            self._place += len(change.old)

    def advance(self, token: int) -> None:
        """Advance by the token that the answer goes on with."""
        self._advance(token)
        self._end += self.is_current

    def _advance(self, token: int) -> None:
        self._look_ahead(1)
        if not self._steps:
            self.lost = True
            return
        step = self._steps[0]
        if step.token != token:
            self._leave_text(step, token)
            return
        del self._steps[0]
        self.run = min(self.run + 1, MAX_MATCH_TOKENS)
        if self._departure is not None:
            self._departure.written.append(token)
            if self.run >= RETURN_TOKENS:
                self._return_to_text(self._departure)

    def _return_to_text(self, departure: _Departure) -> None:
        old = self.text[departure.start : departure.start + departure.old]
        self._changes.learn(list(old), departure.written[: departure.new])
        self._departure = None
        # The tokens to come may now be changed as well.
        if self._steps and self._steps[0].done == 0:
            self._place = self._steps[0].before
            self._steps = []

    def _leave_text(self, step: _Step, token: int) -> None:
        if step.change is not None:
            step.change.wrong = True
        if self._departure is None:
            written = step.change.new[: step.done] if step.change else ()
            self._departure = _Departure(step.before, list(written))
        self._departure.written.append(token)
        self.run = 0
        self._find_return(self._departure)

    def _find_return(self, departure: _Departure) -> None:
        """Find where in the text the answer may be now: after the same tokens, or after as many."""
        written, text = departure.written, self.text
        if len(written) > MAX_DEPARTURE_TOKENS:
            self.lost = True
            return
        # The answer cannot come back to what it has written since it left the text.
        end = min(self._end, len(text)) - self.is_current * (len(written) - 1)
        position, longest = departure.start + len(written), 0
        for place in range(departure.start, min(departure.start + MAX_DEPARTURE_TOKENS, end)):
            if text[place] == written[-1]:
                n_equal = self._count_equal(place, departure)
                if n_equal > longest:
                    position, longest = place + 1, n_equal
        self.run = longest
        self._steps, self._place = [], position
        departure.old, departure.new = position - longest - departure.start, len(written) - longest
        self.lost = position >= end

    def _count_equal(self, place: int, departure: _Departure) -> int:
        """Return how many tokens up to this place equal the last written ones, at most RETURN_TOKENS - 1."""
        length, written = 0, departure.written
        limit = min(RETURN_TOKENS - 1, len(written), place - departure.start + 1)
        while length < limit and self.text[place - length] == written[-1 - length]:
            length += 1
        return length


class NgramDrafter(Drafter):
    """Drafts from n-gram lookup. While others draft, it learns at no cost how good its own would be."""

    kind, rank, initial_acceptance = "ngram", 2, 0.4
    learned, certain = NGRAM_CALIBRATION, True

    @classmethod
    def serves(cls, resources: Resources) -> bool:
        return cls.asked_for(resources.asked)

    def __init__(self, resources: Resources, belief: Belief) -> None:
        super().__init__(resources, belief)
        self.index = resources.lookup
        self.predicted = resources.asked.prediction is not None
        self._offered: Candidate | None = None

    def offer(self, request: DraftRequest) -> Candidate | None:
        limit = min(request.limit, MAX_LOOKUP_TOKENS)
        expected = self.index.propose(request.slot.tokens, limit, request.generated)
        self._offered = None
        if expected.tokens:
            self._offered = Candidate(
                self.belief,
                len(expected.tokens),
                0.0,
                0.0,
                choose_buckets(expected),
                expected.tokens,
            )
        return self._offered

    def observe(self, request: DraftRequest, kept_tokens: list[int], used: bool) -> None:
        super().observe(request, kept_tokens, used)
        if self._offered is not None and not used:
            guesses = zip(self._offered.tokens, self._offered.known, kept_tokens, strict=False)
            for guess, bucket, token in guesses:
                self.belief.observe(bucket, guess == token)
                if guess != token:
                    break
        self._offered = None


def choose_buckets(expected: ExpectedTokens) -> list[int]:
    """Return the buckets of the expected tokens. Each token that comes makes the match longer."""
    strength, count = min(expected.strength, MAX_MATCH_TOKENS), len(expected.tokens)
    known = _BUCKETS[strength : strength + count]
    known += _BUCKETS[-1:] * (count - len(known))
    if expected.disputed:
        known[0] = _BUCKETS[max(strength - DISPUTE_MARGIN_TOKENS, 0)]
    for index in expected.doubtful:
        known[index] = 0
    return known


def _cut_at_picture(expected: ExpectedTokens) -> ExpectedTokens:
    """Return the expected tokens before a picture, which no answer can contain."""
    count = next(
        (index for index, token in enumerate(expected.tokens) if is_picture(token)),
        len(expected.tokens),
    )
    doubtful = tuple(index for index in expected.doubtful if index < count)
    return expected._replace(tokens=expected.tokens[:count], doubtful=doubtful)


class NgramIndex:
    """The texts in which one request looks up what may follow its last tokens, in microseconds.

    Texts known from the start are given to the constructor. It sorts long ones in the thread that calls it,
    outside the step loop.
    """

    def __init__(
        self,
        prediction: Sequence[int] = (),
        prompt: Sequence[int] = (),
        memory: NgramMemory | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        """repeats: the same prompt gives the same answer, because nothing in it is left to chance."""
        self._prediction = list(prediction)
        self._prediction_grams = SortedGrams(self._prediction)
        self._prompt_grams = SortedGrams(prompt)
        self._text_grams = GrowingGrams(len(prompt))
        self._memory, self._repeats = memory, repeats
        self._has_pictures = any(map(is_picture, prompt))
        self._changes = Changes()
        self._trail: Trail | None = None
        self._n_followed = -1

    def propose(self, tokens: Sequence[int], limit: int, generated: int) -> ExpectedTokens:
        """Return at most `limit` tokens that may follow.

        tokens: prompt and answer so far. generated: how many of them are the answer's. A predicted answer is
        expected from its beginning while the answer is too short to be looked up in it.
        """
        if limit <= 0:
            return NO_TOKENS
        self._follow_trail(tokens)
        self._text_grams.extend(tokens)
        if generated < GRAM_TOKENS and len(self._prediction) > generated:
            answer = list(tokens[len(tokens) - generated :])
            if answer == self._prediction[:generated]:
                self._trail = Trail(self._prediction, generated, MAX_MATCH_TOKENS, self._changes)
        followed: set[int] = set()
        if self._trail is None or self._trail.run < MAX_MATCH_TOKENS:  # no match is longer
            followed = self._look_up(tokens)
        if self._trail is None:
            return NO_TOKENS
        expected = self._trail.predict(limit)
        if self._has_pictures:
            expected = _cut_at_picture(expected)
        disputed = bool(followed.difference(expected.tokens[:1]))
        return expected._replace(disputed=True) if expected.tokens and disputed else expected

    def _follow_trail(self, tokens: Sequence[int]) -> None:
        """Advance the trail by the tokens that have come since the last call."""
        new = tokens[self._n_followed :] if 0 <= self._n_followed <= len(tokens) else ()
        self._n_followed = len(tokens)
        for token in new:
            if self._trail is None:
                return
            self._trail.advance(token)
            if self._trail.lost:
                self._trail = None

    def _look_up(self, tokens: Sequence[int]) -> set[int]:
        """Follow the longest match, if it is worth more than the present trail.

        Returns all tokens that have followed the last tokens in this text.
        """
        if len(tokens) < GRAM_TOKENS:
            return set()
        gram = tuple(tokens[-GRAM_TOKENS:])
        if any(map(is_picture, gram)):
            return set()
        own_places = [*self._prompt_grams.find_ends(gram), *self._text_grams.find_ends(gram)][
            -MAX_POSITIONS:
        ]
        best: tuple[Sequence[int], int, int] | None = None
        is_foreign = False
        for places, text in (
            (self._prediction_grams.find_ends(gram), self._prediction),
            (own_places, tokens),
        ):
            for place in reversed(places):
                length = measure_match(text, place, tokens)
                if best is None or length > best[2]:
                    best = text, place, length
        trail = self._trail
        if (
            self._memory is not None
            and not (trail and trail.elsewhere and trail.run)
            and (best is None or best[2] < MAX_MATCH_TOKENS)
        ):
            remembered = self._memory.find(tokens)
            if remembered is not None and (best is None or remembered[2] > best[2]):
                best, is_foreign = remembered, True
                if self._repeats and best[2] >= len(tokens):  # the same prompt
                    best = *best[:2], MAX_MATCH_TOKENS
        if best is not None and not (trail and trail.is_at(best[0], best[1])):
            match = Trail(*best, self._changes, is_current=best[0] is tokens, elsewhere=is_foreign)
            if trail is None or match.run >= trail.run:
                self._trail = match
        return {tokens[place] for place in own_places}
