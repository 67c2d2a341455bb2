"""MiniMax M3's calls: nested elements, with a mark before every tag."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

MINIMAX_M3 = CallFormat(
    "found",
    ("]<]minimax[>[<tool_call>",),
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    lead='\n]<]minimax[>[<invoke name="',
    middle='">',
    again=']<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="',
    elements="]<]minimax[>[",
)
FAMILY = Family("MiniMax M3", MINIMAX_M3, r"\]<\]minimax\[>\[")
