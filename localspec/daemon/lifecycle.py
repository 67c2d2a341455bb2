"""From start to a clean end: socket, server, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

from localspec import errors, files
from localspec.config import Config, load_config
from localspec.daemon import routes, watch
from localspec.daemon.history.store import Conversations
from localspec.daemon.http import tcp
from localspec.daemon.http.connection import ClientConnection, allow_more_files
from localspec.daemon.http.sockets import bind, listening_sockets, notify
from localspec.daemon.pairs import names
from localspec.daemon.pairs.registry import Registry
from localspec.daemon.state import State
from localspec.daemon.worker.process import DEFAULT_COMMAND
from localspec.daemon.worker.supervisor import Elsewhere, Supervisor
from localspec.paths import Paths

log = logging.getLogger("localspec.daemon")

# Long enough for an answer that is being written, short enough for a person who waits for `stop`.
DRAIN_SECONDS = 10.0
# Connections that the kernel keeps for us, and how many of them we take before looking at those
# that are there: asyncio has one number for both, and with a large one a crowd takes every descriptor.
BACKLOG = 2048
_TAKEN_AT_ONCE = 4
_LOOK = 0.01  # seconds between two looks at who is still being answered at the end
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Listening(socket.socket):
    """A socket that keeps BACKLOG connections waiting, whatever number asyncio names."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(max(backlog, BACKLOG))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signal again after a clean end; with one
    listener more, for TCP, that comes and goes.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], Awaitable[None]],
    ) -> None:
        """`before` and `after` are awaited around the moment from which clients come in."""
        super().__init__(config)
        self._before, self._after = before, after
        self._tcp: asyncio.Server | None = None
        self._ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._before()
        await super().startup(sockets)
        await self._after()
        notify("READY=1", "STATUS=Listening")

    def end(self) -> None:
        """Take nothing new, and end once everybody has been answered."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """As uvicorn's, which looks ten times a second, and not once, whether this is the end."""
        while not await self.on_tick(0):  # the time in our headers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits a tenth of a second for clients that are gone at once."""
        self.leave()
        for server in self.servers:
            server.close()
        for listening in sockets or []:
            listening.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while (state.connections or state.tasks) and not self.force_exit:
                    await asyncio.sleep(_LOOK)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            log.error("%d clients still wait for an answer; they are left", len(state.tasks))
            for task in state.tasks:
                task.cancel()

    async def listen(self, also: socket.socket) -> None:
        """Take clients there too."""

        def connection() -> asyncio.Protocol:
            return ClientConnection(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )

        loop = asyncio.get_running_loop()
        self._tcp = await loop.create_server(connection, sock=also, backlog=_TAKEN_AT_ONCE)

    def leave(self) -> None:
        """Take no more clients there."""
        if self._tcp:
            self._tcp.close()
            self._tcp = None


