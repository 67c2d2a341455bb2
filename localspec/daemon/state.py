"""What every handler needs, and how it reads a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from localspec.config import Config
from localspec.daemon.completion.run import unless_gone
from localspec.daemon.completion.takeover import Editors
from localspec.daemon.history.store import Conversations
from localspec.daemon.http.tcp import Door
from localspec.daemon.pairs import names
from localspec.daemon.pairs.library import Library
from localspec.daemon.threads import Shared, Threads
from localspec.daemon.worker.supervisor import Supervisor
from localspec.errors import Cancelled, RequestTooLarge
from localspec.paths import Paths
from localspec.protocol import http
from localspec.protocol.frames import PairFiles
from localspec.protocol.weight import TooHeavy, Weight

# Bytes: a million token ids, or the text of two million. As text with one character beyond the BMP
# it takes four times as much, and is copied on its way to the engine.
MAX_BODY = 10 * 1024 * 1024

_LOOKS = 8  # pairs at once; more than anybody asks for
_ERRANDS = 4

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass
class Context:
    """The parts of a running daemon. `stop` begins the drain."""

    config: Config
    paths: Paths
    supervisor: Supervisor
    library: Library
    conversations: Conversations
    stop: Callable[[], None]
    editors: Editors = field(default_factory=Editors)
    # Pairs that are looked at before a load: one that changed is hashed, which takes its time.
    looks: Shared[PairFiles] = field(default_factory=lambda: Shared(Threads("look", _LOOKS)))
    # What a person asked for and watches: files made pairs, verified, measured.
    errands: Threads = field(default_factory=lambda: Threads("errand", _ERRANDS))
    draining: bool = False
    problem: str = ""  # why config.toml as it is now is not in use
    door: Door | None = None  # for TCP, where there is one
    started: float = field(default_factory=time.monotonic)

    async def pair(self, name: str, receive: Receive) -> PairFiles:
        """The files of a pair, checked unless it is loaded already; see pairs.resolve.

        Raises:
            ClientGone: whoever asked, the client behind `receive`, has left meanwhile.
        """
        name = names.full_name(name, self.config)
        held = self.supervisor.holds(name)
        if held or not names.needs_a_look(name):
            return held or names.resolve(name, self.config, self.library)
        config = self.config
        look = self.looks.get(name, lambda left: names.resolve(name, config, self.library, left))
        # One look for all who ask, so what each is told of it is decided here.
        with names.unseen() if names.names_files(name) else contextlib.nullcontext():
            return await unless_gone(receive, look)

    async def rest(self, name: str) -> None:
        """Unload the pair if it is loaded and nothing runs in it."""
        if self.supervisor.uses(name) and not self.supervisor.busy:
            await self.supervisor.unload()

    async def forget_states(self, name: str | None) -> None:
        """What the engine keeps of a conversation, with None of all.

        First the engine, which may be writing; then the files, of engines that are gone too.
        """
        await self.supervisor.forget(name)
        await self.conversations.run(lambda each: each.remove_states(name))

    @property
    def problems(self) -> list[str]:
        """Sentences about files that were edited and cannot be read."""
        return [each for each in (self.problem, self.library.problem) if each]


def context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


async def read(request: Request, kind: type[Body]) -> Body:
    """The body as `kind`; BadBody or RequestTooLarge otherwise."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large()
    body, weight = bytearray(), Weight()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise _too_large()
            weight.feed(chunk)
    except TooHeavy as error:
        raise RequestTooLarge(str(error)) from None
    except ClientDisconnect:
        raise Cancelled("The client left, or was too slow, before its request was read.") from None
    decoded = http.decode(body, kind, weight)
    await asyncio.sleep(0)  # a long text takes its time here, and again on its way to the engine
    return decoded


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"The request body may have at most {MAX_BODY >> 20} MiB.")


def answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
