"""gpt-oss's calls: messages in channels, rewritten to Hermes' notation before they are read."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

HARMONY = CallFormat(
    "named",
    (
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant to=functions.",
    ),
    middle="\2<|channel|>commentary\2 \2<|constrain|>\2json<|message|>",
    thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    answer="<|channel|>final<|message|>",
)
FAMILY = Family("gpt-oss", HARMONY, r"<\|channel\|>")
