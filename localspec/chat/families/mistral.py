"""Mistral's calls: an array in JSON, or a name before its arguments, behind a marker."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.chat.notations.literal_calls import LiteralCalls
from localspec.protocol.calls import CallFormat

MISTRAL = CallFormat("mistral", ("[TOOL_CALLS]",))
MISTRAL_ARGS = CallFormat("named", ("[TOOL_CALLS]",), middle="[ARGS]", identity="[CALL_ID]")
# Some models replace the array by names before their arguments.
FAMILY = Family(
    "Mistral",
    MISTRAL,
    r"\[TOOL_CALLS\]",
    lambda _, tools, __: LiteralCalls(MISTRAL_ARGS, tools),
    rank=1,
)
NEWER = Family("newer Mistral models", MISTRAL_ARGS, r"\[ARGS\]")
