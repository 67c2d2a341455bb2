"""Requests as asyncio tasks. Cancelling a task cancels its request in the daemon too.

An editor cancels a request at the next key. The module is separate from api.py because `ask` would
have to import asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from localspec.client.api import Client
from localspec.client.transport import Connection
from localspec.errors import Cancelled, LocalspecError, NoDaemon

_Result = TypeVar("_Result")

# Seconds after a failed start of the daemon until an impatient request may start it again.
RESTART_DELAY_S = 30.0


class CancellableClient(Client):
    """A client for one request, which can be cancelled from another thread."""

    def __init__(self, socket_path: str | None = None, *, autostart: bool = True) -> None:
        super().__init__(socket_path, autostart=autostart)
        self._connection: Connection | None = None
        self._cancelled = False

    @property
    def connected(self) -> bool:
        """Whether a daemon was running or was started for the request."""
        return self._connection is not None

    def connect(self, timeout: float | None = None) -> Connection:
        """Return a connection as `Client.connect` does.

        Raises:
            Cancelled: `cancel` was called first.
        """
        connection = self._connection = super().connect(timeout)
        if self._cancelled:
            connection.close()
            raise Cancelled("The request was cancelled before it was sent.")
        return connection

    def cancel(self) -> None:
        """End the request from any thread. The thread that reads its response gets NoDaemon."""
        self._cancelled = True
        if self._connection is not None:
            self._connection.shut_down()


class AsyncDaemon:
    """The daemon as keys and commands use it, with each request in a thread of its own."""

    def __init__(self, socket_path: str | None = None) -> None:
        self._socket_path = socket_path
        self._failed_at = -RESTART_DELAY_S

    async def run(
        self,
        call: Callable[[CancellableClient], _Result],
        *,
        patient: bool = True,
        starts: bool = True,
    ) -> _Result:
        """Return the result of `call`. Cancelling the task closes the connection, which frees the daemon.

        `patient` means that a person waits for the answer. Otherwise a daemon that could not be started is
        not started again for RESTART_DELAY_S, and without `starts` none is. Raises LocalspecError if no
        daemon is running, or the daemon answered with an error.
        """
        may_start = patient or time.monotonic() - self._failed_at >= RESTART_DELAY_S
        autostart = starts and may_start
        client = CancellableClient(self._socket_path, autostart=autostart)
        try:
            return await asyncio.to_thread(call, client)
        except asyncio.CancelledError:
            client.cancel()
            raise
        except NoDaemon:
            if autostart and not client.connected:
                self._failed_at = time.monotonic()
            raise
        except OSError as error:
            reason = error.strerror or error
            raise LocalspecError(f"The daemon cannot be asked: {reason}.") from error
