"""Measure the drafts of one answer by the difference of the server's own counters."""

from __future__ import annotations

import asyncio
import contextlib

from localspec.daemon.upstream.connection import Connection
from localspec.daemon.upstream.dialects.base import Counters, Dialect, Spoken
from localspec.errors import LocalspecError

_REQUEST_TIMEOUT_S = 1.0
_RETRY_DELAY_S = 0.1  # an engine may count its last pass just after it has sent the text


class Counting:
    """The measurement of one answer. The first reading runs beside the request and does not delay it."""

    def __init__(
        self, connection: Connection, dialect: Dialect, looks: set[asyncio.Task[Counters | None]]
    ) -> None:
        """Start the first reading. Its task is kept in `looks` until it ends."""
        self._connection = connection
        self._dialect = dialect
        self._before = asyncio.create_task(self._read_counters())
        looks.add(self._before)
        self._before.add_done_callback(looks.discard)

    async def end(self, tokens: int) -> Spoken | None:
        """Return the drafts of an answer of `tokens` tokens.

        Return None if they cannot be known: the server counts no drafts, or has generated tokens for other
        requests meanwhile.
        """
        before = await self._before
        for wait in (0.0, _RETRY_DELAY_S) if before else ():
            await asyncio.sleep(wait)
            after = await self._read_counters()
            if before and after and tokens and after.tokens - before.tokens == tokens:
                drafted = after.drafted - before.drafted
                return Spoken(drafted, after.accepted - before.accepted)
        return None

    async def _read_counters(self) -> Counters | None:
        with contextlib.suppress(LocalspecError):
            data = await self._connection.get(self._dialect.metrics, _REQUEST_TIMEOUT_S)
            with contextlib.suppress(ValueError, OverflowError):
                return self._dialect.counters(data.decode(errors="replace"))
        return None
