"""DeepSeek R1's calls: a name before its arguments in a fenced block, in a section of their own."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

DEEPSEEK_R1 = CallFormat(
    "found",
    ("<｜tool▁calls▁begin｜>",),
    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    lead="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    again="\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
)
FAMILY = Family("DeepSeek R1", DEEPSEEK_R1, r"<｜tool▁call▁begin｜>['\"].*<｜tool▁sep｜>.*```json")
