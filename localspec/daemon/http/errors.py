"""Errors as HTTP responses, in the shape of the protocol of the path; OpenAI's shape by default."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.errors import (
    Cancelled,
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    ThreadMismatch,
    ThreadNotFound,
    ThreadUnsupported,
    Unavailable,
    known_words,
)
from localspec.extras.anthropic.wire import MessagesError, MessagesErrorDetail
from localspec.protocol.answers import ErrorBody, ErrorDetail, OllamaError
from localspec.protocol.reading import BadBody

log = logging.getLogger("localspec.http")


def error_body(error: LocalspecError) -> ErrorBody:
    kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
    detail = ErrorDetail(known_words(error), kind, error.param, error.code)
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        detail.n_prompt_tokens, detail.n_ctx = error.n_prompt_tokens, error.n_ctx
    return ErrorBody(detail)


# Anthropic's types of errors by status. Other statuses get a general type for 4xx or 5xx.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: LocalspecError) -> MessagesError:
    """Return an error in Anthropic's shape, and where clients compare messages, in Anthropic's words."""
    default_type = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    message = error.message
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        # agents shorten their conversation when they find this sentence
        message = (
            f"prompt is too long: {error.n_prompt_tokens} tokens > {error.n_ctx} maximum. {message}"
        )
    elif error.code == ContextExceeded.code:
        message = f"prompt is too long. {message}"
    detail = MessagesErrorDetail(
        _ANTHROPIC_TYPES.get(error.status, default_type), message, error.code, error.param
    )
    if isinstance(error, ThreadUnsupported):
        detail.details = {"error_code": error.code, "unsupported": ["thread"]}
    elif isinstance(error, ThreadNotFound | ThreadMismatch):
        detail.details = {"error_code": error.code}
    return MessagesError(detail, messages_request())


def messages_request() -> str:
    """Return a new id for a request, which every response of Anthropic's has in its head."""
    return f"req_{secrets.token_hex(12)}"


# Error bodies of protocols other than OpenAI's, by the prefix of their paths.
_BODY_BUILDERS: dict[str, Callable[[LocalspecError], object]] = {
    "/api/": lambda error: OllamaError(known_words(error)),
    "/v1/messages": messages_error,
}


class Refusal(Response):
    """An error as a response. Its shape depends on the requested path."""

    media_type = "application/json"

    def __init__(self, error: LocalspecError) -> None:
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        super().__init__(None, error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        build_body = next(
            (build for prefix, build in _BODY_BUILDERS.items() if path.startswith(prefix)),
            error_body,
        )
        if path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope):
            build_body = messages_error  # Anthropic's clients list models by this path too
        body = build_body(self._error)
        if isinstance(body, MessagesError):
            self.headers["request-id"] = body.request_id
        self.body = msgspec.json.encode(body)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def told(error: LocalspecError) -> Sequence[object]:
    """Return the events for an error in the middle of a stream: the last ones before [DONE]."""
    return [error_body(error)]


def known(error: Exception) -> LocalspecError:
    """Return `error` if it is one of ours. Anything else is a bug and becomes a general error."""
    return error if isinstance(error, LocalspecError) else mistake(error)


def mistake(error: BaseException) -> LocalspecError:
    """Log the traceback of a bug of ours and return a general error for the client."""
    log.error("a bug in a handler", exc_info=error)
    return LocalspecError("Internal error in the daemon; its log has the details: localspec logs")


async def on_ours(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalspecError)
    if error.status >= 500:
        log.warning("%s: %s", error.code, error.message)
    return Refusal(error)


async def on_body(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadBody)
    return Refusal(InvalidRequest(error.message, param=error.param))


async def on_gone(_request: Request, _error: Exception) -> Response:
    """Return nginx's status for a client that has left. Nobody reads this response."""
    return Refusal(Cancelled("The client disconnected before it was answered."))


async def on_http(request: Request, error: Exception) -> Response:
    """Return the response for an error of Starlette's: no such route, or a wrong method."""
    assert isinstance(error, HTTPException)
    # request.url would also parse the Host header, which may hold anything.
    refusal = LocalspecError(f"{request.method} {request.scope['path']}: {error.detail}.")
    refusal.status = error.status_code
    refusal.code = {404: "not_found", 405: "method_not_allowed"}.get(
        error.status_code, "http_error"
    )
    response = Refusal(refusal)
    response.headers.update(error.headers or {})
    return response


class LastResort:
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
                await Refusal(ending)(scope, receive, tracked_send)
            raise
        except Exception as error:  # a bug of ours
            if begun:
                raise
            await Refusal(mistake(error))(scope, receive, tracked_send)
