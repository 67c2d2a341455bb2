"""Read request bodies, write JSON responses, and end work when its client leaves."""

from __future__ import annotations

import asyncio
import codecs
import re
import secrets
from collections.abc import Awaitable, Set
from contextvars import ContextVar
from typing import TypeVar

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import localspec
from localspec.daemon.http import errors
from localspec.errors import (
    Cancelled,
    InvalidRequest,
    RequestTooLarge,
    UnsupportedEncoding,
    VersionMismatch,
)
from localspec.protocol.answers import Unheeded
from localspec.protocol.fields import IgnoredFields, find_ignored_fields, refuse_undeclared
from localspec.protocol.reading import BodyComplexity, TooComplex, decode_body

# Bytes of a body: enough for twenty screenshots, and for more text than a context holds. A Python string with
# one character beyond the BMP takes four times as much, and is copied on its way to the engine.
MAX_BODY_BYTES = 32 << 20
API_HEADER = "x-localspec-api"  # the header in which our clients send the version of their API
VERSION_HEADER = "x-localspec-version"  # the header in which they get that of this package
ENVIRONMENT_HEADER = "x-localspec-environment"  # the LOCALSPEC_* variables of its shell, in JSON

Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


_by_our_client: ContextVar[bool] = ContextVar("by_our_client", default=False)
_shell_variables: ContextVar[bytes] = ContextVar("shell_variables", default=b"{}")


def from_our_client() -> bool:
    """Return whether the current request came from localspec's own command line."""
    return _by_our_client.get()


def read_shell_variables() -> dict[str, str]:
    """Return the LOCALSPEC_* variables of the shell that the current request came from."""
    try:
        return msgspec.json.decode(_shell_variables.get(), type=dict[str, str])
    except msgspec.DecodeError:
        return {}


class ClientGone(Exception):
    """The client closed its connection."""


class VersionMiddleware:
    """Refuse our own clients of another API version before any work. Other clients send no version."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            client_version = headers.get(API_HEADER.encode())
            _by_our_client.set(client_version is not None)
            _shell_variables.set(headers.get(ENVIRONMENT_HEADER.encode(), b"{}"))
            if client_version not in (None, str(localspec.API_VERSION).encode()):
                message = f"This daemon is localspec {localspec.__version__} with API "
                message += f"{localspec.API_VERSION}, not {client_version.decode('latin-1')}."
                await errors.ErrorResponse(VersionMismatch(message))(scope, receive, send)
                return

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[VERSION_HEADER] = localspec.__version__
            await send(message)

        await self._app(scope, receive, send_with_version if from_our_client() else send)


class PathMiddleware:
    """Read `//v1/models` and `/v1/models/` as `/v1/models`, for base URLs that end with a slash.

    This applies only to paths without a parameter, since a name may contain slashes. It does not apply to
    /localspec/ paths, where an empty name after the last slash is possible.
    """

    def __init__(self, app: ASGIApp, paths: Set[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_localspec = str(scope.get("path", "")).startswith("/localspec/")
        if scope["type"] == "http" and scope["path"] not in self._paths and not is_localspec:
            path = re.sub("/+", "/", f"{scope['path']}/").removesuffix("/")
            if path in self._paths:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Add an id to the head of every response, which OpenAI's clients show with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", f"req_{secrets.token_hex(12)}".encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id if scope["type"] == "http" else send)


async def read_body(request: Request, kind: type[Body], *, empty: Body | None = None) -> Body:
    """Return the body of a request as `kind`, or `empty` if there is no body and `empty` is given.

    Raises:
        BadBody: The body cannot be decoded as `kind`.
        RequestTooLarge: The body is longer, or contains more values, than any reasonable request.
        UnsupportedEncoding: The body is compressed.
        Cancelled: The client did not send all of the body.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding(
            f"The request body is compressed ({encoding[:40]!r}); send it uncompressed."
        )
    too_large = RequestTooLarge(f"The request body may have at most {MAX_BODY_BYTES >> 20} MiB.")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body, weight = bytearray(), BodyComplexity()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise too_large
            weight.count_piece(chunk)
    except TooComplex as error:
        raise RequestTooLarge(str(error)) from None
    except ClientDisconnect:
        message = "The client disconnected or was too slow before its request was read."
        raise Cancelled(message) from None
    # PowerShell writes a byte order mark. RFC 8259 allows a reader to ignore it.
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    if empty is not None and not body:
        return empty
    decoded, value = decode_body(body, kind, weight)
    if request.method == "DELETE" or request.scope["path"].startswith("/localspec/"):
        # To do half of what was meant might be worse than nothing.
        refuse_undeclared(value, decoded)
    else:
        request.state.ignored = find_ignored_fields(value, decoded)
    await asyncio.sleep(0)  # decoding a long text takes time, so let other tasks run
    return decoded


def ignored_fields(request: Request) -> IgnoredFields:
    """Return the fields of the request that have no effect."""
    fields: IgnoredFields = request.state.ignored
    return fields


def ignored_extension(request: Request) -> Unheeded | msgspec.UnsetType:
    """Return the `localspec` field of a response whose only content is the ignored request fields."""
    fields = ignored_fields(request)
    return Unheeded(list(fields)) if fields else msgspec.UNSET


def query_number(request: Request, name: str, default: int, most: int) -> int:
    """Return the whole number of a query. Raises InvalidRequest if it is not between 1 and `most`."""
    text = request.query_params.get(name, str(default))
    is_short = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not (is_short and 1 <= int(text) <= most):
        raise InvalidRequest.at(name, f"must be a whole number from 1 to {most}.")
    return int(text)


def query_flag(request: Request, name: str) -> bool:
    """Return whether a query has "true" for this name. Raises InvalidRequest for other texts."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest.at(name, "must be true or false.")
    return text == "true"


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def detach(request: Request) -> Request:
    """Return a request, whose body was read, as one of a client that never leaves."""

    async def receive_nothing() -> Message:
        message: Message = await asyncio.get_running_loop().create_future()
        return message

    return Request(request.scope, receive_nothing)


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`. If the client leaves first, it is cancelled and ClientGone raised."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientGone
        return work_task.result()
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)
