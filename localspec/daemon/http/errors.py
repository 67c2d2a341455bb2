"""Errors as HTTP answers, in the shape of the protocol that is spoken; OpenAI's where no other one is."""

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
from localspec.protocol.answers import ErrorBody, ErrorDetail, OllamaError
from localspec.protocol.clients.anthropic import MessagesError, MessagesErrorDetail
from localspec.protocol.reading import BadBody

log = logging.getLogger("localspec.http")


def error_body(error: LocalspecError) -> ErrorBody:
    kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
    detail = ErrorDetail(known_words(error), kind, error.param, error.code)
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        detail.n_prompt_tokens, detail.n_ctx = error.n_prompt_tokens, error.n_ctx
    return ErrorBody(detail)


# Anthropic's kinds of errors, by status; of others by the hundreds.
_KINDS = {
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
    """In Anthropic's shape, and where its clients look for them, in its words."""
    usual = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    message = error.message
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        # agents that see this sentence make their conversation shorter
        message = (
            f"prompt is too long: {error.n_prompt_tokens} tokens > {error.n_ctx} maximum. {message}"
        )
    elif error.code == ContextExceeded.code:
        message = f"prompt is too long. {message}"
    detail = MessagesErrorDetail(_KINDS.get(error.status, usual), message, error.code, error.param)
    if isinstance(error, ThreadUnsupported):
        detail.details = {"error_code": error.code, "unsupported": ["thread"]}
    elif isinstance(error, ThreadNotFound | ThreadMismatch):
        detail.details = {"error_code": error.code}
    return MessagesError(detail, messages_request())


def messages_request() -> str:
    """A name for a request, as each of Anthropic's answers has one in its head."""
    return f"req_{secrets.token_hex(12)}"


# Other protocols than OpenAI's, by how their paths begin.
_SHAPES: dict[str, Callable[[LocalspecError], object]] = {
    "/api/": lambda error: OllamaError(known_words(error)),
    "/v1/messages": messages_error,
}


class Refusal(Response):
    """An error as an answer; its shape depends on the path that was asked."""

    media_type = "application/json"

    def __init__(self, error: LocalspecError) -> None:
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        super().__init__(None, error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        shape = next(
            (each for begin, each in _SHAPES.items() if path.startswith(begin)), error_body
        )
        if path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope):
            shape = messages_error  # as its clients list models by this path, too
        body = shape(self._error)
        if isinstance(body, MessagesError):
            self.headers["request-id"] = body.request_id
        self.body = msgspec.json.encode(body)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def told(error: LocalspecError) -> Sequence[object]:
    """An error in the middle of server-sent events: the last of them but for [DONE]."""
    return [error_body(error)]


def known(error: Exception) -> LocalspecError:
    """One of ours; anything else is a bug."""
    return error if isinstance(error, LocalspecError) else mistake(error)


def mistake(error: BaseException) -> LocalspecError:
    """Anything else is a bug of ours: the log has the traceback, the client a sentence."""
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
    """Nobody reads it; the number is nginx's for this."""
    return Refusal(Cancelled("The client disconnected before it was answered."))


async def on_http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    # Not request.url: it reads the Host header too, which may be anything.
    ours = LocalspecError(f"{request.method} {request.scope['path']}: {error.detail}.")
    ours.status = error.status_code
    ours.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = Refusal(ours)
    answer.headers.update(error.headers or {})
    return answer


class LastResort:
    """Around everything else: whatever goes wrong inside, the client gets an answer of our shape.

    Where an answer has begun nothing can be said any more: the exception goes on to the server,
    which closes the connection, so that nobody takes the part for the whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # the server ends, and this hung
            if not begun:
                ending = Unavailable("The daemon is shutting down; try again.", retry_after=2)
                await Refusal(ending)(scope, receive, watched)
            raise
        except Exception as error:  # a bug of ours
            if begun:
                raise
            await Refusal(mistake(error))(scope, receive, watched)
