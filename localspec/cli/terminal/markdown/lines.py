"""What a line of Markdown is, from the lines before it."""

from __future__ import annotations

import copy
import re
from typing import Literal, NamedTuple

from localspec.cli.terminal.markdown.fences import Fences, without
from localspec.cli.terminal.markdown.inline import BOLD, DIM

_RULE = re.compile(r"^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
_HEADING = re.compile(r"^ {0,3}(?P<marks>#{1,6})[ \t]+(?P<text>.*?\S)(?:[ \t]+#+)?[ \t]*$")
_ITEM = re.compile(r"^(?P<indent> *)(?P<mark>[-*+]|\d{1,9}[.)])(?P<blank> +|$)(?P<text>.*)$")
_QUOTE = re.compile(r"^ {0,3}(?:> ?)+")
_CODE = 4  # columns of indentation that make a line code
_UNDERLINED = f"{BOLD};4"


class Line(NamedTuple):
    """`first` is drawn before `text`, and later rows begin at column `hang`; both have a style.

    "none" is not drawn; what is "apart" has an empty line before it.
    """

    kind: Literal["text", "code", "label", "rule", "blank", "none"]
    text: str = ""
    first: str = ""
    hang: int = 0
    style: str = ""
    apart: bool = False


class Reader:
    """Reads line by line."""

    def __init__(self) -> None:
        self._fences = Fences()
        self._blank = True  # the line before was, or was code
        self._after_code = False

    @property
    def in_code(self) -> bool:
        return self._fences.open

    @property
    def language(self) -> str:
        """Of the block that was opened last."""
        return self._fences.info.partition(" ")[0].strip("{}.")

    def take(self, line: str) -> Line:
        """What the next line is."""
        kind = self._fences.take(line)
        if kind == "code":
            return Line("code", self._fences.code(line))
        after, self._after_code = self._after_code, kind == "close"
        self._blank, blank = not line.strip(), self._blank
        if kind == "close":
            self._blank = True
            return Line("none")
        if kind == "open":
            return _label(self._fences)
        found = self._indented(line, blank) or _text(line.expandtabs(_CODE))
        return found._replace(apart=found.apart or after)

    def seen(self, line: str) -> Line:
        """As `take`, of a line that is not whole yet."""
        other = copy.copy(self)
        other._fences = copy.copy(self._fences)
        return other.take(line)

    def _indented(self, line: str, blank: bool) -> Line | None:
        """Code by indentation, which stands after an empty line and in no list."""
        rest = without(line, _CODE)
        deep = len(line.expandtabs(_CODE)) - len(rest.expandtabs(_CODE)) >= _CODE
        if not (blank and deep and line.strip()) or self._fences.in_list:
            return None
        self._blank = True
        return Line("code", rest)


def _label(fences: Fences) -> Line:
    """The line over a code block: what stood before the fence, and what language it names."""
    if not fences.before.strip() and not fences.info:
        return Line("none", apart=True)
    if not fences.before.strip():
        return Line("label", fences.info, style=DIM, apart=True)
    item = _text(f"{fences.before.expandtabs(_CODE)}x")
    return Line("label", item.text[:-1] + fences.info, item.first, item.hang, DIM)


def _text(line: str) -> Line:
    """A line outside of code; one that is not whole yet may still become something else."""
    if not line.strip():
        return Line("blank")
    if _RULE.match(line):
        return Line("rule", line.strip(), style=DIM)
    if found := _HEADING.match(line):
        return Line("text", found["text"], style=_UNDERLINED if found["marks"] == "#" else BOLD)
    if found := _ITEM.match(line):
        mark = found["mark"] if found["mark"][0].isdigit() else "•"
        first = f"{found['indent']}{mark}{found['blank'][:_CODE]}"
        return Line("text", found["text"], first, len(first))
    if found := _QUOTE.match(line):
        return Line("text", line[found.end() :], found[0], found.end())
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    return Line("text", text, " " * indent, indent)
