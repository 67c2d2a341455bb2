"""Errors as HTTP responses, in the shape of the protocol of the path; OpenAI's shape by default."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.errors import (
    Cancelled,
    InvalidRequest,
    LocalspecError,
    Unavailable,
    recognizable_message,
    stream_message,
)
from localspec.protocol.answers import ErrorBody, ErrorDetail
from localspec.protocol.reading import BadBody

log = logging.getLogger("localspec.http")


def error_body(error: LocalspecError) -> ErrorBody:
    kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
    detail = ErrorDetail(recognizable_message(error), kind, error.param, error.code)
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        detail.n_prompt_tokens, detail.n_ctx = error.n_prompt_tokens, error.n_ctx
    return ErrorBody(detail)


# A protocol's errors: which requests get them, the body, and headers that go with it.
Shape = Callable[[LocalspecError], tuple[object, dict[str, str]]]
_shapes: list[tuple[Callable[[Scope], bool], Shape]] = []


def add_shape(applies: Callable[[Scope], bool], shape: Shape) -> None:
    """Have requests that `applies` accepts get their errors in another shape than OpenAI's."""
    _shapes.append((applies, shape))


def shape_error(scope: Scope, error: LocalspecError) -> tuple[object, dict[str, str]]:
    """Return the body of an error in the shape of the requested path, and headers that go with it."""
    shape = next((shape for applies, shape in _shapes if applies(scope)), None)
    return (error_body(error), {}) if shape is None else shape(error)


class ErrorResponse(Response):
    """An error as a response. Its shape depends on the requested path."""

    media_type = "application/json"

    def __init__(self, error: LocalspecError) -> None:
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        if error.permanent and error.status >= 500:
            # OpenAI's and Anthropic's clients repeat a request with any other 5xx.
            headers["x-should-retry"] = "false"
        super().__init__(None, error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, headers = shape_error(scope, self._error)
        self.headers.update(headers)
        self.body = msgspec.json.encode(body)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def stream_error(error: LocalspecError) -> Sequence[object]:
    """Return the events for an error in the middle of a stream: the last ones before [DONE]."""
    body = error_body(error)
    body.error.message = stream_message(error)
    return [body]


def as_localspec_error(error: Exception) -> LocalspecError:
    """Return `error` if it is one of ours. Anything else is a bug and becomes a general error."""
    return error if isinstance(error, LocalspecError) else log_bug(error)


def log_bug(error: BaseException) -> LocalspecError:
    """Log the traceback of a bug of ours and return a general error for the client."""
    log.error("a bug in a handler", exc_info=error)
    return LocalspecError("Internal error in the daemon; its log has the details: localspec logs")


async def on_localspec_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalspecError)
    if error.status >= 500:
        log.warning("%s: %s", error.code, error.message)
    return ErrorResponse(error)


async def on_bad_body(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadBody)
    return ErrorResponse(InvalidRequest(error.message, param=error.param))


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Return nginx's status for a client that has left. Nobody reads this response."""
    return ErrorResponse(Cancelled("The client disconnected before it was answered."))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the response for an error of Starlette's: no such route, or a wrong method."""
    assert isinstance(error, HTTPException)
    # request.url would also parse the Host header, which may hold anything.
    refusal = LocalspecError(f"{request.method} {request.scope['path']}: {error.detail}.")
    refusal.status = error.status_code
    codes = {404: "not_found", 405: "method_not_allowed"}
    refusal.code = codes.get(error.status_code, "http_error")
    response = ErrorResponse(refusal)
    response.headers.update(error.headers or {})
    return response


class ErrorMiddleware:
    """The outermost middleware: after any exception the client gets a response in our shape.

    If a response has begun, the exception goes on to the server, which closes the connection. So no client
    takes an incomplete response for a complete one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def tracked_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except asyncio.CancelledError:  # the server is ending, and this request took too long
            if not begun:
                ending = Unavailable("The daemon is shutting down; try again.", retry_after=2)
                await ErrorResponse(ending)(scope, receive, tracked_send)
            raise
        except Exception as error:  # a bug of ours
            if begun:
                raise
            await ErrorResponse(log_bug(error))(scope, receive, tracked_send)
