"""The errors of each protocol, as its clients read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ErrorShape:
    """The JSON of an error.

    fields: those of the body. error_field: the one that holds the error. is_sentence: the error is its
    message; otherwise it is an object with a message, a type, a parameter and a code.
    """

    fields: frozenset[str] = frozenset({"error"})
    error_field: str = "error"
    is_sentence: bool = False


OPTIONAL = {"n_prompt_tokens", "n_ctx", "details"}
OPENAI = ErrorShape()
# By the beginning of the path. All other paths have OpenAI's shape.
ERROR_SHAPES = {
    "/v1/messages": ErrorShape(frozenset({"error", "type", "request_id"})),
    "/api/": ErrorShape(is_sentence=True),
}


def find_shape(path: str) -> ErrorShape:
    return next((ERROR_SHAPES[start] for start in ERROR_SHAPES if path.startswith(start)), OPENAI)


def has_error(path: str, body: Any) -> bool:
    """Return whether an answer, an event or a line of a stream is an error."""
    return isinstance(body, dict) and find_shape(path).error_field in body


def read_error(path: str, body: dict[str, Any]) -> tuple[str, str | None]:
    """Return the message and the code of an error, after a check of its shape; a sentence has no code."""
    shape = find_shape(path)
    error = body[shape.error_field]
    assert set(body) == shape.fields, body
    if shape.is_sentence:
        assert isinstance(error, str), body
        return error, None
    assert set(error) - OPTIONAL == {"message", "type", "param", "code"}, body
    return error["message"], error["code"]
