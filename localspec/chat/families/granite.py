"""Granite 3's calls: an array in JSON behind a marker."""

from __future__ import annotations

from localspec.chat.notations.family import Family, read_json
from localspec.protocol.calls import CallFormat

GRANITE = CallFormat("json", ("<|tool_call|>", "<tool_call>"))
FAMILY = Family("Granite 3", GRANITE, r"<\|tool_call\|>", read_json)
