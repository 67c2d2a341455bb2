"""Tool calls: how model families write them, which are allowed, and calls as text of a chat.

Calls become text where a chat template has no other place for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

CALL_ID_PLACEHOLDER = "\0"  # stands for any call id in the literals of a `CallFormat`
TYPE_PLACEHOLDER = "\1"  # stands for the type of a value in the literals of a `CallFormat`
OPTION_PLACEHOLDER = "\2"  # stands before and behind an optional part of `CallFormat.middle`
GEMMA_QUOTE = '<|"|>'  # Gemma 4 puts it around a text


class CallFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one family of models writes tool calls.

    The kinds are:

    - hermes: `{"name": …, "arguments": …}` between markers.
    - tags: `<function=…>` between markers, with a `<parameter=…>` for each argument.
    - json: such objects as hermes has, or an array of them.
    - mistral: always an array of such objects.
    - named: the name, then `middle`, then the arguments as JSON.
    - gemma: `call:name{key:value}`.
    - python: `[name(key=value), …]`, with values in Python's notation or in JSON.
    - found: by literals, mostly as a chat template was observed to write them.
    """

    kind: Literal["hermes", "tags", "json", "mistral", "named", "gemma", "python", "found"]
    # Markers that begin a call, the usual one first.
    opens: tuple[str, ...] = ()
    # Marker that ends a call.
    close: str = ""
    # An answer that is JSON from its first character on is a call, too.
    bare: bool = False
    # Key of the arguments.
    arguments: str = "arguments"
    # Text between a marker and the JSON.
    lead: str = ""
    middle: str = ""
    # Marks a call's id after its name.
    identity: str = ""
    # What stands between the prompt and the marker of a required call, with the tool's name for
    # CALL_ID_PLACEHOLDER; and around thoughts, if these are a message of their own before it.
    head: str = ""
    thoughts: tuple[str, ...] = ()
    # Of a "found" format: what stands between two calls, including the end of the first and the
    # beginning of the second.
    again: str = ""
    # What stands before a key, before a text, before any other value, and behind a value. If it
    # is empty, the arguments are JSON.
    parameter: tuple[str, ...] = ()
    # Of a "found" format: each argument is an element that its key names, nested as deep as the
    # value is, with the items of a list in <item>. This text stands before every tag.
    elements: str = ""
    # What stands for a call's name before text, of a model whose prompt ends with the marker.
    recipient: str = ""
    # The template does not support tools.
    told: bool = False
    # The template supports tools but does not say how calls are written.
    guessed: bool = False


NO_TOOLS = CallFormat("json")
HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n")
TAGS = CallFormat("tags", ("<tool_call>",), "</tool_call>", lead="\n")
EXPLAINED = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n", told=True)
LLAMA = CallFormat("json", ("<|python_tag|>",), bare=True, arguments="parameters")
GRANITE = CallFormat("json", ("<|tool_call|>", "<tool_call>"))
MISTRAL = CallFormat("mistral", ("[TOOL_CALLS]",))
MISTRAL_ARGS = CallFormat("named", ("[TOOL_CALLS]",), middle="[ARGS]", identity="[CALL_ID]")
GEMMA = CallFormat("gemma", ("<|tool_call>",), "<tool_call|>")
FUNCTIONARY = CallFormat("named", ("<function=",), "</function>", middle=">")
FUNCTIONARY_3_2 = CallFormat("named", (">>>",), middle="\n", recipient="all\n")
NEMOTRON = CallFormat("mistral", ("<TOOLCALL>",), "</TOOLCALL>")
# gpt-oss's messages in channels. Their text is rewritten to Hermes' notation before it is read.
HARMONY = CallFormat(
    "named",
    (
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant to=functions.",
    ),
    middle="\2<|channel|>commentary\2 \2<|constrain|>\2json<|message|>",
    thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)
