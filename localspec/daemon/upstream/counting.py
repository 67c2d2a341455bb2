"""What a server's own counters say of one answer: by their difference, where nobody else's is in it."""

from __future__ import annotations

import asyncio
import contextlib

from localspec.daemon.upstream.connection import Connection
from localspec.daemon.upstream.dialects.base import Counters, Dialect, Spoken
from localspec.errors import LocalspecError

_LOOK = 1.0  # seconds
_LATER = 0.1  # an engine may count its last pass just after it has sent the text


class Counting:
    """Of one answer. Looking costs its beginning nothing: it goes on beside the request."""

    def __init__(
        self, connection: Connection, dialect: Dialect, looks: set[asyncio.Task[Counters | None]]
    ) -> None:
        """`looks`: where the look beside the request stays until it is over, as it soon is."""
        self._connection = connection
        self._dialect = dialect
        self._before = asyncio.create_task(self._look())
        looks.add(self._before)
        self._before.add_done_callback(looks.discard)

    async def end(self, tokens: int) -> Spoken | None:
        """What it comes to for an answer of so many tokens; None where that cannot be told: the
        server counts no drafts, or has generated for others meanwhile.
        """
        before = await self._before
        for wait in (0.0, _LATER) if before else ():
            await asyncio.sleep(wait)
            after = await self._look()
            if before and after and tokens and after.tokens - before.tokens == tokens:
                drafted = after.drafted - before.drafted
                return Spoken(drafted, after.accepted - before.accepted)
        return None

    async def _look(self) -> Counters | None:
        with contextlib.suppress(LocalspecError):
            data = await self._connection.get(self._dialect.metrics, _LOOK)
            with contextlib.suppress(ValueError, OverflowError):
                return self._dialect.counters(data.decode(errors="replace"))
        return None
