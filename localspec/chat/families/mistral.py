"""Mistral's calls: an array in JSON, or a name before its arguments, behind a marker."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from localspec.chat.notations.call_readers import CallReader
from localspec.chat.notations.family import Family
from localspec.chat.notations.literal_calls import LiteralCalls, read_literals
from localspec.protocol.calls import CallFormat

MISTRAL = CallFormat("mistral", ("[TOOL_CALLS]",))
MISTRAL_ARGS = CallFormat("named", ("[TOOL_CALLS]",), middle="[ARGS]", identity="[CALL_ID]")


def read_array(
    form: CallFormat, tools: dict[str, Any], names: Collection[str] | None
) -> CallReader:
    """Return a reader of an array, which some models replace by names before their arguments."""
    return LiteralCalls(MISTRAL_ARGS, tools)


FAMILY = Family("Mistral", MISTRAL, r"\[TOOL_CALLS\]", read_array)
NEWER = Family("newer Mistral models", MISTRAL_ARGS, r"\[ARGS\]", read_literals)
