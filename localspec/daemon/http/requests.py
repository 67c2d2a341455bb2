"""Who asks, a request's body read, a value as an answer, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
from collections.abc import Awaitable, Set
from contextvars import ContextVar
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import localspec
from localspec.daemon.http import errors
from localspec.errors import (
    Cancelled,
    RequestTooLarge,
    UnsupportedEncoding,
    VersionMismatch,
)
from localspec.protocol.answers import Unheeded
from localspec.protocol.fields import Ignored, account, refuse_undeclared
from localspec.protocol.reading import TooHeavy, Weight, decode

# Bytes: a million token ids, or the text of two million. As text with one character beyond the BMP
# it takes four times as much, and is copied on its way to the engine.
MAX_BODY = 10 * 1024 * 1024
OUR_CLIENT = "x-localspec-api"  # the header that says which version of the API it speaks

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


_by_our_client: ContextVar[bool] = ContextVar("by_our_client", default=False)


def from_our_client() -> bool:
    """Return whether the current request came from localspec's own command line."""
    return _by_our_client.get()


class ClientGone(Exception):
    """The client closed its connection."""


class SameVersion:
    """Refuse our own clients of another API version before any work; others send no version."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            theirs = dict(scope["headers"]).get(OUR_CLIENT.encode())
            _by_our_client.set(theirs is not None)
            if theirs not in (None, str(localspec.API_VERSION).encode()):
                refusal = VersionMismatch(
                    f"This daemon is localspec {localspec.__version__} with API "
                    f"{localspec.API_VERSION}, not {theirs.decode('latin-1')}."
                )
                await errors.Refusal(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class PlainPath:
    """Reads `//v1/models` and `/v1/models/` as `/v1/models`, for base URLs that end with a slash.

    Only whole paths of the table are meant: the name in others may have any number of slashes. Ours are left
    alone: behind the last slash of one stands a name, which may be empty.
    """

    def __init__(self, app: ASGIApp, paths: Set[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = str(scope.get("path", "")).startswith("/localspec/")
        if scope["type"] == "http" and scope["path"] not in self._paths and not ours:
            path = re.sub("/+", "/", f"{scope['path']}/").removesuffix("/")
            if path in self._paths:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class RequestId:
    """Gives every answer a name in its head, which OpenAI's clients show with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = (b"x-request-id", f"req_{secrets.token_hex(12)}".encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        await self._app(scope, receive, named if scope["type"] == "http" else send)


async def read(request: Request, kind: type[Body], *, empty: Body | None = None) -> Body:
    """The body as `kind`; `empty` where there is none and that may be so.

    Raises:
        BadBody: it is no such thing.
        RequestTooLarge: it is longer, or holds more, than anybody has to say.
        UnsupportedEncoding: it is compressed.
        Cancelled: the client did not send all of it.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding(
            f"The request body is compressed ({encoding[:40]!r}); send it uncompressed."
        )
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
        raise Cancelled(
            "The client disconnected or was too slow before its request was read."
        ) from None
    if body.startswith(
        codecs.BOM_UTF8
    ):  # RFC 8259 lets a reader pass over it; PowerShell writes one
        del body[: len(codecs.BOM_UTF8)]
    if empty is not None and not body:
        return empty
    decoded = decode(body, kind, weight)
    if request.method == "DELETE" or request.scope["path"].startswith("/localspec/"):
        refuse_undeclared(body, decoded)  # half of what was meant might be worse than nothing
    else:
        request.state.ignored = account(body, decoded)
    await asyncio.sleep(0)  # a long text takes its time here, and again on its way to the engine
    return decoded


def ignored(request: Request) -> Ignored:
    """Return what of the request that was read changes nothing."""
    found: Ignored = request.state.ignored
    return found


def unheeded(request: Request) -> Unheeded | msgspec.UnsetType:
    """Return `localspec` of an answer that says no more there than what changed nothing."""
    found = ignored(request)
    return Unheeded(list(found)) if found else msgspec.UNSET


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"The request body may have at most {MAX_BODY >> 20} MiB.")


def answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """`work`'s result; when the client leaves first, `work` is cancelled.

    Raises:
        ClientGone: it left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
