"""Calls of Hermes, Qwen and many others: JSON between tags."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.notations.call_readers import CallReader
from localspec.chat.notations.family import Family
from localspec.chat.notations.literal_calls import LiteralCalls
from localspec.protocol.calls import CallFormat

HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n")


def _read(form: CallFormat, tools: dict[str, Any], names: Collection[str] | None) -> CallReader:
    """Return a reader of JSON, which some models replace by Qwen Coder's tags."""
    return LiteralCalls(TAGS, tools)


FAMILY = Family("Hermes", HERMES, r"<tool_call>", _read)
