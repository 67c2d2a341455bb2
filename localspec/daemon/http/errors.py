"""Errors as HTTP answers, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.errors import Cancelled, InvalidRequest, LocalspecError, Unavailable
from localspec.protocol.answers import ErrorBody, ErrorDetail
from localspec.protocol.reading import BadBody

log = logging.getLogger("localspec.http")


def error_body(error: LocalspecError) -> ErrorBody:
    kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
    detail = ErrorDetail(error.message, kind, error.param, error.code)
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        detail.n_prompt_tokens, detail.n_ctx = error.n_prompt_tokens, error.n_ctx
    return ErrorBody(detail)


def response(error: LocalspecError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return Response(
        msgspec.json.encode(error_body(error)), error.status, headers, "application/json"
    )


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
    return response(error)


async def on_body(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadBody)
    return response(InvalidRequest(error.message, param=error.param))


async def on_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads it; the number is nginx's for this."""
    return response(Cancelled("The client disconnected before it was answered."))


async def on_http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    # Not request.url: it reads the Host header too, which may be anything.
    ours = LocalspecError(f"{request.method} {request.scope['path']}: {error.detail}.")
    ours.status = error.status_code
    ours.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = response(ours)
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
                await response(ending)(scope, receive, watched)
            raise
        except Exception as error:  # a bug of ours
            if begun:
                raise
            await response(mistake(error))(scope, receive, watched)
