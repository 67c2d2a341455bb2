"""Mistral's calls: an array in JSON, or a name before its arguments, behind a marker."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from localspec.chat.notations.call_readers import (
    CallPiece,
    CallReader,
    NotationOrJson,
    ReadResult,
    new_call,
)
from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

MISTRAL = CallFormat("mistral", ("[TOOL_CALLS]",))
MISTRAL_ARGS = CallFormat("named", ("[TOOL_CALLS]",), middle="[ARGS]", identity="[CALL_ID]")


class ArgsCalls(NotationOrJson):
    """Reads the inside of [TOOL_CALLS]: an array of calls, name[ARGS]{…}, or name[CALL_ID]id[ARGS]{…}."""

    _MAX_HEAD_CHARS = 200  # a longer name and id means that it is not a call

    def __init__(self, middle: str) -> None:
        super().__init__()
        self._middle = middle

    def _feed_notation(self, text: str) -> ReadResult:
        self.raw += text
        start = self.raw.lstrip()
        if start.startswith("{") or (re.match(r"\[\s*(\{|$)", start) and start != "["):
            return self._switch_to_json("", start)
        head, separator, arguments = start.partition(self._middle)
        if not separator:
            self.is_broken = "\n" in start or len(start) > self._MAX_HEAD_CHARS
            return [], ""
        name, _, call_id = head.partition("[CALL_ID]")
        call = new_call(name.strip())
        call.id = call_id.strip() or call.id
        return self._switch_to_json(head + separator, arguments, call)

    def _end_notation(self) -> list[CallPiece]:
        self.is_broken = True
        return []


def read_named(
    form: CallFormat, tools: dict[str, Any], names: Collection[str] | None
) -> CallReader:
    """Return the reader of calls whose name stands before the arguments, or of an array in JSON."""
    return ArgsCalls(form.middle or "[ARGS]")


FAMILY = Family("Mistral", MISTRAL, r"\[TOOL_CALLS\]", read_named)
NEWER = Family("newer Mistral models", MISTRAL_ARGS, r"\[ARGS\]", read_named)
