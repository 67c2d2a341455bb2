"""Qwen Coder's calls: a tag for the function and one for each parameter."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from localspec.chat.notations.call_readers import (
    Arguments,
    CallPiece,
    CallReader,
    NotationOrJson,
    ReadResult,
    convert_value,
    new_call,
    write_member,
)
from localspec.chat.notations.family import Family
from localspec.chat.notations.schemas import schema_types
from localspec.protocol.calls import CallFormat

TAGS = CallFormat("tags", ("<tool_call>",), "</tool_call>", lead="\n")

_FUNCTION_TAG = re.compile(r"<function=([^>\n]+)>")
_NEXT_TAG = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_PARAMETER_CLOSE = "</parameter>"
# Match up to the marker that ends a JSON value. Inside of a string the marker does not count.
_JSON_VALUE = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!/parameter>))*', re.DOTALL)


class TaggedCall(NotationOrJson):
    """Reads the inside of <tool_call>.

    It is JSON, or <function=name><parameter=key>value</parameter></function>. A value may contain any
    marker but the one that ends it; JSON may contain that one as well.
    """

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._schema: dict[str, Any] | None = None  # of the function, once its name is read
        self._at = 0  # how much of `raw` is read
        self._written = 0  # number of parameters read so far

    def _feed_notation(self, text: str) -> ReadResult:
        self.raw += text
        start = self.raw.lstrip()
        if start and not start.startswith("<"):
            return self._switch_to_json(self.raw.removesuffix(start), start)
        pieces: list[CallPiece] = []
        if self._schema is None and (name := _FUNCTION_TAG.search(self.raw)):
            self._schema, self._at = self._tools.get(name[1].strip(), {}), name.end()
            pieces.append(new_call(name[1].strip()))
        if self._schema is None:
            self.is_broken = not "<function=".startswith(start[:10])
            return [], ""
        while not self.is_finished and (tag := _NEXT_TAG.search(self.raw, self._at)):
            if not self._read_tag(tag, pieces, final=False):
                return pieces, ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        if not self.is_finished:
            self.raw, remaining = self.raw + remaining, ""
        return pieces, remaining

    def _read_tag(self, tag: re.Match[str], pieces: list[CallPiece], *, final: bool) -> bool:
        """Read what `tag` begins, a parameter or the end; return False if it is not complete yet."""
        if tag[1] is None:
            pieces.append(Arguments("}" if self._written else "{}"))
            self.is_finished, self._at = True, tag.end()
            return True
        schema = self._schema or {}
        properties = schema.get("properties")
        types = schema_types(
            properties.get(tag[1]) if isinstance(properties, dict) else None, schema
        )
        close = self.raw.find(_PARAMETER_CLOSE, tag.end())
        if close >= 0 and not final and not types & {"string", "any"}:
            value_match = _JSON_VALUE.match(self.raw, tag.end())
            assert value_match is not None  # the expression also matches an empty text
            close = (
                value_match.end()
                if self.raw.startswith(_PARAMETER_CLOSE, value_match.end())
                else -1
            )
        if close < 0:
            return False
        value = self.raw[tag.end() : close].removesuffix("\n")
        entry = write_member(tag[1], convert_value(value, types))
        pieces.append(Arguments((", " if self._written else "{") + entry))
        self._written, self._at = self._written + 1, close + len(_PARAMETER_CLOSE)
        return True

    def _end_notation(self) -> list[CallPiece]:
        self.is_broken = self._schema is None
        pieces: list[CallPiece] = []
        while not self.is_broken and not self.is_finished:
            tag = _NEXT_TAG.search(self.raw, self._at)
            if tag is None or not self._read_tag(tag, pieces, final=True):
                pieces.append(Arguments("}" if self._written else "{}"))
                break
        return pieces


def read_tags(form: CallFormat, tools: dict[str, Any], names: Collection[str] | None) -> CallReader:
    """Return the reader of calls between Hermes' markers, in JSON or in Qwen Coder's tags."""
    return TaggedCall(tools)


FAMILY = Family(
    "Qwen Coder",
    TAGS,
    r"(?s)\A(?=.*[^:]<tool_call>)(?=.*<function=).*<parameter=",
    read_tags,
)
