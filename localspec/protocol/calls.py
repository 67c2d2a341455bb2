"""The notation of a model's tool calls, and which calls an answer may contain.

`chat/families` has the notation of each family of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

CALL_ID_PLACEHOLDER = "\0"  # stands for any call id in the literals of a `CallFormat`
TYPE_PLACEHOLDER = "\1"  # stands for the type of a value in the literals of a `CallFormat`
LITERAL_KINDS = ("named", "found")  # kinds of `CallFormat` that its literals describe
OPTION_PLACEHOLDER = "\2"  # stands before and behind an optional part of `CallFormat.middle`


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one family of models writes tool calls.

    The kinds are as follows, and a family may have another one of its own:

    - hermes: `{"name": …, "arguments": …}` between markers.
    - json: such objects as hermes has, or an array of them.
    - mistral: always an array of such objects.
    - named: by literals before and behind the name and the arguments, with a marker for each call.
    - gemma: `call:name{key:value}`.
    - python: `[name(key=value), …]`, with values in Python's notation or in JSON.
    - found: by literals, with one marker for all calls, mostly as a chat template was observed to write them.
    """

    kind: str
    opens: tuple[str, ...] = ()  # markers that begin a call, the usual one first
    close: str = ""  # marker that ends a call
    bare: bool = False  # an answer that is JSON from its first character on is a call, too
    arguments: str = "arguments"  # key of the arguments
    lead: str = ""  # text between a marker and the JSON
    middle: str = ""
    identity: str = ""  # marks a call's id after its name
    # What stands between the prompt and the marker of a required call, with the tool's name for
    # CALL_ID_PLACEHOLDER; and around thoughts, if these are a message of their own before it.
    head: str = ""
    thoughts: tuple[str, ...] = ()
    # The head of a message to the user, of a model whose answers consist of messages.
    answer: str = ""
    again: str = ""  # of a "found" format: between two calls, with their end and beginning
    # What stands before a key, before a text, before any other value, and behind a value. If it
    # is empty, the arguments are JSON.
    parameter: tuple[str, ...] = ()
    # Each argument is an element that its key names, nested as deep as the
    # value is, with the items of a list in <item>. This text stands before every tag.
    elements: str = ""
    recipient: str = ""  # stands for a call's name before text, if a prompt ends with the marker
    quote: str = ""  # what stands around a text, if that is not the quote of JSON
    told: bool = False  # the template does not support tools
    guessed: bool = False  # the template supports tools but does not say how calls are written


NO_TOOLS = CallFormat("json")
EXPLAINED = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n", told=True)
UNKNOWN_FORMAT = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n", guessed=True)


class ToolSet(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tool calls that an answer may contain."""

    format: CallFormat
    schemas: dict[str, Any]  # JSON Schema of each tool's arguments, by the tool's name
    required: bool = False  # the answer consists of calls and nothing else
    parallel: bool = True  # the answer may have several calls
    strict: list[str] = []  # tools whose schema must be enforced completely or be refused


def call_markers(form: CallFormat, names: Iterable[str]) -> tuple[str, ...]:
    """Return the markers that open calls in a text.

    Where the format's marker may also stand in a text, the name of one of the tools is part of it.
    """
    if not form.recipient:
        return form.opens
    return tuple(f"{form.opens[0]}{name}{form.middle}" for name in names)
