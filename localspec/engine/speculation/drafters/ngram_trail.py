"""Following an earlier text through the changes that an answer makes to it.

A trail is a place in a text that the answer repeats. Where the answer departs from it, the trail looks a
few tokens ahead for the place where it comes back, and what was changed on the way is expected to be
changed again where the same tokens come: so a name that was replaced once is replaced in the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

AHEAD = 24  # tokens of the old text, or of the new one, within which it comes back
SURE = 3  # tokens in a row that say that it is back
# In tokens of a match: what it is worth that so many were in a row before the answer left the text, and
# how much longer a match in another request must be to be as good.
SOLID = ((48, 6), (6, 3))
ELSEWHERE = 3
_MOST_CHANGES = 64  # remembered of an answer
_LONGEST_RUN = 48  # beyond which the length of a match says no more


class Expected(NamedTuple):
    """Tokens that may come. strength: as the length of the match that they follow; doubtful: places
    among them where a change is expected. disputed: elsewhere another token has followed.
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
    """Those of one answer, by the first of the tokens that were replaced."""

    def __init__(self) -> None:
        self._known: dict[int, list[Change]] = {}
        self._count = 0

    def learn(self, old: Sequence[int], new: Sequence[int]) -> None:
        """`new` was written where `old` stands. What was only added or removed is no rule for more."""
        if not old or not new:
            return
        known = self._known.setdefault(old[0], [])
        for change in known:
            if change.old == tuple(old):
                change.new, change.wrong = tuple(new), False
                return
        if self._count < _MOST_CHANGES:
            self._count += 1
            known.append(Change(tuple(old), tuple(new)))
            known.sort(key=lambda change: -len(change.old))

    def at(self, text: Sequence[int], place: int) -> Change | None:
        """What is expected to be changed there."""
        for change in self._known.get(text[place], ()):
            if not change.wrong and tuple(text[place : place + len(change.old)]) == change.old:
                return change
        return None


class _Step(NamedTuple):
    """One token that is expected. before: the place of the text that the answer has come to then.

    change: what it is part of; done: how much of that comes before it.
    """

    token: int
    before: int
    change: Change | None = None
    done: int = 0


@dataclass(slots=True)
class _Departure:
    """Where the answer left the text, and what it has `written` since.

    old, new: how much of the text and of what was written lies before the place where it may be back.
    """

    start: int
    written: list[int] = field(default_factory=list)
    old: int = 0
    new: int = 0


class Trail:
    """A place in a text that the answer is at. run: tokens in a row that were as expected.

    lost: the answer is somewhere else.
    """

    def __init__(
        self,
        text: Sequence[int],
        place: int,
        run: int,
        changes: Changes,
        *,
        own: bool = False,
        elsewhere: bool = False,
    ) -> None:
        """own: the text is the one that is written; elsewhere: it is none of this request's."""
        self.text, self.own, self.elsewhere = text, own, elsewhere
        self._end = len(text)  # of what stood there before the token that is written
        self.run = min(run, _LONGEST_RUN)
        self.lost = False
        self._changes = changes
        self._away: _Departure | None = None
        self._solid = 0
        self._steps: list[_Step] = []  # what is expected next
        self._place = place  # of the text, after those

    @property
    def strength(self) -> int:
        """How sure it is, as the length of a match that is as sure; 0: nothing is known."""
        if self._away is not None:
            return self.run and self.run + min(self._solid, 2)
        return self.run + self._solid - ELSEWHERE * self.elsewhere

    @property
    def place(self) -> int:
        """The place of the text that the answer has come to."""
        return self._steps[0].before if self._steps else self._place

    def at(self, text: Sequence[int], place: int) -> bool:
        """Is the answer at this place of that text by it?"""
        return (
            self.text is text and self.place == place and not (self._steps and self._steps[0].done)
        )

    def expected(self, count: int) -> Expected:
        """The next tokens, `count` at most."""
        self._look_ahead(count)
        steps = self._steps[:count]
        if not steps or self.strength <= 0:
            return NOTHING
        tokens = [step.token for step in steps]
        doubtful = tuple(at for at, step in enumerate(steps) if step.change and not step.done)
        if self.own and 0 < len(tokens) == self._end - self.place:  # what it repeats may go on
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
            new = enumerate(change.new)
            steps.extend(_Step(token, self._place, change, done) for done, token in new)
            self._place += len(change.old)

    def wrote(self, token: int) -> None:
        """The answer goes on with this token."""
        self._compare(token)
        self._end += self.own

    def _compare(self, token: int) -> None:
        self._look_ahead(1)
        if not self._steps:
            self.lost = True
            return
        step = self._steps[0]
        if step.token != token:
            self._depart(step, token)
            return
        del self._steps[0]
        self.run = min(self.run + 1, _LONGEST_RUN)
        if self._away is not None:
            self._away.written.append(token)
            if self.run >= SURE:
                self._is_back(self._away)

    def _is_back(self, away: _Departure) -> None:
        old = self.text[away.start : away.start + away.old]
        self._changes.learn(list(old), away.written[: away.new])
        self._away = None
        if self._steps and self._steps[0].done == 0:  # what comes may be changed as well now
            self._place = self._steps[0].before
            self._steps = []

    def _depart(self, step: _Step, token: int) -> None:
        if step.change is not None:
            step.change.wrong = True
        if self._away is None:
            begun = step.change.new[: step.done] if step.change else ()
            self._away = _Departure(step.before, list(begun))
        self._away.written.append(token)
        self._solid = max(self._solid, *(worth for run, worth in SOLID if self.run >= run), 0)
        self.run = 0
        self._come_back(self._away)

    def _come_back(self, away: _Departure) -> None:
        """Where in the text the answer may be now: after the same tokens, or after as many."""
        written, text = away.written, self.text
        if len(written) > AHEAD:
            self.lost = True
            return
        end = min(self._end, len(text)) - self.own * (
            len(written) - 1
        )  # what was written is no place to come back to
        found, best = away.start + len(written), 0
        for place in range(away.start, min(away.start + AHEAD, end)):
            if text[place] == written[-1]:
                length = self._same(place, away)
                if length > best:
                    found, best = place + 1, length
        self.run = best
        self._steps, self._place = [], found
        away.old, away.new = found - best - away.start, len(written) - best
        self.lost = found >= end

    def _same(self, place: int, away: _Departure) -> int:
        """How many tokens up to this place equal the last that were written, SURE - 1 at most."""
        length, written = 0, away.written
        most = min(SURE - 1, len(written), place - away.start + 1)
        while length < most and self.text[place - length] == written[-1 - length]:
            length += 1
        return length
