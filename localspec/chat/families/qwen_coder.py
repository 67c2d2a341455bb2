"""Qwen Coder's calls: a tag for the function and one for each parameter."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

TAGS = CallFormat(
    "named",
    ("<tool_call>",),
    "</function>\n</tool_call>",
    lead="\n<function=",
    middle=">\n",
    parameter=("<parameter=", ">\n", ">\n", "\n</parameter>\n"),
)
FAMILY = Family(
    "Qwen Coder",
    TAGS,
    r"(?s)\A(?=.*[^:]<tool_call>)(?=.*<function=).*<parameter=",
)