class Daemon:
    """One run of the daemon."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        drain_seconds: float = DRAIN_SECONDS,
        read: Callable[[Config], Config] | None = None,
    ) -> None:
        """`read`: the configuration read again, where the last one was that; else from its file."""
        self._drain_seconds = drain_seconds
        self._read = read or (lambda last: load_config(paths.config_file, last=last))
        self._configuring = asyncio.Lock()
        self._listens = ""  # to what TCP is listened, as it was set
        supervisor = Supervisor(
            config, paths, worker_command=worker_command, elsewhere=self._elsewhere
        )
        residents = supervisor.residents
        registry = Registry(
            paths,
            residents.uses,
            lambda: residents.pids,
            checks=tuple(worker_command) == DEFAULT_COMMAND,
        )
        residents.stay = registry.stay
        conversations = Conversations(
            paths.data / "conversations.sqlite", paths.states, paths.typed_lines, paths.not_saved
        )
        self._state = State(paths, supervisor, registry, conversations, self.drain, self.configure)
        self._state.unsaid += self._state.problems
        self._server = _Server(
            uvicorn.Config(
                routes.application(self._state),
                http=ClientConnection,
                backlog=_TAKEN_AT_ONCE,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=30,
                # Ours comes first and tells the clients; this one only catches what hangs.
                timeout_graceful_shutdown=int(drain_seconds) + 5,
            ),
            self._listen,
            # Once more: whoever wrote to the file until now found nobody to tell.
            self.configure,
        )

    async def run(self) -> None:
        """Serve until told to end; the socket and the worker are gone when this returns.

        Raises:
            UsageError, UnsafePath, OSError: it cannot listen where clients look for it, or on a command
                line's address.
        """
        state, path = self._state, self._state.paths.socket
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.drain)
        state.conversations.removed_meanwhile = lambda name: asyncio.run_coroutine_threadsafe(
            state.forget_states(name), loop
        )
        allow_more_files()
        files.sweep(state.paths.state)
        handed = listening_sockets()
        ours = not any(_is_at(each, path) for each in handed)
        listening = [*handed]
        if ours:
            listening.append(bind(path))
        listening = [_Listening(fileno=each.detach()) for each in listening]
        for each in listening:
            log.info("daemon %d listens on %s", os.getpid(), each.getsockname())

        def changed() -> None:
            asyncio.run_coroutine_threadsafe(self.configure(), loop)

        watching = watch.start(state, changed)
        threading.Thread(target=state.registry.resume, name="resume", daemon=True).start()
        try:
            await self._server.serve(sockets=listening)
        finally:
            if ours:
                path.unlink(missing_ok=True)
            watching.set()
            state.looks.close()
            if state.registry.pulling:
                await asyncio.to_thread(state.registry.close)
            await state.supervisor.close()
            await asyncio.to_thread(state.conversations.close)
            log.info("daemon %d ended", os.getpid())

    def _elsewhere(self) -> Elsewhere:
        """Imported when a pair of another server is asked first: most daemons have none."""
        from localspec.daemon.upstream.upstreams import Upstreams

        state = self._state
        return Upstreams(lambda name: names.resolve(name, state.config, state.registry))

    async def configure(self) -> None:
        """Read the configuration again and use it. Of many that ask, each gets what was there then."""
        async with self._configuring:
            state = self._state
            before = state.problems
            state.supervisor.residents.configure(await asyncio.to_thread(self._read, state.config))
            await self._listen()
            fresh = [problem for problem in state.problems if problem not in before]
            state.unsaid += fresh
            for problem in fresh:
                log.warning("%s", problem)

    async def _listen(self) -> None:
        """Over TCP, where the configuration says so; what is said there needs the token.

        Raises:
            UsageError, UnsafePath, OSError: it cannot, and a command line has asked for it.
        """
        state, wanted = self._state, self._state.config.listen
        if wanted == self._listens and (state.tcp or not wanted):
            state.tcp = state.tcp and tcp.allowing(state.tcp, state.config)
            return
        self._server.leave()
        state.tcp, state.tcp_problem, self._listens = None, "", wanted
        if not wanted:
            return
        try:
            listening = tcp.bind(state.config)
            auth = tcp.auth_of(listening, tcp.kept_token(state.paths.token))
            state.tcp = tcp.allowing(auth, state.config)
            await self._server.listen(_Listening(fileno=listening.detach()))
        except (errors.LocalspecError, OSError) as error:
            if state.config.origin.get("listen") == "flag":
                raise
            state.tcp_problem = f"{error} TCP is not served."
            return
        log.info("daemon %d listens on %s", os.getpid(), state.tcp.url)

    def drain(self) -> None:
        """Take nothing new, let what runs finish, then end. A second call does not wait."""
        state = self._state
        if state.draining:
            self._server.force_exit = True
            self._abort()
            return
        running = state.supervisor.drain()
        log.info("draining: %d requests run", running)
        notify("STOPPING=1", f"STATUS=Stopping; finishing {running} answers")
        state.draining = True
        state.registry.stop()
        self._server.end()
        asyncio.get_running_loop().call_later(self._drain_seconds, self._abort)

    def _abort(self) -> None:
        self._state.looks.close()
        self._state.supervisor.abort(errors.Unavailable("The daemon was stopped.", retry_after=2))


def _is_at(handed: socket.socket, path: Path) -> bool:
    """Whether a socket that was handed over is the one where clients look for us."""
    name = handed.getsockname()  # bytes: an abstract name, which is no file
    return isinstance(name, str) and bool(name) and Path(name).resolve() == path.resolve()
