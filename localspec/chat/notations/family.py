"""Define how a family of models writes tool calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from localspec.chat.notations.call_readers import CallReader, JsonCalls
from localspec.chat.notations.grammar import CallGrammar
from localspec.chat.notations.literal_calls import LiteralCalls
from localspec.protocol.calls import CallFormat

# Makes the reader of a format's calls: from the format, the tools' schemas by name, and the names that alone
# are calls, if not every name is.
MakeReader = Callable[[CallFormat, dict[str, Any], Collection[str] | None], CallReader]

# Writes calls, as they are in a message, as text.
CallsAsText = Callable[[Iterable[dict[str, Any]]], str]


def read_json(form: CallFormat, tools: dict[str, Any], names: Collection[str] | None) -> CallReader:
    """Return the reader of calls in JSON."""
    return JsonCalls() if names is None else JsonCalls(names.__contains__)


@dataclass(frozen=True)
class Family:
    """How one family of models writes calls.

    name: the family's name for people. pattern: what identifies the format in a chat template. Calls are
    constrained to the format, so a marker that several formats share is not enough. reader, grammar: what
    reads and constrains calls of the format's kind. rank: families of a higher rank are tried later, because
    a template of another family may match their expression, too. as_text: writes the calls of earlier
    answers, if templates of the family expect them in the text.
    """

    name: str
    format: CallFormat
    pattern: str
    reader: MakeReader = lambda form, tools, _: LiteralCalls(form, tools)
    grammar: type[CallGrammar] = CallGrammar
    rank: int = 0
    as_text: CallsAsText | None = None
