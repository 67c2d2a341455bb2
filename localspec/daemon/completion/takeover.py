"""Who types now: an editor's newer completion takes over from its older one.

Only where both are known to be of one editor does that happen at once. A program's name for itself and
its slot are the same in every window of it, and so may be the text (a file that is open twice): where
nothing better is known, the older completion first gets the time in which it would be read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Hashable
from typing import NamedTuple

from localspec.daemon.completion.run import Indexed
from localspec.errors import Cancelled

# Editors show no completion that took longer; one that nobody waits for costs no more than this.
UNSURE_SECONDS = 3.0


class Place(NamedTuple):
    """Where somebody types. `sure`: nobody else can have the same `who`."""

    who: Hashable
    text: int  # a hash of what stands around the cursor's line
    sure: bool


class Editors:
    """The completion that each editor waits for."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, Turn] = {}

    def begin(self, place: Place) -> Turn:
        """The turn of a new completion; an older one of the same editor gives way to it."""
        if (older := self._turns.get(place.who)) is not None:
            older.give_way(at_once=place.sure and older.place.text == place.text)
        turn = self._turns[place.who] = Turn(self, place)
        return turn

    def end(self, turn: Turn) -> None:
        if self._turns.get(turn.place.who) is turn:
            del self._turns[turn.place.who]


class Turn:
    """One completion for one editor."""

    def __init__(self, editors: Editors, place: Place) -> None:
        self.place = place
        self._editors = editors
        self._over = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None

    def give_way(self, *, at_once: bool) -> None:
        """End soon, with an error."""
        if at_once:
            self._over.set()
        elif self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(UNSURE_SECONDS, self._over.set)

    async def while_it_lasts(
        self, events: AsyncGenerator[Indexed, None]
    ) -> AsyncGenerator[Indexed, None]:
        """`events`.

        Raises:
            Cancelled: a newer completion took over before they ended. An answer without text would
                be taken for a right one, and editors keep it.
        """
        over = asyncio.ensure_future(self._over.wait())
        step: asyncio.Future[Indexed | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(_next(events))
                await asyncio.wait({step, over}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    raise Cancelled("A newer completion of the same editor took over.")
                if (item := step.result()) is None:
                    return
                yield item
        finally:
            over.cancel()
            if self._later:
                self._later.cancel()
            if step is not None and not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
            with contextlib.suppress(RuntimeError):  # it was cancelled in the middle of a step
                await events.aclose()
            self._editors.end(self)


async def _next(events: AsyncGenerator[Indexed, None]) -> Indexed | None:
    return await anext(events, None)
