"""Who types now: an editor's newer completion takes over from its older one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Hashable

from localspec.daemon.generation import Indexed
from localspec.protocol import frames


class Editors:
    """The completion that each editor waits for."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, Turn] = {}

    def begin(self, who: Hashable) -> Turn:
        """The turn of a new completion; the one that `who` waited for ends at once."""
        if (older := self._turns.get(who)) is not None:
            older.over.set()
        turn = self._turns[who] = Turn(self, who)
        return turn

    def end(self, turn: Turn) -> None:
        if self._turns.get(turn.who) is turn:
            del self._turns[turn.who]


class Turn:
    """One completion for one editor; `over` is set when a newer one has begun."""

    def __init__(self, editors: Editors, who: Hashable) -> None:
        self.who = who
        self.over = asyncio.Event()
        self._editors = editors

    async def while_it_lasts(
        self, events: AsyncGenerator[Indexed, None]
    ) -> AsyncGenerator[Indexed, None]:
        """`events`, ended by a cancelled Done when the turn is over before them."""
        over = asyncio.ensure_future(self.over.wait())
        step: asyncio.Future[Indexed | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(_next(events))
                await asyncio.wait({step, over}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    yield 0, nothing()
                    return
                if (item := step.result()) is None:
                    return
                yield item
        finally:
            over.cancel()
            if step is not None and not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
            with contextlib.suppress(RuntimeError):  # it was cancelled in the middle of a step
                await events.aclose()
            self._editors.end(self)


async def _next(events: AsyncGenerator[Indexed, None]) -> Indexed | None:
    return await anext(events, None)


def nothing() -> frames.Done:
    """The end of an answer that nobody wants any more."""
    return frames.Done(0, "cancelled", 0, 0, frames.Timings(), frames.Speculation())
