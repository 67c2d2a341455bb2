"""Calls of Kimi K2 and K3: arguments in JSON or in parts, in a section of their own."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, TYPE_PLACEHOLDER, CallFormat

KIMI_K2 = CallFormat(
    "found",
    ("<|tool_calls_section_begin|>",),
    "<|tool_call_end|><|tool_calls_section_end|>",
    lead="<|tool_call_begin|>functions.",
    middle=f":{CALL_ID_PLACEHOLDER}<|tool_call_argument_begin|>",
    again="<|tool_call_end|><|tool_call_begin|>functions.",
)
KIMI_K3 = CallFormat(
    "found",
    ("<|open|>tools<|sep|>",),
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    lead='<|open|>call tool="',
    middle=f'" index="{CALL_ID_PLACEHOLDER}"<|sep|>',
    again='<|close|>call<|sep|><|open|>call tool="',
    parameter=(
        '<|open|>argument key="',
        '" type="string"<|sep|>',
        f'" type="{TYPE_PLACEHOLDER}"<|sep|>',
        "<|close|>argument<|sep|>",
    ),
    head="<|open|>response<|sep|><|close|>response<|sep|>",
)
FAMILY = Family("Kimi K2", KIMI_K2, r"<\|tool_calls_section_begin\|>")
FAMILY_K3 = Family("Kimi K3", KIMI_K3, r"<\|end_of_msg\|>")
