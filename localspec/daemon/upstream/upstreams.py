"""The servers by their pairs, and whose turn it is when one does not answer.

One with a fallback that did not answer is tried again in the background, for as long as anybody asks for its
pair, and until it answers nobody waits for it any more. All others are contacted for a request alone.
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

# Where another pair would answer: what comes of an answer within the first of these says enough, else a sign
# of life must come within the second.
_BEGINS = 0.1  # seconds
_PATIENCE = 0.8
_AGAIN = (
    1.0,
    2.0,
    4.0,
    8.0,
    15.0,
)  # seconds between two tries in the background, then the last one
_GIVES_UP = 600.0  # seconds without a request, after which it is left alone


class Upstreams:
    """The servers that were asked since the daemon started."""

    def __init__(self, resolve: Callable[[str], frames.PairFiles]) -> None:
        """`resolve`: the files of a pair by its name; blocks."""
        self._resolve = resolve
        self._servers: dict[str, Server] = {}
        self._away: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, float] = {}  # when a pair was asked last
        self._heard: dict[str, float] = {}  # when anything of an answer of its server came last
        self._running: set[Streamed] = set()

    def of(self, pair: frames.PairFiles) -> Server:
        """The server of a pair; another one where models.toml names another by now."""
        assert pair.upstream is not None
        held = self._servers.get(pair.name)
        if held is None or held.upstream != pair.upstream:
            if held is not None:
                self._forget(held)
            held = self._servers[pair.name] = Server(pair.name, pair.upstream)
        return held

    def _forget(self, server: Server) -> None:
        if trying := self._away.pop(server.name, None):
            trying.cancel()
        self._heard.pop(server.name, None)

    # ------------------------------------------------------------------ requests

    @contextlib.asynccontextmanager
    async def running(
        self, pair: frames.PairFiles, request: frames.Generate, job: Job
    ) -> AsyncIterator[Running]:
        """One request on its way; when the body ends early its connection is closed at once.

        Raises:
            UpstreamUnreachable: nobody answers, and nothing of an answer was seen.
        """
        server = self.of(pair)
        counted = server.counted
        counted.requests += 1
        counted.running += 1
        self._asked[pair.name] = time.monotonic()
        running = Streamed(request, job, self._heard_of(server, request))
        self._running.add(running)
        watching: asyncio.Task[None] | None = None
        try:
            if server.upstream.fallback:
                if server.name in self._away:
                    raise UpstreamUnreachable(server.problem)
                watching = asyncio.create_task(self._watch(server, running))
            yield running
        except LocalspecError:
            counted.failed += 1
            raise
        finally:
            if watching:
                watching.cancel()
            counted.running -= 1
            self._running.discard(running)
            await running.close()
            if running.done:
                counted.done(running.done)

    async def _heard_of(
        self, server: Server, request: frames.Generate
    ) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(server.events(request)) as events:
            async for event in events:
                self._heard[server.name] = time.monotonic()
                yield event

    async def _watch(self, server: Server, running: Streamed) -> None:
        """Where another pair would answer: end a request whose server is not there, as far as can be seen.

        It is asked for a sign of life beside the request, which waits for no journey more. However lately
        it answered, the link may be cut since, and then nothing says so.
        """
        began = time.monotonic()
        await asyncio.sleep(_BEGINS)
        if running.begun:
            return
        try:
            await self._sign_of_life(server)
        except UpstreamUnreachable as error:
            # One that is busy may be slow to give a sign while its other answers go on.
            if not running.begun and self._heard.get(server.name, 0.0) < began:
                running.abort(error)

    async def _sign_of_life(self, server: Server) -> None:
        try:
            await server.connection.get("models", _PATIENCE)
        except UpstreamTimeout as error:
            server.problem = error.message
            raise UpstreamUnreachable(error.message) from None
        except UpstreamUnreachable as error:
            server.problem = error.message
            raise
        except LocalspecError:
            pass  # it answers; whatever it has against the question, the request will meet it

    async def ask(self, pair: frames.PairFiles, request: Request) -> frames.Reply:
        """The answer to a small request. Raises as Server.ask."""
        return frames.Reply(0, await self.of(pair).ask(request))

    def info(self, pair: frames.PairFiles) -> frames.Loaded:
        """As of a pair that is loaded. Contacts nobody."""
        return self.of(pair).info()

    # ------------------------------------------------------------------ whose turn it is

    async def stand_in(
        self, request: frames.Generate, failed: Sequence[Unanswered]
    ) -> tuple[frames.PairFiles, frames.Generate, str]:
        """Return who answers in the place of the last of these servers, what it is asked, and the line that
        says so. Each of them is the fallback of the one before.

        Raises:
            UpstreamUnreachable: nobody does, as no fallback is named, it is not here, or it was tried.
        """
        server = self.of(failed[-1][0])
        name = server.upstream.fallback
        problems = [each.message for _, each in failed]
        if not name:
            raise _nobody(problems)
        self._try_again(server)
        try:
            other = await asyncio.to_thread(self._resolve, name)
        except ModelNotFound:
            raise _nobody([*problems, f"Its fallback '{name}' is not here."]) from None
        except LocalspecError as unusable:
            why = f"Its fallback '{name}' cannot be used: {unusable.message}"
            raise _nobody([*problems, why]) from None
        if other.name in {each.name for each, _ in failed}:
            raise _nobody(problems)
        server.counted.fallbacks += 1
        return (
            other,
            _in_place(request),
            f"{' '.join(problems)} '{other.name}' answers in its place.",
        )

    def _try_again(self, server: Server) -> None:
        """In the background, until it answers or nobody asks any more."""
        if server.name not in self._away:
            self._away[server.name] = asyncio.create_task(self._trying(server))

    async def _trying(self, server: Server) -> None:
        tries = 0
        try:
            while time.monotonic() - self._asked.get(server.name, 0.0) < _GIVES_UP:
                await asyncio.sleep(_AGAIN[min(tries, len(_AGAIN) - 1)])
                tries += 1
                with contextlib.suppress(UpstreamUnreachable):
                    await self._sign_of_life(server)
                    server.problem, server.known = "", None
                    return
        finally:
            self._away.pop(server.name, None)

    # ------------------------------------------------------------------ what is told, and the end

    def statuses(self) -> list[UpstreamStatus]:
        return [_status(each, each.name in self._away) for each in self._servers.values()]

    def abort(self, error: LocalspecError) -> None:
        """Fail everything that runs."""
        for each in self._running:
            each.abort(error)

    async def close(self) -> None:
        """The end: no connection stays."""
        for server in self._servers.values():
            self._forget(server)
            await server.close()


class Streamed(Running):
    """A request whose events are fetched as they are asked for: nothing waits here."""

    def __init__(
        self, request: frames.Generate, job: Job, events: AsyncGenerator[Event, None]
    ) -> None:
        super().__init__(request, job)
        self.begun = False  # something of its answer has come
        self.done: frames.Done | None = None
        self._events = events
        self._waiting: asyncio.Task[object] | None = None
        self._aborted: LocalspecError | None = None

    async def next(self) -> Event | frames.Reply:
        if self._aborted:
            raise self._aborted
        self._waiting = asyncio.current_task()
        try:
            event = await anext(self._events)
        except asyncio.CancelledError:
            if self._aborted and self._waiting:
                self._waiting.uncancel()
                raise self._aborted from None
            raise
        finally:
            self._waiting = None
        self.begun = True
        self.job.sees(event)
        if isinstance(event, frames.Done):
            self.done = event
        return event

    def abort(self, error: LocalspecError) -> None:
        self._aborted = error
        if self._waiting:
            self._waiting.cancel()

    async def close(self) -> None:
        await self._events.aclose()


def _nobody(problems: Sequence[str]) -> UpstreamUnreachable:
    """Return the error of a chain of fallbacks that came to nothing: what was wrong with each."""
    return UpstreamUnreachable(" ".join(problems))


def _in_place(request: frames.Generate) -> frames.Generate:
    """What a pair of this machine is asked instead: of tools its template may know nothing, so that it is
    told of them in the question, in the notation that the answer is read in.
    """
    prompt, allowed = request.prompt, request.tools
    if not isinstance(prompt, frames.ChatPrompt):
        return request
    called = any(each.role == "tool" or each.extra.get("tool_calls") for each in prompt.messages)
    if not prompt.tools and not called:
        return request
    messages = tools.told(prompt.messages, prompt.tools or [])
    if allowed is not None:
        allowed = msgspec.structs.replace(allowed, format=tools.TOLD)
    prompt = msgspec.structs.replace(prompt, messages=messages, tools=None)
    return msgspec.structs.replace(request, prompt=prompt, tools=allowed)


def _status(server: Server, away: bool) -> UpstreamStatus:
    known, counted = server.known, server.counted
    return UpstreamStatus(
        server.name,
        server.connection.place,
        kind=known.dialect.name if known else None,
        model=known.model if known else server.upstream.upstream_model or None,
        away=away,
        problem=server.problem,
        fallback=server.upstream.fallback or None,
        running=counted.running,
        requests=counted.requests,
        failed=counted.failed,
        fallbacks=counted.fallbacks,
        tokens=counted.tokens,
        drafted=counted.drafted,
        accepted=counted.accepted,
        tokens_per_pass=counted.measured / counted.passes if counted.passes else None,
    )
