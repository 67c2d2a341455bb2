"""Colour code line by line while it is being generated."""

from __future__ import annotations

import os
from typing import Any

from localspec.cli.terminal.markdown.inline import CODE, DIM, Text, paint, styled

# Lines before a new one that are parsed again with it, because its colours depend on them (for example in
# a multi-line string).
_CONTEXT_LINES = 200
# Prefixes of token types of Pygments, with colours that are readable on light and dark terminals.
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
    """Colours the lines of one block. `language` is the name after its fence."""

    def __init__(self, language: str) -> None:
        self._lines: list[str] = []
        self._plain = os.environ.get("NO_COLOR")
        self._lexer = None if self._plain else _lexer(language)

    def whole(self, line: str) -> str:
        """Return the block's next complete line with escape codes."""
        if self._plain:
            return line
        if self._lexer is None:
            return paint(styled(line, CODE))
        self._lines = [*self._lines[1 - _CONTEXT_LINES :], line]
        return paint(self._coloured(line))

    def _coloured(self, line: str) -> Text:
        text = "\n".join(self._lines)
        line_start, styles = len(text) - len(line), [""] * len(line)
        tokens: Any = self._lexer.get_tokens_unprocessed(f"{text}\n") if self._lexer else ()
        for position, kind, value in tokens:
            style = next((code for name, code in _STYLES.items() if str(kind).startswith(name)), "")
            for index in range(
                max(position - line_start, 0), min(position + len(value) - line_start, len(line))
            ):
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
