"""Requests as asyncio tasks: one that is cancelled ends in the daemon too, as an editor's next key wants it.

Apart from api.py, which is on the way of `ask` and has no asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from localspec.client.api import Client
from localspec.client.transport import Connection
from localspec.errors import Cancelled, LocalspecError, NoDaemon

_Answer = TypeVar("_Answer")

AGAIN = 30.0  # seconds until a daemon that could not be started is started anew by a key


class CancellableClient(Client):
    """For one request. `connected`: whether there was a daemon for it, or one was started."""

    def __init__(self, socket_path: str | None = None, *, autostart: bool = True) -> None:
        super().__init__(socket_path, autostart=autostart)
        self._connection: Connection | None = None
        self._cancelled = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def connect(self, timeout: float | None = None) -> Connection:
        """As Client's. Raises Cancelled: `cancel` came first."""
        connection = self._connection = super().connect(timeout)
        if self._cancelled:
            connection.close()
            raise Cancelled("It was cancelled before it was asked.")
        return connection

    def cancel(self) -> None:
        """End the request from any thread: whoever reads its answer gets NoDaemon."""
        self._cancelled = True
        if self._connection is not None:
            self._connection.cut()


class Daemon:
    """The daemon as keys and commands ask it, each in a thread of its own."""

    def __init__(self, socket_path: str | None = None) -> None:
        self._socket_path = socket_path
        self._failed = -AGAIN

    async def ask(
        self, call: Callable[[CancellableClient], _Answer], *, patient: bool = True
    ) -> _Answer:
        """What `call` gives. A cancelled task closes the connection, which frees the daemon at once.

        `patient` is somebody who waits for the answer; for anybody else a daemon that could not be started
        is let be for a while.

        Raises:
            LocalspecError: no daemon, or what it answered.
        """
        autostart = patient or time.monotonic() - self._failed >= AGAIN
        client = CancellableClient(self._socket_path, autostart=autostart)
        try:
            return await asyncio.to_thread(call, client)
        except asyncio.CancelledError:
            client.cancel()
            raise
        except NoDaemon:
            if autostart and not client.connected:
                self._failed = time.monotonic()
            raise
        except OSError as error:
            raise LocalspecError(
                f"The daemon cannot be asked: {error.strerror or error}."
            ) from error
