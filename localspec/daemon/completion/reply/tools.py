"""Tools: how a model's template wants them, and a call when one is required.

Each family writes calls in its own way; which one it is shows in the template, which was written
for the same training data. A template that knows no tools is told of them in the first question.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from localspec.errors import InvalidRequest
from localspec.protocol import calls_as_text, frames
from localspec.protocol.requests import ChatRequest, ToolChoice


@dataclass(frozen=True, slots=True)
class Format:
    """How one family writes calls.

    opens, close: the markers around them. bare: an answer that is JSON from its first character is a
    call too. forced, forced_one: how an answer that must be a call begins; after `forced_one`, which
    names the tool, only its arguments follow.
    """

    kind: Literal["hermes", "json", "mistral", "gemma"]
    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    forced: str = ""
    forced_one: str = ""
    arguments: str = "arguments"
    told: bool = False  # the template knows no tools

    @property
    def markers(self) -> list[str]:
        """Control tokens, in some vocabularies, that must be seen in the answer."""
        found = [*self.opens, self.close] if self.close else [*self.opens]
        return [*found, "[ARGS]", "[CALL_ID]"] if self.kind == "mistral" else found


NO_TOOLS = Format("json", ())
HERMES = Format("hermes", ("<tool_call>",), "</tool_call>", forced="<tool_call>\n")
TOLD = Format("hermes", ("<tool_call>",), "</tool_call>", forced="<tool_call>\n", told=True)
LLAMA = Format("json", ("<|python_tag|>",), bare=True, arguments="parameters")
GRANITE = Format("json", ("<|tool_call|>", "<tool_call>"), forced="<|tool_call|>")
MISTRAL = Format("mistral", ("[TOOL_CALLS]",), forced="[TOOL_CALLS]")
MISTRAL_ARGS = Format(
    "mistral", ("[TOOL_CALLS]",), forced="[TOOL_CALLS]", forced_one="[TOOL_CALLS]{name}[ARGS]"
)
GEMMA = Format("gemma", ("<|tool_call>",), "<tool_call|>", forced="<|tool_call>")

_MARKS = (
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|tool_call>", GEMMA),
    ("<|tool_call|>", GRANITE),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA),
    ('"parameters":', LLAMA),
)


# A template's code, and in it what is text and no name.
_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")


def format_of(template: str | None) -> Format:
    """The format that goes with a chat template."""
    text = template or ""
    if not any(_TOOLS.search(_STRING.sub("", code)) for code in _CODE.findall(text)):
        return TOLD
    return next((form for mark, form in _MARKS if mark in text), HERMES)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request's tools come to: none where `tools` is empty.

    `forced`: the answer is a call, its marker already written; of the tool `forced_name`, if given.
    """

    form: Format
    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    parallel: bool = True
    constraint: frames.Constraint | None = None
    answer_prefix: str = ""
    forced: bool = False
    forced_name: str = ""


NOTHING = Offer(NO_TOOLS)


def offer(request: ChatRequest, template: str | None) -> Offer:
    """The tools that the model is shown; `template` matters where there are some.

    Raises:
        InvalidRequest: a second constraint beside a call that is required.
    """
    form = format_of(template)
    if not request.tools or request.tool_choice == "none":
        return Offer(form)
    schemas = {
        each.function.name: each.function.parameters or {"type": "object"} for each in request.tools
    }
    shown = [each.shown() for each in request.tools]
    parallel = request.parallel_tool_calls is not False
    if request.tool_choice in (None, "auto"):
        return Offer(form, shown, schemas, parallel)
    if request.response_format or request.json_schema or request.grammar or request.regex:
        raise InvalidRequest(
            "'tool_choice' requires a call, so no other response format can be requested.",
            param="tool_choice",
        )
    names = list(schemas)
    if isinstance(request.tool_choice, ToolChoice):
        names = [request.tool_choice.function.name]
    one = names[0] if len(names) == 1 and form.forced_one else ""
    try:
        schema = schemas[one] if one else _calls_schema(form, {n: schemas[n] for n in names})
    except RecursionError:
        raise InvalidRequest("The 'tools' are nested too deeply.", param="tools") from None
    return Offer(
        form,
        shown,
        schemas,
        parallel,
        frames.Constraint("json_schema", json.dumps(schema)),
        form.forced_one.format(name=one) if one else form.forced,
        True,
        one,
    )


_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


def check(request: ChatRequest) -> None:
    """What can be said before any model is loaded.

    Raises:
        InvalidRequest: a tool's name, or a choice that is not among the tools.
    """
    names: set[str] = set()
    for index, tool in enumerate(request.tools or []):
        name, path = tool.function.name, f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"'{path}' may have 1 to 128 letters, digits, underscores, dots and dashes, "
                f"not {name[:80]!r}.",
                param=path,
            )
        if name in names:
            raise InvalidRequest(f"'{path}': there are two tools called '{name}'.", param=path)
        names.add(name)
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"'tool_choice' names '{choice.function.name[:80]}', which is not among the 'tools'.",
            param="tool_choice",
        )


def _calls_schema(form: Format, schemas: dict[str, Any]) -> dict[str, Any]:
    """One call of one of these tools, as a JSON object."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, form.arguments: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    found: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    # Each whole, under its own name: two tools may have different definitions of one name.
    definitions = {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}
    return {**found, "$defs": definitions}


_DATA = ("const", "enum", "default", "examples")  # what stands there is no schema
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by names of any kind


def _moved(schema: Any, place: str) -> Any:
    """A whole schema for another `place`: its references begin there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: _moved(each, place) for name, each in value.items()}
        elif key not in ("$schema", "$id"):
            made[key] = value if key in _DATA else _moved(value, place)
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer.startswith("#"):
        made["$ref"] = place + pointer[1:]
    return made


# ---------------------------------------------------------------- templates that know no tools

_INSTRUCTION = """You may call these functions:
{tools}

To call one, answer with nothing but
<tool_call>
{{"name": "function's name", "arguments": {{...}}}}
</tool_call>
and you will be given its result. Otherwise answer as usual.

"""


def told(messages: list[frames.Message], tools: list[dict[str, Any]]) -> list[frames.Message]:
    """The conversation for a template without tools: they become text of questions and answers."""
    told_messages: list[frames.Message] = []
    lines = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in tools)
    explained = not tools
    if tools and not any(message.role == "user" for message in messages):
        # a system message: where a template knows none, it too becomes part of the first question
        instruction = _INSTRUCTION.format(tools=lines).rstrip()
        messages = [frames.Message("system", instruction), *messages]
        explained = True
    for message in messages:
        content = message.content or ""
        if message.role == "tool":
            result = calls_as_text.result(content)
            last = told_messages[-1] if told_messages else None
            if last is not None and last.role == "user":  # templates want the roles to alternate
                last.content = f"{last.content}\n{result}"
            else:
                told_messages.append(frames.Message("user", result))
            continue
        if calls := message.extra.get("tool_calls"):
            content = calls_as_text.with_calls(content, calls)
        if message.role == "user" and not explained:
            explained = True
            content = _INSTRUCTION.format(tools=lines) + content
        extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
        told_messages.append(frames.Message(message.role, content, extra))
    return told_messages
