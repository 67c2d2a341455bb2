"""Who types now: an editor's newer completion takes over from its older one.

Only where both are known to be of one editor does that happen at once. A program's name for itself and
its slot are the same in every window of it, and so may be the text (a file that is open twice): where
nothing better is known, the older completion first gets the time in which it would be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Hashable
from typing import NamedTuple

from starlette.requests import Request

from localspec.daemon.http.connection import UNIX
from localspec.errors import Cancelled
from localspec.protocol.requests import InfillRequest

# Editors show no completion that took longer; one that nobody waits for costs no more than this.
UNSURE_SECONDS = 3.0


class Place(NamedTuple):
    """Where somebody types. `sure`: nobody else can have the same `who`."""

    who: Hashable
    text: int  # a hash of what stands around the cursor's line
    sure: bool
    arrival: int  # among all requests: bodies may come in another order than the keys were typed


def place_of(request: Request, body: InfillRequest, arrival: int) -> Place:
    """Who waits for a completion, and where: a newer one of the same makes it worthless.

    On the Unix socket an editor is the process at the other end, and over TCP whoever `user` names.
    Else it is a program on a host, which may run twice: there only the same text is the same editor.
    """
    client = request.client
    text = hash((body.input_prefix, body.input_suffix))
    slot = body.id_slot if body.id_slot >= 0 else hash(body.input_prefix)
    if client is not None and client.host == UNIX:
        return Place((UNIX, client.port, body.user, slot), text, sure=True, arrival=arrival)
    if body.user:
        return Place((body.user, slot), text, sure=True, arrival=arrival)
    host = client.host if client else None
    program = request.headers.get("user-agent")
    return Place((host, program, body.id_slot, text), text, sure=False, arrival=arrival)


class _Typing(NamedTuple):
    """A completion that is made, and its time."""

    place: Place
    limit: asyncio.Timeout


class Editors:
    """The newest completion that each editor waits for."""

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._newest: dict[Hashable, _Typing] = {}

    def arrived(self) -> int:
        """The number of a request whose head has just been read."""
        return next(self._arrivals)

    @contextlib.asynccontextmanager
    async def typing(self, place: Place) -> AsyncIterator[None]:
        """Meanwhile a completion is made for `place`; an older one of the same editor gives way.

        Raises:
            Cancelled: a newer one took over before this one's end. An answer without text would be
                taken for a right one, and editors keep it.
        """
        mine = _Typing(place, asyncio.timeout(None))
        try:
            async with mine.limit:
                self._enter(mine)
                yield
        except TimeoutError:
            if not mine.limit.expired():
                raise
            raise Cancelled(
                "A newer completion request from the same editor replaced this one."
            ) from None
        finally:
            if self._newest.get(place.who) is mine:
                del self._newest[place.who]

    def _enter(self, mine: _Typing) -> None:
        """The older of `mine` and of what its editor waits for already is given no more time."""
        other = self._newest.setdefault(mine.place.who, mine)
        if other is mine:
            return
        older, newer = sorted((other, mine), key=lambda each: each.place.arrival)
        sure = mine.place.sure and older.place.text == newer.place.text
        older.limit.reschedule(
            asyncio.get_running_loop().time() + (0.0 if sure else UNSURE_SECONDS)
        )
        self._newest[mine.place.who] = newer
