"""Errors as HTTP answers, in OpenAI's shape."""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from localspec.errors import InvalidRequest, LocalspecError
from localspec.protocol.http import BadBody, ErrorBody, ErrorDetail

log = logging.getLogger("localspec.http")


def error_body(error: LocalspecError) -> ErrorBody:
    kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
    return ErrorBody(ErrorDetail(error.message, kind, error.param, error.code))


def response(error: LocalspecError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return Response(
        msgspec.json.encode(error_body(error)), error.status, headers, "application/json"
    )


async def on_ours(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalspecError)
    if error.status >= 500:
        log.warning("%s: %s", error.code, error.message)
    return response(error)


async def on_body(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadBody)
    return response(InvalidRequest(error.message, param=error.param))


async def on_http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    ours = LocalspecError(f"{request.method} {request.url.path}: {error.detail}.")
    ours.status = error.status_code
    ours.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = response(ours)
    answer.headers.update(error.headers or {})
    return answer


async def on_bug(_request: Request, error: Exception) -> Response:
    """Anything else is a bug of ours: the log has the traceback, the client a sentence."""
    log.error("a bug in a handler", exc_info=error)
    return response(LocalspecError("The daemon made a mistake; its log has the details."))
