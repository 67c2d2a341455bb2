"""Calls of Hermes, Qwen and many others: JSON between tags."""

from __future__ import annotations

from localspec.chat.families.qwen_coder import read_tags
from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n")
FAMILY = Family("Hermes", HERMES, r"<tool_call>", read_tags)
