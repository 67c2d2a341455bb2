"""End an editor's older completion when its newer one arrives.

That happens at once only if both certainly come from the same editor. A program sends the same name and
slot from every window, and two windows may show the same file, so those prove nothing. Without better
evidence the older completion first gets the time in which an editor would still show it.
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

# Editors show no completion that took longer, so an unwanted one costs at most this much time.
UNSURE_SECONDS = 3.0


class Place(NamedTuple):
    """The position where somebody types; `sure` means that no other editor can have the same `who`."""

    who: Hashable
    text: int  # a hash of the text around the cursor's line
    sure: bool
    # The number of the request. Bodies may arrive in another order than the keys were typed.
    arrival: int


def place_of(request: Request, body: InfillRequest, arrival: int) -> Place:
    """Return which editor waits for a completion, and where.

    Over the Unix socket an editor is identified by the process at the other end, over TCP by `user`.
    Otherwise it is a program on a host, which may run twice, so only the same text counts as the same
    editor.
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
    """A completion under way, and its time limit."""

    place: Place
    limit: asyncio.Timeout


class Editors:
    """The newest completion that each editor is waiting for."""

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._newest: dict[Hashable, _Typing] = {}

    def arrived(self) -> int:
        """Return a number for a request whose head has just been read."""
        return next(self._arrivals)

    @contextlib.asynccontextmanager
    async def typing(self, place: Place) -> AsyncIterator[None]:
        """Mark a completion for `place` as under way; an older one of the same editor is cancelled.

        Raises:
            Cancelled: a newer completion replaced this one. Editors would store an empty answer as a valid
                completion, so this has to be an error.
        """
        entry = _Typing(place, asyncio.timeout(None))
        try:
            async with entry.limit:
                self._enter(entry)
                yield
        except TimeoutError:
            if not entry.limit.expired():
                raise
            raise Cancelled(
                "A newer completion request from the same editor replaced this one."
            ) from None
        finally:
            if self._newest.get(place.who) is entry:
                del self._newest[place.who]

    def _enter(self, entry: _Typing) -> None:
        """Register `entry`, and end the older one of it and its editor's current completion."""
        current = self._newest.setdefault(entry.place.who, entry)
        if current is entry:
            return
        older, newer = sorted((current, entry), key=lambda typing: typing.place.arrival)
        sure = entry.place.sure and older.place.text == newer.place.text
        older.limit.reschedule(
            asyncio.get_running_loop().time() + (0.0 if sure else UNSURE_SECONDS)
        )
        self._newest[entry.place.who] = newer
