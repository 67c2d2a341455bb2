"""Calls of Hermes, Qwen and many others: JSON between tags."""

from __future__ import annotations

from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.notations.family import Family
from localspec.chat.notations.literal_calls import LiteralCalls
from localspec.protocol.calls import UNKNOWN_FORMAT, CallFormat

HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n")
# Some models replace the JSON by Qwen Coder's tags.
FAMILY = Family(
    "Hermes", HERMES, r"<tool_call>", lambda _, tools, __: LiteralCalls(TAGS, tools), rank=2
)
# GLM and others use Hermes' markers, with a notation of their own between them.
OTHERS = Family(
    "",
    UNKNOWN_FORMAT,
    r"<tool_call>['\"] *[+~]|<arg_key>|<function=|:tool_call>|<tool_calls>|minimax",
    rank=1,
)
