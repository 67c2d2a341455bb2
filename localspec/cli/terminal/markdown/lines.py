"""Classify a line of Markdown, depending on the lines before it."""

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
_CODE_INDENT = 4  # columns of indentation that make a line code
_UNDERLINED = f"{BOLD};4"


class Line(NamedTuple):
    """A line to draw.

    `first` is drawn before `text`, later rows begin at column `hang`, and both have the style. A line of kind
    "none" is not drawn. A line that is "apart" has an empty line before it.
    """

    kind: Literal["text", "code", "label", "rule", "blank", "none"]
    text: str = ""
    first: str = ""
    hang: int = 0
    style: str = ""
    apart: bool = False


class LineParser:
    """A line-by-line parser of Markdown."""

    def __init__(self) -> None:
        self._fences = Fences()
        self._follows_blank = True  # the previous line was blank or code
        self._follows_code = False

    @property
    def in_code(self) -> bool:
        return self._fences.open

    @property
    def language(self) -> str:
        """The language of the block that was opened last."""
        return self._fences.info.partition(" ")[0].strip("{}.")

    def take(self, line: str) -> Line:
        """Parse the next line."""
        kind = self._fences.take(line)
        if kind == "code":
            return Line("code", self._fences.code(line))
        follows_code, self._follows_code = self._follows_code, kind == "close"
        self._follows_blank, follows_blank = not line.strip(), self._follows_blank
        if kind == "close":
            self._follows_blank = True
            return Line("none")
        if kind == "open":
            return _make_label(self._fences)
        parsed = self._parse_indented_code(line, follows_blank) or _parse_text_line(
            line.expandtabs(_CODE_INDENT)
        )
        return parsed._replace(apart=parsed.apart or follows_code)

    def seen(self, line: str) -> Line:
        """Parse a line that is not complete yet, without changing the state."""
        copied_reader = copy.copy(self)
        copied_reader._fences = copy.copy(self._fences)
        return copied_reader.take(line)

    def _parse_indented_code(self, line: str, follows_blank: bool) -> Line | None:
        """Return code by indentation, which follows an empty line and is in no list, or None."""
        code = without(line, _CODE_INDENT)
        is_indented = (
            len(line.expandtabs(_CODE_INDENT)) - len(code.expandtabs(_CODE_INDENT)) >= _CODE_INDENT
        )
        if not (follows_blank and is_indented and line.strip()) or self._fences.in_list:
            return None
        self._follows_blank = True
        return Line("code", code)


def _make_label(fences: Fences) -> Line:
    """Return the line above a code block: the text before the fence, and the language."""
    if not fences.before.strip() and not fences.info:
        return Line("none", apart=True)
    if not fences.before.strip():
        return Line("label", fences.info, style=DIM, apart=True)
    item = _parse_text_line(f"{fences.before.expandtabs(_CODE_INDENT)}x")
    return Line("label", item.text[:-1] + fences.info, item.first, item.hang, DIM)


def _parse_text_line(line: str) -> Line:
    """Return a line outside of code. An incomplete line may still become a different kind."""
    if not line.strip():
        return Line("blank")
    if _RULE.match(line):
        return Line("rule", line.strip(), style=DIM)
    if match := _HEADING.match(line):
        return Line("text", match["text"], style=_UNDERLINED if match["marks"] == "#" else BOLD)
    if match := _ITEM.match(line):
        mark = match["mark"] if match["mark"][0].isdigit() else "•"
        first = f"{match['indent']}{mark}{match['blank'][:_CODE_INDENT]}"
        return Line("text", match["text"], first, len(first))
    if match := _QUOTE.match(line):
        return Line("text", line[match.end() :], match[0], match.end())
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    return Line("text", text, " " * indent, indent)
