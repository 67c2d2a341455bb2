"""The life of the daemon: socket, server, signals, changes of its files, and drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from localspec import errors, extras, files
from localspec.config import Config, load_config
from localspec.daemon import routes
from localspec.daemon.history.store import ConversationStore
from localspec.daemon.http import tcp
from localspec.daemon.http.connection import ClientConnection, raise_file_limit
from localspec.daemon.http.sockets import bind, notify, take_inherited_sockets
from localspec.daemon.pairs.names import resolve_default
from localspec.daemon.state import DaemonState
from localspec.daemon.worker.plan import free_memory
from localspec.daemon.worker.process import DEFAULT_COMMAND
from localspec.daemon.worker.table import PairTable
from localspec.paths import Paths
from localspec.registry.catalogue import shipped_catalogue_path
from localspec.registry.registry import Registry

log = logging.getLogger("localspec.daemon")
_watch_log = logging.getLogger("localspec.watch")

_START_DELAY_S = 0.5  # the request that started the daemon comes first
_MAX_LINKS = 40  # as many as Linux follows (MAXSYMLINKS)
# These intervals are long, because each wakes a thread of a process that is idle most of the day.
# The interval of the checks of links, and the time until the watch is known to work.
_LINK_CHECK_MS = 1000
_EVENT_POLL_MS = 200  # interval of the checks for events of the file system

# Long enough for most running answers, short enough for a person who waits for `stop`.
DRAIN_TIMEOUT_S = 10.0
_ABORT_MARGIN_S = 5  # for answers that were ended then
# Connections that wait in the kernel, and how many are accepted in one iteration of the event loop. asyncio
# uses one number for both. With a large one, many clients at once would take every descriptor.
BACKLOG = 2048
_MAX_ACCEPTS_AT_ONCE = 4
_POLL_INTERVAL_S = 0.01  # of the wait for the last responses at the end
_PROGRAM_CHECK_S = 2.0  # interval of the checks whether the program is still installed
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _watch(state: DaemonState, stop: threading.Event, configure: Callable[[], object]) -> None:
    """Read models.toml and config.toml again when they change, until `stop` is set.

    A file with an error changes nothing. `configure` reads config.toml.
    """
    if stop.wait(_START_DELAY_S):
        return
    import watchfiles

    config, catalogue = state.paths.config_file, state.paths.user_catalogue
    # Folders are watched, because editors replace files. Ours must exist, or its creation would be missed.
    with suppress(OSError):
        config.parent.mkdir(parents=True, exist_ok=True)
    try:
        while not stop.is_set():
            watched = (config, catalogue, shipped_catalogue_path())
            paths_by_file = {file: watched_paths(file) for file in watched}
            names = {str(path): file.name for file in watched for path in paths_by_file[file]}
            is_watching = False
            for changes in watchfiles.watch(
                *(folder for folder in {Path(path).parent for path in names} if folder.is_dir()),
                watch_filter=partial(lambda names, _, path: path in names, names),
                recursive=False,
                debounce=_EVENT_POLL_MS,
                step=_EVENT_POLL_MS,
                stop_event=stop,
                raise_interrupt=False,
                rust_timeout=_LINK_CHECK_MS,
                yield_on_timeout=True,
            ):
                if not is_watching:  # files may have been edited since the daemon read them
                    is_watching = True
                    _read_again(state, {config.name, catalogue.name}, configure)
                elif changes:
                    changed = {names[path] for _, path in changes}
                    _watch_log.info("changed: %s", ", ".join(sorted(changed)))
                    _read_again(state, changed, configure)
                if any(watched_paths(file) != paths for file, paths in paths_by_file.items()):
                    break  # a link has a new target
    except (OSError, RuntimeError) as error:  # no watches are left, or a folder is gone
        _watch_log.warning("edits of %s are not seen: %s", ", ".join(sorted(names)), error)


def watched_paths(file: Path) -> list[Path]:
    """Return every link on the way to a file, and finally the file, each with its real folder.

    These paths must be watched to notice every change of the file, through whichever name it is made.
    """
    links: list[Path] = []
    followed = 0
    folder, remaining = Path(file.anchor), list(file.absolute().parts[1:])
    while remaining:
        part = remaining.pop(0)
        if part == "..":
            folder = folder.parent
            continue
        path = folder / part
        if not path.is_symlink():
            folder = path
            continue
        followed += 1
        if followed > _MAX_LINKS:  # the links form a cycle
            return links
        if path not in links:
            links.append(path)
        target = path.readlink()
        folder = Path(target.anchor) if target.is_absolute() else folder
        remaining = [*target.parts[target.is_absolute() :], *remaining]
    return [*links, folder]


def _read_again(state: DaemonState, changed: set[str], configure: Callable[[], object]) -> None:
    if state.paths.user_catalogue.name in changed:
        state.registry.reload()
        if state.registry.problem:
            _watch_log.warning("%s", state.registry.problem)
    if state.paths.config_file.name in changed:
        configure()


class _ListeningSocket(socket.socket):
    """A listening socket with BACKLOG waiting connections, whatever number asyncio passes."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(max(backlog, BACKLOG))


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, and with an optional listener for TCP.

    uvicorn's signal handlers would raise the signal again after a clean end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the server. `before` and `after` are awaited before and after it begins to listen."""
        super().__init__(config)
        self._before, self._after = before, after
        self._tcp: asyncio.Server | None = None
        self._end_requested = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._before()
        await super().startup(sockets)
        await self._after()
        notify("READY=1", "STATUS=Listening")

    def end(self) -> None:
        """Accept nothing new, and end once all responses are sent."""
        self.should_exit = True
        self._end_requested.set()

    async def main_loop(self) -> None:
        """Wait for the end, like uvicorn's loop but without a wake-up ten times a second."""
        while not await self.on_tick(0):  # updates the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._end_requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down like uvicorn, but without its wait of 0.1 s for clients that leave at once."""
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
                    await asyncio.sleep(_POLL_INTERVAL_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            log.error("%d clients still wait for an answer and are disconnected", len(state.tasks))
            for task in state.tasks:
                task.cancel()

    async def listen(self, listener: socket.socket) -> None:
        """Accept clients on another socket too."""

        create_connection = partial(
            ClientConnection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        self._tcp = await loop.create_server(
            create_connection, sock=listener, backlog=_MAX_ACCEPTS_AT_ONCE
        )

    def leave(self) -> None:
        """Stop accepting clients on that socket."""
        if self._tcp:
            self._tcp.close()
            self._tcp = None


def _find_backend() -> str | None:
    """Return the backend that llama.cpp was built for. The daemon begins without what finds it."""
    from localspec.machine import installed_backend

    return installed_backend()


class Daemon:
    """One run of the daemon."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        drain_seconds: float = DRAIN_TIMEOUT_S,
        read: Callable[[Config], Config] | None = None,
    ) -> None:
        """Create the daemon. `read` reads the configuration again, by default from its file."""
        self._drain_seconds = drain_seconds
        self._drain_deadline = 0.0  # of answers that were ended, in the event loop's time
        self._read = read or (lambda last: load_config(paths.config_file, last=last))
        self._config_lock = asyncio.Lock()
        self._tcp_setting = ""  # the `listen` setting that is in effect
        table = PairTable(
            config, paths, worker_command=worker_command, elsewhere=self._create_upstreams
        )
        checks = tuple(worker_command) == DEFAULT_COMMAND
        registry = Registry(
            paths,
            table.is_loaded_or_loading,
            lambda: free_memory(workers=table.pids),
            checks=checks,
            by_tcp=tcp.is_tcp_request,
            backend=_find_backend,
        )
        table.preset = registry.preset
        parts = paths, table, registry, ConversationStore(paths)
        self._state = DaemonState(*parts, self.drain, self.configure)
        self._state.unreported_problems += self._state.problems
        self._server = _Server(
            uvicorn.Config(
                routes.create_app(self._state),
                http=ClientConnection,
                backlog=_MAX_ACCEPTS_AT_ONCE,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=30,
                # Our own time-out comes first and sends errors. This one only ends requests that hang.
                timeout_graceful_shutdown=int(drain_seconds) + _ABORT_MARGIN_S,
            ),
            self._listen,
            # Read the file again, because clients that edited it until now could not reach the daemon.
            self.configure,
        )

    async def run(self) -> None:
        """Serve until the end is requested. Afterwards the socket and the worker are gone.

        Raises UsageError, UnsafePath or OSError if it cannot listen on the socket, or on the TCP address of
        the command line.
        """
        state, path = self._state, self._state.paths.socket
        loop = asyncio.get_running_loop()
        # Not asyncio's own handlers, which it removes before the process has ended.
        for signal_number in _SIGNALS:
            signal.signal(signal_number, lambda *_: loop.call_soon_threadsafe(self.drain))
        state.conversations.on_removed_meanwhile = lambda name: asyncio.run_coroutine_threadsafe(
            state.forget_states(name), loop
        )
        raise_file_limit()
        files.delete_unfinished(state.paths.state)
        sockets, owns_socket = _open_sockets(path)

        stop_watching = threading.Event()
        watch = partial(
            _watch,
            *(state, stop_watching),
            lambda: asyncio.run_coroutine_threadsafe(self.configure(), loop),
        )
        # Nothing waits for its end.
        threading.Thread(target=watch, name="watch", daemon=True).start()
        uninstalled = asyncio.create_task(self._drain_once_uninstalled())
        nightly = extras.load("tune", "nightly")
        tuner = nightly.start(state, stop_watching) if nightly else None
        threading.Thread(target=state.registry.pulls.resume, name="resume", daemon=True).start()
        try:
            await self._server.serve(sockets=sockets)
        finally:
            if owns_socket:
                path.unlink(missing_ok=True)
            uninstalled.cancel()
            stop_watching.set()
            if tuner:  # its run, a process, must not outlive the daemon
                await asyncio.to_thread(tuner.join)
            state.pair_checks.close()
            if state.registry.running_pulls:
                await asyncio.to_thread(state.registry.pulls.close)
            await state.recordings.close(max(0.0, self._drain_deadline - loop.time()))
            await state.pairs.close()
            await asyncio.to_thread(state.conversations.close)
            log.info("daemon %d ended", os.getpid())
            for signal_number in _SIGNALS:
                signal.signal(signal_number, signal.SIG_IGN)

    def _create_upstreams(self) -> Any:
        """Create the table of other servers. It is imported at first use, because most daemons have none."""
        server = extras.load("upstream", "server")
        if server is None:
            raise errors.Unavailable("This installation of localspec lacks the extra 'upstream'.")
        state = self._state
        return server.Upstreams(
            lambda name: state.registry.resolve(resolve_default(name, state.config))
        )

    async def configure(self) -> None:
        """Read the configuration again and use it. Calls are handled one after the other."""
        async with self._config_lock:
            state = self._state
            old_problems = state.problems
            state.pairs.configure(await asyncio.to_thread(self._read, state.config))
            await self._listen()
            fresh = [problem for problem in state.problems if problem not in old_problems]
            state.unreported_problems += fresh
            for problem in fresh:
                log.warning("%s", problem)

    async def _listen(self) -> None:
        """Start or stop listening on TCP as configured.

        Raises:
            UsageError, UnsafePath, OSError: It cannot listen on the address of the command line. For other
                addresses the problem is only recorded.
        """
        state, setting = self._state, self._state.config.listen
        if setting == self._tcp_setting and (state.tcp or not setting):
            state.tcp = state.tcp and tcp.with_allowed_names(state.tcp, state.config)
            return
        self._server.leave()
        state.tcp, state.tcp_problem, self._tcp_setting = None, "", setting
        if not setting:
            return
        try:
            listening = tcp.bind(state.config)
            auth = tcp.create_auth(listening, tcp.load_token(state.paths.token))
            state.tcp = tcp.with_allowed_names(auth, state.config)
            await self._server.listen(_ListeningSocket(fileno=listening.detach()))
        except (errors.LocalspecError, OSError) as error:
            if state.config.origin.get("listen") == "flag":
                raise
            state.tcp_problem = f"{error} TCP is not served."
            return
        log.info("daemon %d listens on %s", os.getpid(), state.tcp.url)

    async def _drain_once_uninstalled(self) -> None:
        """End after the package has been deleted, since no command is left that could stop the daemon.

        An upgrade replaces its files one by one, so a file that is missing only once is none of this.
        """
        missing = 0
        while missing < 2:
            await asyncio.sleep(_PROGRAM_CHECK_S)
            missing = 0 if Path(__file__).exists() else missing + 1
        log.warning("the program has been deleted from %s; ending", Path(__file__).parents[1])
        self.drain()

    def drain(self) -> None:
        """Accept nothing new, let running requests finish, then end. A second call ends them at once."""
        state = self._state
        if state.draining:
            self._server.force_exit = True
            self._abort()
            return
        running = state.pairs.drain()
        log.info("draining: %d requests run", running)
        notify("STOPPING=1", f"STATUS=Stopping; finishing {running} answers")
        state.draining = True
        state.registry.pulls.close(timeout=0)
        self._server.end()
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_seconds, self._abort)
        self._drain_deadline = loop.time() + self._drain_seconds + _ABORT_MARGIN_S

    def _abort(self) -> None:
        self._state.pair_checks.close()
        self._state.converter.abort()
        self._state.pairs.abort(errors.Unavailable("The daemon was stopped.", retry_after=2))


def _open_sockets(path: Path) -> tuple[list[socket.socket], bool]:
    """Return the sockets to listen on, and whether that at `path` is ours and not systemd's."""
    listeners = take_inherited_sockets()
    # Bytes are an abstract name, which is not a file.
    names = [name for listener in listeners if isinstance(name := listener.getsockname(), str)]
    owns_socket = not any(name and Path(name).resolve() == path.resolve() for name in names)
    if owns_socket:
        listeners = [*listeners, bind(path)]
    sockets = [_ListeningSocket(fileno=listener.detach()) for listener in listeners]
    for listener in sockets:
        log.info("daemon %d listens on %s", os.getpid(), listener.getsockname())
    return [*sockets], owns_socket
