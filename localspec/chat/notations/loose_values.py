"""Read values that are nearly JSON, as Gemma and LFM2 write them in calls."""

from __future__ import annotations

import json
import re
from typing import Any

from localspec.chat.notations.call_readers import parse_scalar

GEMMA_QUOTE = '<|"|>'  # Gemma 4 puts it around a text.

# A text in double quotes, which JSON escapes. In single quotes, templates escape nothing: a quote within the
# text is one that nothing follows which could follow a value.
_PYTHON_STRING = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.|'(?!\s*[,)\]}:]))*'(?=\s*[,)\]}:])""", re.DOTALL
)


class LooseValues:
    """Values like JSON, with bare keys, other quotes around text, and Python's constants."""

    _SCALAR = re.compile(r"[^,}\]]+")

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, at: int) -> tuple[Any, int]:
        """Return the value at `at`, and where it ends.

        Raises:
            ValueError: there is no valid value.
            IndexError: the text ends within the value.
        """
        at = self._skip_blanks(at)
        if self._text.startswith(GEMMA_QUOTE, at):
            return self._quoted(at)
        if self._text[at] == "{":
            return self._object(at + 1)
        if self._text[at] == "[":
            return self._array(at + 1)
        if self._text[at] == '"':
            value, end = json.JSONDecoder(strict=False).raw_decode(self._text, at)
            return value, end
        if self._text[at] == "'":
            end = string_end(self._text, at)
            if end < 0:
                raise ValueError("no closing quote")
            return _unquote(self._text[at + 1 : end - 1]), end
        scalar = self._SCALAR.match(self._text, at)
        if scalar is None:
            raise ValueError("no value")
        return parse_scalar(scalar[0].strip()), scalar.end()

    def _skip_blanks(self, at: int) -> int:
        while self._text[at].isspace():
            at += 1
        return at

    def _quoted(self, at: int) -> tuple[str, int]:
        start = at + len(GEMMA_QUOTE)
        end = self._text.index(GEMMA_QUOTE, start)
        return self._text[start:end], end + len(GEMMA_QUOTE)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        while self._text[at := self._skip_blanks(at)] != "}":
            if self._text.startswith((GEMMA_QUOTE, "'", '"'), at):
                key, at = self.value(at)
                at = self._text.index(":", at) + 1
            else:
                colon = self._text.index(":", at)
                key, at = self._text[at:colon].strip(), colon + 1
            members[key], at = self.value(at)
            at = self._skip_comma(at)
        return members, at + 1

    def _array(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while self._text[at := self._skip_blanks(at)] != "]":
            item, at = self.value(at)
            items.append(item)
            at = self._skip_comma(at)
        return items, at + 1

    def _skip_comma(self, at: int) -> int:
        at = self._skip_blanks(at)
        return at + 1 if self._text[at] == "," else at


def string_end(text: str, at: int) -> int:
    """Return the end of the string in quotes at `at`; -1 if it is not complete."""
    match = _PYTHON_STRING.match(text, at)
    return -1 if match is None else match.end()


_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\U([0-9a-fA-F]{8})|\\.|\"", re.DOTALL)


def _unquote(text: str) -> str:
    """Return the text between single quotes, with its escapes decoded if they are valid."""
    try:
        return str(json.loads(f'"{_ESCAPE.sub(_json_escape, text)}"', strict=False))
    except ValueError:
        return text


def _json_escape(escape: re.Match[str]) -> str:
    """Return one of Python's escapes, or a double quote, as JSON has it."""
    if code := escape[1] or escape[2]:
        return json.dumps(chr(int(code, 16)))[1:-1]
    return {"\\'": "'", '"': '\\"'}.get(escape[0], escape[0])
