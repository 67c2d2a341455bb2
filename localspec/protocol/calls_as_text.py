"""Calls and their results as text of a chat, where a template has no other place for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def with_calls(text: str | None, calls: Iterable[dict[str, Any]]) -> str:
    """An answer's text, and each of its calls below it."""
    return "\n".join([*([text] if text else []), *map(_written, calls)])


def result(text: str | None) -> str:
    """What a tool gave back, for a question."""
    return f"<tool_response>\n{text or ''}\n</tool_response>"


def _written(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    body = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
