"""Colours of code, line by line while it is being written."""

from __future__ import annotations

import os
from typing import Any

from localspec.cli.terminal.markdown.inline import CODE, DIM, Text, painted, styled

_LINES = 200  # that are read again with each new one: what a line is hangs on those before it
# Token types of Pygments by their beginning, the longest first; colours that light and dark terminals have.
_STYLES = {
    "Token.Comment": DIM,
    "Token.Keyword": "35",
    "Token.Literal.Number": "36",
    "Token.Literal.String": "32",
    "Token.Name.Builtin": "36",
    "Token.Name.Class": "34",
    "Token.Name.Decorator": "33",
    "Token.Name.Exception": "33",
    "Token.Name.Function": "34",
    "Token.Name.Tag": "34",
    "Token.Operator.Word": "35",
}


class Highlighter:
    """Of one block; `language` is what its fence names."""

    def __init__(self, language: str) -> None:
        self._lines: list[str] = []
        self._plain = os.environ.get("NO_COLOR")
        self._lexer = None if self._plain else _lexer(language)

    def whole(self, line: str) -> str:
        """The block's next line with escape codes."""
        if self._plain:
            return line
        if self._lexer is None:
            return painted(styled(line, CODE))
        self._lines = [*self._lines[1 - _LINES :], line]
        return painted(self._coloured(line))

    def _coloured(self, line: str) -> Text:
        text = "\n".join(self._lines)
        begin, styles = len(text) - len(line), [""] * len(line)
        tokens: Any = self._lexer.get_tokens_unprocessed(f"{text}\n") if self._lexer else ()
        for at, kind, value in tokens:
            style = next((each for name, each in _STYLES.items() if str(kind).startswith(name)), "")
            for index in range(max(at - begin, 0), min(at + len(value) - begin, len(line))):
                styles[index] = style
        return Text(line, styles)


def _lexer(language: str) -> Any:
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None
