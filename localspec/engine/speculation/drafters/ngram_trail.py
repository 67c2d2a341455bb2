"""Following an earlier text through the changes that an answer makes to it.

A trail is a place in a text that the answer repeats. Where the answer departs from the text, the trail looks
a few tokens ahead for the place where it comes back. A change on the way is expected again where the same
tokens come, so a name that was replaced once is replaced in the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_DEPARTURE_TOKENS = (
    24  # the answer must come back within so many tokens of the old or the new text
)
RETURN_TOKENS = 3  # tokens in a row that show that it is back
# Pairs (run, bonus). An answer that has repeated `run` tokens before it left the text counts as if the match
# were longer by `bonus` tokens.
RUN_BONUS = ((48, 6), (6, 3))
FOREIGN_MARGIN_TOKENS = 3  # a match in another request must be longer by this to be as good
_MAX_CHANGES = 64  # remembered per answer
_MAX_RUN_TOKENS = 48  # a longer match is no more reliable


class Expected(NamedTuple):
    """Tokens that may come.

    strength: how reliable they are, as the length of a match. doubtful: indices at which a change is
    expected. disputed: another token has followed elsewhere.
    """

    tokens: list[int]
    strength: int
    doubtful: tuple[int, ...] = ()
    disputed: bool = False


NOTHING = Expected([], 0)


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
        if self._count < _MAX_CHANGES:
            self._count += 1
            known.append(Change(tuple(old), tuple(new)))
            known.sort(key=lambda change: -len(change.old))

    def at(self, text: Sequence[int], place: int) -> Change | None:
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

    lost: the answer is somewhere else.
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
        self.run = min(run, _MAX_RUN_TOKENS)
        self.lost = False
        self._changes = changes
        self._departure: _Departure | None = None
        self._run_bonus = 0
        self._steps: list[_Step] = []  # the tokens that are expected next
        self._place = place  # the place of the text after them

    @property
    def strength(self) -> int:
        """How reliable the trail is, as the length of a match that is as reliable; 0: not at all."""
        if self._departure is not None:
            return self.run and self.run + min(self._run_bonus, 2)
        return self.run + self._run_bonus - FOREIGN_MARGIN_TOKENS * self.elsewhere

    @property
    def place(self) -> int:
        """The place of the text that the answer has come to."""
        return self._steps[0].before if self._steps else self._place

    def at(self, text: Sequence[int], place: int) -> bool:
        """Whether the answer is at this place of that text according to the trail."""
        return (
            self.text is text and self.place == place and not (self._steps and self._steps[0].done)
        )

    def expected(self, count: int) -> Expected:
        """Return the next tokens, at most `count`."""
        self._look_ahead(count)
        steps = self._steps[:count]
        if not steps or self.strength <= 0:
            return NOTHING
        tokens = [step.token for step in steps]
        doubtful = tuple(index for index, step in enumerate(steps) if step.change and not step.done)
        # What the answer repeats of itself may go on.
        if self.is_current and 0 < len(tokens) == self._end - self.place:
            tokens = (tokens * (count // len(tokens) + 1))[:count]
        return Expected(tokens, self.strength, doubtful)

    def _look_ahead(self, count: int) -> None:
        text, steps = self.text, self._steps
        end = min(self._end, len(text))
        while len(steps) < count and self._place < end:
            change = self._changes.at(text, self._place)
            if change is None:
                steps.append(_Step(text[self._place], self._place))
                self._place += 1
                continue
            replacement = enumerate(change.new)
            steps.extend(_Step(token, self._place, change, offset) for offset, token in replacement)
            self._place += len(change.old)

    def wrote(self, token: int) -> None:
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
        self.run = min(self.run + 1, _MAX_RUN_TOKENS)
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
        self._run_bonus = max(
            self._run_bonus, *(worth for run, worth in RUN_BONUS if self.run >= run), 0
        )
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