MUSE = CallFormat(
    "found",
    ("<atem:function_calls>",),
    "</atem:invoke>\n</atem:function_calls>",
    lead='\n<atem:invoke name="',
    middle='">\n',
    parameter=('<atem:parameter name="', '">', '">', "</atem:parameter>\n"),
    head=f" to={CALL_ID_PLACEHOLDER}<|message|>",
    thoughts=(" to=self<|message|>", "<|eom|><|start|>assistant"),
)
LFM2 = CallFormat("python", ("<|tool_call_start|>",), "<|tool_call_end|>")
MINIMAX_M3 = CallFormat(
    "found",
    ("]<]minimax[>[<tool_call>",),
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    lead='\n]<]minimax[>[<invoke name="',
    middle='">',
    again=']<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="',
    elements="]<]minimax[>[",
)
KIMI_K2 = CallFormat(
    "found",
    ("<|tool_calls_section_begin|>",),
    "<|tool_call_end|><|tool_calls_section_end|>",
    lead="<|tool_call_begin|>functions.",
    middle=f":{CALL_ID_PLACEHOLDER}<|tool_call_argument_begin|>",
    again="<|tool_call_end|><|tool_call_begin|>functions.",
)
KIMI_K3 = CallFormat(
    "found",
    ("<|open|>tools<|sep|>",),
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    lead='<|open|>call tool="',
    middle=f'" index="{CALL_ID_PLACEHOLDER}"<|sep|>',
    again='<|close|>call<|sep|><|open|>call tool="',
    parameter=(
        '<|open|>argument key="',
        '" type="string"<|sep|>',
        f'" type="{TYPE_PLACEHOLDER}"<|sep|>',
        "<|close|>argument<|sep|>",
    ),
    head="<|open|>response<|sep|><|close|>response<|sep|>",
)
COMMAND_R = CallFormat(
    "found",
    ("Action:\n```json\n[", "Action: ```json\n["),
    "\n    }\n]```",
    lead='\n    {\n        "tool_name": "',
    middle='",\n        "parameters": ',
    again='\n    },\n    {\n        "tool_name": "',
)
UNKNOWN_FORMAT = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n", guessed=True)


class ToolSet(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tool calls that an answer may contain."""

    format: CallFormat
    # JSON Schema of each tool's arguments, by the tool's name.
    schemas: dict[str, Any]
    # The answer consists of calls and nothing else.
    required: bool = False
    # The answer may have several calls.
    parallel: bool = True
    # Names of the tools whose schema must be enforced completely or be refused. Of other schemas
    # the parts that cannot be enforced are left out.
    strict: list[str] = []


def call_markers(form: CallFormat, names: Iterable[str]) -> tuple[str, ...]:
    """Return the markers that open calls in a text.

    Where the format's marker may also stand in a text, the name of one of the tools is part of it.
    """
    if not form.recipient:
        return form.opens
    return tuple(f"{form.opens[0]}{name}{form.middle}" for name in names)


def schema_types(schema: Any, root: dict[str, Any], depth: int = 20) -> set[str]:
    """Return the types that a schema within `root` allows, {"any"} if it does not say.

    An argument that can only be a string is written as plain text; one that cannot be a string is
    written as JSON.
    """
    if not isinstance(schema, dict) or not depth:
        return {"any"}
    if "$ref" in schema:
        return schema_types(_resolve_reference(schema["$ref"], root), root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(name) for name in kind}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types = {name for part in schema[key] for name in schema_types(part, root, depth - 1)}
            return {"any"} if "any" in types else types
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {json_type(value) for value in schema.get("enum", [schema.get("const")])}
    return {"any"}


def child_schema(schema: Any, key: str, root: dict[str, Any], depth: int = 20) -> Any:
    """Return the schema of a member of an object, or of the items of a list; None if there is none."""
    if not isinstance(schema, dict) or not depth:
        return None
    if "$ref" in schema:
        return child_schema(_resolve_reference(schema["$ref"], root), key, root, depth - 1)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name) or ()]
    children = (child_schema(part, key, root, depth - 1) for part in parts)
    inner = schema.get("items", schema.get("additionalProperties"))
    return next((child for child in children if child is not None), inner)


def json_type(value: object) -> str:
    """Return a value's type as JSON Schema names it; every number is a "number"."""
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


def _resolve_reference(pointer: Any, root: dict[str, Any]) -> Any:
    """Return what a `$ref` within the schema refers to, or None."""
    node: Any = root
    for name in str(pointer).removeprefix("#").split("/")[1:]:
        node = node.get(name) if isinstance(node, dict) else None
    return node if str(pointer).startswith("#") else None


# ------------------------------------------------------------------------ as text


def append_calls(text: str | None, calls: Iterable[dict[str, Any]]) -> str:
    """Return an answer's text, followed by each of its calls."""
    return "\n".join([*([text] if text else []), *map(_format_call, calls)])


def append_python_calls(text: str | None, calls: Iterable[dict[str, Any]], form: CallFormat) -> str:
    """Return an answer's text, followed by its calls in a notation of the kind "python"."""
    written = ", ".join(_write_python_call(call.get("function") or {}) for call in calls)
    return f"{text or ''}{form.opens[0]}[{written}]{form.close}"


def _write_python_call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return f"{function.get('name')}(**{arguments or {}})"
    entries = (f"{key}={_write_python(value)}" for key, value in arguments.items())
    return f"{function.get('name')}({', '.join(entries)})"


def _write_python(value: Any) -> str:
    is_constant = value is None or isinstance(value, bool)
    return repr(value) if is_constant else json.dumps(value, ensure_ascii=False)


def format_tool_result(text: str | None) -> str:
    """Return a tool's result as the text of a user message."""
    return f"<tool_response>\n{text or ''}\n</tool_response>"


def _format_call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    body = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
