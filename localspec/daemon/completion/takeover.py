"""Who types now: an editor's newer completion takes over from its older one.

Only where both are known to be of one editor does that happen at once. A program's name for itself and
its slot are the same in every window of it, and so may be the text (a file that is open twice): where
nothing better is known, the older completion first gets the time in which it would be read.
"""

from __future__ import annotations

import asyncio
import contextlib
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


def place_of(request: Request, body: InfillRequest) -> Place:
    """Who waits for a completion, and where: a newer one of the same makes it worthless.

    On the Unix socket an editor is the process at the other end, and over TCP whoever `user` names.
    Else it is a program on a host, which may run twice: there only the same text is the same editor.
    """
    client = request.client
    text = hash((body.input_prefix, body.input_suffix))
    slot = body.id_slot if body.id_slot >= 0 else hash(body.input_prefix)
    if client is not None and client.host == UNIX:
        return Place((UNIX, client.port, body.user, slot), text, sure=True)
    if body.user:
        return Place((body.user, slot), text, sure=True)
    host = client.host if client else None
    program = request.headers.get("user-agent")
    return Place((host, program, body.id_slot, text), text, sure=False)


class Editors:
    """The completion that each editor waits for: its text, and its time."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[int, asyncio.Timeout]] = {}

    @contextlib.asynccontextmanager
    async def typing(self, place: Place) -> AsyncIterator[None]:
        """Meanwhile a completion is made for `place`; an older one of the same editor gives way to it.

        Raises:
            Cancelled: a newer one took over before this one's end. An answer without text would be
                taken for a right one, and editors keep it.
        """
        if place.who in self._waiting:
            text, older = self._waiting[place.who]
            seconds = 0.0 if place.sure and text == place.text else UNSURE_SECONDS
            older.reschedule(asyncio.get_running_loop().time() + seconds)
        mine = place.text, asyncio.timeout(None)
        self._waiting[place.who] = mine
        try:
            async with mine[1]:
                yield
        except TimeoutError:
            if not mine[1].expired():
                raise
            raise Cancelled(
                "A newer completion request from the same editor replaced this one."
            ) from None
        finally:
            if self._waiting.get(place.who) is mine:
                del self._waiting[place.who]
