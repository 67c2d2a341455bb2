"""Tool calls: how families of models write them, what may be called, and calls as text of a chat, where a
template has no other place for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

ID = "\0"


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one family writes calls.

    hermes: {"name": …, "arguments": …} between markers. tags: the same, but for <function=…> with a
    <parameter=…> each. json: such objects, or an array of them; mistral: always the array. named: the
    name, `middle`, the arguments' JSON. gemma: call:name{key:value}. found: as a template was seen to write
    them, to the letter.

    opens, close: the markers around a call, the usual opening first. bare: an answer that is JSON from its
    first character is a call too. arguments: their key. lead: what stands between a marker and JSON.
    identity: marks a call's id after its name. again, of a found one: between two calls, both ends included;
    in its literals ID stands for any id. parameter: what stands before a key, before a text, before another
    value, and behind it; without it the arguments are JSON.
    told: the template knows no tools. guessed: it knows them, and not how calls are written.
    """

    kind: Literal["hermes", "tags", "json", "mistral", "named", "gemma", "found"]
    opens: tuple[str, ...] = ()
    close: str = ""
    bare: bool = False
    arguments: str = "arguments"
    lead: str = ""
    middle: str = ""
    identity: str = ""
    again: str = ""
    parameter: tuple[str, ...] = ()
    told: bool = False
    guessed: bool = False


class Tools(msgspec.Struct, frozen=True, omit_defaults=True):
    """The calls that an answer may have. schemas: of each tool's arguments, by its name.

    required: the answer is calls and nothing else. parallel: there may be several. strict: the names of
    those whose schema must hold or be refused; of others what cannot be held is left out.
    """

    format: CallFormat
    schemas: dict[str, Any]
    required: bool = False
    parallel: bool = True
    strict: list[str] = []


def types_of(schema: Any, root: dict[str, Any], depth: int = 20) -> set[str]:
    """The types of the values that a schema within `root` describes; {"any"} where it does not say.

    An argument is written as text where it can be nothing else, and as JSON where it cannot be text.
    """
    if not isinstance(schema, dict) or not depth:
        return {"any"}
    if "$ref" in schema:
        return types_of(_target(schema["$ref"], root), root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(each) for each in kind}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = {each for part in schema[key] for each in types_of(part, root, depth - 1)}
            return {"any"} if "any" in found else found
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {type_of(value) for value in schema.get("enum", [schema.get("const")])}
    return {"any"}


def type_of(value: object) -> str:
    """A value's type in JSON Schema's words; every number is a "number"."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"


def _target(pointer: Any, root: dict[str, Any]) -> Any:
    """What a reference within the schema leads to."""
    found: Any = root
    for name in str(pointer).removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return found if str(pointer).startswith("#") else None


# ------------------------------------------------------------------------ as text


def with_calls(text: str | None, calls: Iterable[dict[str, Any]]) -> str:
    """An answer's text, and each of its calls below it."""
    return "\n".join([*([text] if text else []), *map(_written, calls)])


def result_text(text: str | None) -> str:
    """What a tool gave back, for a question."""
    return f"<tool_response>\n{text or ''}\n</tool_response>"


def _written(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    body = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
