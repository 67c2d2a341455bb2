"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import Scope

from localspec.errors import (
    ContextExceeded,
    LocalspecError,
    ThreadMismatch,
    ThreadNotFound,
    ThreadUnsupported,
    stream_message,
)
from localspec.extras.anthropic.wire import MessagesError, MessagesErrorDetail

# Anthropic's types of errors by status. Other statuses get a general type for 4xx or 5xx.
_TYPES = {
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
    # Claude Code repeats a request with an `overloaded_error`, whatever else a response says.
    kind = default_type if error.permanent else _TYPES.get(error.status, default_type)
    detail = MessagesErrorDetail(kind, message, error.code, error.param)
    if isinstance(error, ThreadUnsupported):
        detail.details = {"error_code": error.code, "unsupported": ["thread"]}
    elif isinstance(error, ThreadNotFound | ThreadMismatch):
        detail.details = {"error_code": error.code}
    return MessagesError(detail, new_request_id())


def stream_error(error: LocalspecError) -> MessagesError:
    """Return an error in Anthropic's shape for a stream that has begun."""
    body = messages_error(error)
    if error.status >= 500:
        body.error.message = stream_message(error)
    return body


def new_request_id() -> str:
    """Return a new id for a request, which every response of Anthropic's has in its head."""
    return f"req_{secrets.token_hex(12)}"


def applies(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's clients, whatever path they use."""
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def shape(error: LocalspecError) -> tuple[object, dict[str, str]]:
    """Return an error as the body of a response, and its headers."""
    body = messages_error(error)
    return body, {"request-id": body.request_id}
