"""From start to a clean end: socket, server, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence

import uvicorn

from localspec import errors
from localspec.config import Config
from localspec.daemon import listener, routes, watch
from localspec.daemon.context import Context
from localspec.daemon.conversations import Conversations
from localspec.daemon.library import Library
from localspec.daemon.safe_mode import Memory
from localspec.daemon.supervisor import Supervisor
from localspec.daemon.worker import DEFAULT_COMMAND
from localspec.paths import Paths

log = logging.getLogger("localspec.daemon")

# Long enough for an answer that is being written, short enough for a person who waits for `stop`.
DRAIN_SECONDS = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signal again after a clean end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Daemon:
    """One run of the daemon."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self._paths = paths
        self._drain_seconds = drain_seconds
        self._supervisor = Supervisor(
            config,
            Memory(paths.state / "safe-mode.json"),
            state_dir=str(paths.state),
            states_dir=str(paths.states),
            worker_command=worker_command,
        )
        supervisor = self._supervisor
        self._library = Library(paths, supervisor.uses, lambda: supervisor.worker_pid)
        self._conversations = Conversations(paths.data / "conversations.sqlite", paths.states)
        self._context = Context(
            config, paths, supervisor, self._library, self._conversations, self.drain
        )
        self._server = _Server(
            uvicorn.Config(
                routes.application(self._context),
                http=listener.OwnerOnly,
                h11_max_incomplete_event_size=listener.MAX_HEAD,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=30,
                # Ours comes first and tells the clients; this one only catches what hangs.
                timeout_graceful_shutdown=int(drain_seconds) + 5,
            )
        )

    async def run(self) -> None:
        """Serve until told to end; the socket and the worker are gone when this returns."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.drain)
        listening = listener.bind(self._paths.socket)
        log.info("daemon %d listens on %s", os.getpid(), self._paths.socket)
        watching = watch.start(self._context)
        try:
            await self._server.serve(sockets=[listening])
        finally:
            listener.unlink(self._paths.socket)
            watching.set()
            if self._library.pulling:
                await asyncio.to_thread(self._library.close)
            await self._supervisor.close()
            await asyncio.to_thread(self._conversations.close)
            log.info("daemon %d ended", os.getpid())

    def drain(self) -> None:
        """Take nothing new, let what runs finish, then end. A second call does not wait."""
        if self._context.draining:
            self._server.force_exit = True
            self._abort()
            return
        log.info("draining: %d requests run", self._supervisor.admission.running)
        self._context.draining = True
        self._supervisor.admission.close()
        self._library.stop()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_seconds, self._abort)

    def _abort(self) -> None:
        self._supervisor.abort(errors.Unavailable("The daemon was told to end.", retry_after=2))
