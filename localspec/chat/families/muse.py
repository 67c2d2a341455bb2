"""Muse Glimmer's calls: tags in a message to the function."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, CallFormat

MUSE = CallFormat(
    "found",
    ("<atem:function_calls>",),
    "</atem:invoke>\n</atem:function_calls>",
    lead='\n<atem:invoke name="',
    middle='">\n',
    parameter=('<atem:parameter name="', '">', '">', "</atem:parameter>\n"),
    head=f" to={CALL_ID_PLACEHOLDER}<|message|>",
    thoughts=(" to=self<|message|>", "<|eom|><|start|>assistant"),
    answer=" to=user<|message|>",
)
FAMILY = Family("Muse Glimmer", MUSE, r"<atem:function_calls>")
