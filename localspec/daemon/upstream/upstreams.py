"""The servers by pair, and the fallback when one does not answer.

A server with a fallback that did not answer is tried again in the background as long as clients ask for its
pair. Until it answers, their requests go to the fallback at once. Other servers are contacted only for a
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec

from localspec.daemon.completion.reply import tools
from localspec.daemon.upstream.server import Server
from localspec.daemon.worker.process import Event, Request, Running
from localspec.daemon.worker.queue.forecast import Job
from localspec.daemon.worker.supervisor import Unanswered
from localspec.errors import (
    LocalspecError,
    ModelNotFound,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from localspec.protocol import frames
from localspec.protocol.answers import UpstreamStatus

# If the pair has a fallback and no event arrives within the first time, the server must respond to a small
# request within the second. Otherwise the fallback answers.
_FIRST_EVENT_S = 0.1
_PROBE_TIMEOUT_S = 0.8
# Seconds between two tries in the background. The last one repeats.
_RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_GIVE_UP_AFTER_S = 600.0  # without a request for the pair, the tries end


class Upstreams:
    """The servers that were used since the daemon started."""

    def __init__(self, resolve: Callable[[str], frames.PairFiles]) -> None:
        """Create the table of servers. `resolve` returns the files of a pair by its name, and blocks."""
        self._resolve = resolve
        self._servers: dict[str, Server] = {}
        self._away: dict[str, asyncio.Task[None]] = {}  # the tasks that try a server again, by pair
        self._requested_at: dict[str, float] = {}  # time of the last request, by pair
        self._heard_at: dict[str, float] = {}  # time of the last event of any answer, by pair
        self._running: set[Streamed] = set()

    def of(self, pair: frames.PairFiles) -> Server:
        """Return the server of a pair, a new one if models.toml names another server by now."""
        assert pair.upstream is not None
        server = self._servers.get(pair.name)
        if server is None or server.upstream != pair.upstream:
            if server is not None:
                self._forget(server)
            server = self._servers[pair.name] = Server(pair.name, pair.upstream)
        return server

    def _forget(self, server: Server) -> None:
        if retry_task := self._away.pop(server.name, None):
            retry_task.cancel()
        self._heard_at.pop(server.name, None)

    # ------------------------------------------------------------------ requests

    @contextlib.asynccontextmanager
    async def running(
        self, pair: frames.PairFiles, request: frames.Generate, job: Job
    ) -> AsyncIterator[Running]:
        """Run one request. Leaving the block early closes its connection at once.

        Raises:
            UpstreamUnreachable: The server does not respond, and no part of an answer has arrived.
        """
        server = self.of(pair)
        counts = server.counted
        counts.requests += 1
        counts.running += 1
        self._requested_at[pair.name] = time.monotonic()
        running = Streamed(request, job, self._record_events(server, request))
        self._running.add(running)
        watch_task: asyncio.Task[None] | None = None
        try:
            if server.upstream.fallback:
                if server.name in self._away:
                    raise UpstreamUnreachable(server.problem)
                watch_task = asyncio.create_task(self._abort_if_unreachable(server, running))
            yield running
        except LocalspecError:
            counts.failed += 1
            raise
        finally:
            if watch_task:
                watch_task.cancel()
            counts.running -= 1
            self._running.discard(running)
            await running.close()
            if running.done:
                counts.done(running.done)

    async def _record_events(
        self, server: Server, request: frames.Generate
    ) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(server.events(request)) as events:
            async for event in events:
                self._heard_at[server.name] = time.monotonic()
                yield event

    async def _abort_if_unreachable(self, server: Server, running: Streamed) -> None:
        """End a request of a pair with a fallback if its server seems to be unreachable.

        A small second request, which does not delay the first, must get a response. An answer a short time
        ago proves nothing: the link may have been cut since, without any sign of it.
        """
        began = time.monotonic()
        await asyncio.sleep(_FIRST_EVENT_S)
        if running.begun:
            return
        try:
            await self._probe(server)
        except UpstreamUnreachable as error:
            # A busy server may be slow to respond while its other answers go on.
            if not running.begun and self._heard_at.get(server.name, 0.0) < began:
                running.abort(error)

    async def _probe(self, server: Server) -> None:
        try:
            await server.connection.get("models", _PROBE_TIMEOUT_S)
        except UpstreamTimeout as error:
            server.problem = error.message
            raise UpstreamUnreachable(error.message) from None
        except UpstreamUnreachable as error:
            server.problem = error.message
            raise
        except LocalspecError:
            pass  # it responds; the actual request will run into the same error, if it matters

    async def ask(self, pair: frames.PairFiles, request: Request) -> frames.Reply:
        """Return the response to a small request. Raises as Server.ask."""
        return frames.Reply(0, await self.of(pair).ask(request))

    def info(self, pair: frames.PairFiles) -> frames.Loaded:
        """Return the information of a loaded pair, without a request to the server."""
        return self.of(pair).info()

    # ------------------------------------------------------------------ fallbacks

    async def stand_in(
        self, request: frames.Generate, failed: Sequence[Unanswered]
    ) -> tuple[frames.PairFiles, frames.Generate, str]:
        """Return the pair that answers in place of the last of these servers, its request, and a note.

        `failed` are the servers that did not answer, each the fallback of the one before.

        Raises:
            UpstreamUnreachable: No fallback is configured, it is missing, or it has failed too.
        """
        server = self.of(failed[-1][0])
        name = server.upstream.fallback
        problems = [error.message for _, error in failed]
        if not name:
            raise _all_failed(problems)
        self._start_retries(server)
        try:
            fallback = await asyncio.to_thread(self._resolve, name)
        except ModelNotFound:
            raise _all_failed([*problems, f"Its fallback '{name}' does not exist."]) from None
        except LocalspecError as unusable:
            reason = f"Its fallback '{name}' cannot be used: {unusable.message}"
            raise _all_failed([*problems, reason]) from None
        if fallback.name in {pair.name for pair, _ in failed}:
            raise _all_failed(problems)
        server.counted.fallbacks += 1
        return (
            fallback,
            _adapt_request(request),
            f"{' '.join(problems)} '{fallback.name}' answers in its place.",
        )

    def _start_retries(self, server: Server) -> None:
        """Try the server again in the background until it responds or no client uses its pair any more."""
        if server.name not in self._away:
            self._away[server.name] = asyncio.create_task(self._retry(server))

    async def _retry(self, server: Server) -> None:
        tries = 0
        try:
            while time.monotonic() - self._requested_at.get(server.name, 0.0) < _GIVE_UP_AFTER_S:
                await asyncio.sleep(_RETRY_DELAYS_S[min(tries, len(_RETRY_DELAYS_S) - 1)])
                tries += 1
                with contextlib.suppress(UpstreamUnreachable):
                    await self._probe(server)
                    server.problem, server.known = "", None
                    return
        finally:
            self._away.pop(server.name, None)

    # ------------------------------------------------------------------ status and end

    def statuses(self) -> list[UpstreamStatus]:
        return [_status(server, server.name in self._away) for server in self._servers.values()]

    def abort(self, error: LocalspecError) -> None:
        """Fail every running request."""
        for running in self._running:
            running.abort(error)

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers.values():
            self._forget(server)
            await server.close()


class Streamed(Running):
    """A running request whose events are fetched from the server when they are read."""

    def __init__(
        self, request: frames.Generate, job: Job, events: AsyncGenerator[Event, None]
    ) -> None:
        super().__init__(request, job)
        self.begun = False  # whether any event has arrived
        self.done: frames.Done | None = None
        self._events = events
        self._reader: asyncio.Task[object] | None = None
        self._aborted: LocalspecError | None = None

    async def next(self) -> Event | frames.Reply:
        if self._aborted:
            raise self._aborted
        self._reader = asyncio.current_task()
        try:
            event = await anext(self._events)
        except asyncio.CancelledError:
            if self._aborted and self._reader:
                self._reader.uncancel()
                raise self._aborted from None
            raise
        finally:
            self._reader = None
        self.begun = True
        self.job.sees(event)
        if isinstance(event, frames.Done):
            self.done = event
        return event

    def abort(self, error: LocalspecError) -> None:
        self._aborted = error
        if self._reader:
            self._reader.cancel()

    async def close(self) -> None:
        await self._events.aclose()


def _all_failed(problems: Sequence[str]) -> UpstreamUnreachable:
    """Return the error that every server of a chain of fallbacks failed, with the reason for each."""
    return UpstreamUnreachable(" ".join(problems))


def _adapt_request(request: frames.Generate) -> frames.Generate:
    """Return the request for a local pair.

    Its chat template may not support tools, so tools and calls are described in the messages, in the notation
    that the answer is parsed with.
    """
    prompt, allowed = request.prompt, request.tools
    if not isinstance(prompt, frames.ChatPrompt):
        return request
    has_calls = any(
        message.role == "tool" or message.extra.get("tool_calls") for message in prompt.messages
    )
    if not prompt.tools and not has_calls:
        return request
    messages = tools.told(prompt.messages, prompt.tools or [])
    if allowed is not None:
        allowed = msgspec.structs.replace(allowed, format=tools.TOLD)
    prompt = msgspec.structs.replace(prompt, messages=messages, tools=None)
    return msgspec.structs.replace(request, prompt=prompt, tools=allowed)


def _status(server: Server, away: bool) -> UpstreamStatus:
    known, counts = server.known, server.counted
    return UpstreamStatus(
        server.name,
        server.connection.place,
        kind=known.dialect.name if known else None,
        model=known.model if known else server.upstream.upstream_model or None,
        away=away,
        problem=server.problem,
        fallback=server.upstream.fallback or None,
        running=counts.running,
        requests=counts.requests,
        failed=counts.failed,
        fallbacks=counts.fallbacks,
        tokens=counts.tokens,
        drafted=counts.drafted,
        accepted=counts.accepted,
        tokens_per_pass=counts.measured / counts.passes if counts.passes else None,
    )
