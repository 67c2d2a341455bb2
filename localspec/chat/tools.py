"""Offer tools in the way a model's template expects, and require a call where a request does.

Each family of models writes calls in its own notation. The template shows which one, because it was
written for the same training data. If a template does not support tools, they are explained in the first
question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UnsetType

from localspec.chat.families import family_name
from localspec.chat.wordings import append_calls, format_tool_result
from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, NO_TOOLS, CallFormat, ToolSet
from localspec.protocol.fields import IgnoredFields
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    Function,
    GenerationRequest,
    NamedFunction,
    TemplateRequest,
    Tool,
    ToolChoice,
)

# Read the one constraint of an answer, under whichever of its many names a request gives it.


_ConstraintKind = Literal["schema", "json", "choice", "grammar", "regex", "json_object"]
# The fields with a constraint and what each of them has: those of llama-server and localspec, SGLang's
# `ebnf`, and vLLM's older and newer ones.
_CONSTRAINT_FIELDS: dict[str, _ConstraintKind] = {
    "json_schema": "schema",
    "grammar": "grammar",
    "ebnf": "grammar",
    "regex": "regex",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structured_outputs.json": "json",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json_object": "json_object",
}


def read_constraint(request: GenerationRequest) -> frames.Constraint | None:
    """Return the grammar, schema or expression that the answer must match; None if it is free.

    Raises:
        InvalidRequest: the request has two constraints, an empty one, or one that is not supported.
    """
    constraints = [*_response_format(request)]
    outputs = request.structured_outputs
    if outputs is not None and outputs.structural_tag:
        param = "structured_outputs.structural_tag"
        raise InvalidRequest(
            f"'{param}' is not supported: send 'regex', 'grammar' or 'response_format'.",
            param=param,
        )
    for param, kind in _CONSTRAINT_FIELDS.items():
        value: Any = request
        for name in param.split("."):
            value = getattr(value, name, None)
        if value or (kind == "schema" and value is not None):
            constraints.append(_constraint_of(param, kind, value))
    if len(constraints) > 1:
        names = " and ".join(f"'{entry.param}'" for entry in constraints)
        raise InvalidRequest(f"{names} cannot be used together.", param=constraints[1].param)
    return constraints[0] if constraints else None


def _constraint_of(param: str, kind: _ConstraintKind, value: Any) -> frames.Constraint:
    match kind:
        case "schema":
            return _schema_constraint(param, value)
        case "json":
            return _schema_constraint(param, _decode_schema(value, param))
        case "choice":
            if not all(value):
                raise InvalidRequest(f"'{param}' contains an empty text.", param=param)
            source = "|".join(map(re.escape, dict.fromkeys(value)))
            return frames.Constraint("regex", f"({source})", param=param)
        case "grammar" | "regex":
            return frames.Constraint(kind, value, param=param)
    return frames.Constraint("json_object", param=param)


def _response_format(request: GenerationRequest) -> Iterator[frames.Constraint]:
    response_format = request.response_format
    if response_format is None or response_format.type == "text":
        return
    if response_format.type == "json_object" and response_format.schema is None:
        yield frames.Constraint("json_object", param="response_format")
        return
    source = response_format.json_schema or response_format
    schema = source.schema
    if schema is None:
        raise InvalidRequest(
            "'response_format.json_schema' is missing.", param="response_format.json_schema"
        )
    # As in llama-server, an empty schema means any object.
    yield _schema_constraint("response_format", schema or {"type": "object"}, bool(source.strict))


def _decode_schema(schema: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return a schema, which vLLM's clients may also send as JSON text.

    Raises:
        InvalidRequest: the text is not a JSON object.
    """
    if isinstance(schema, dict):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is no JSON Schema: {error}.", param=param) from None


def _schema_constraint(
    param: str, schema: dict[str, Any], strict: bool = False
) -> frames.Constraint:
    source = msgspec.json.encode(schema).decode()
    return frames.Constraint("json_schema", source, param=param, strict=strict)


# Translate OpenAI's older form of tools: `functions`, `function_call` and the role "function".
#
# They become tools before anything else reads the request, and the answer's call is translated back.


def convert_functions(request: ChatRequest) -> bool:
    """Turn functions into tools in place; return whether the answer's call must have the older form.

    Raises:
        InvalidRequest: the request has both forms, or a choice without functions.
    """
    _check(request)
    convert_function_messages(request)
    if request.functions is None:
        return False
    request.tools = [Tool(function) for function in request.functions]
    request.parallel_tool_calls = False  # the older form allows one call only
    match request.function_call:
        case NamedFunction(name):
            request.tool_choice = ToolChoice(NamedFunction(name))
        case "none":
            request.tool_choice = "none"
    return True


def _check(request: ChatRequest) -> None:
    if request.functions is not None and not request.functions:
        request.functions = None
    if request.functions is None and isinstance(request.function_call, NamedFunction):
        raise InvalidRequest("'function_call' needs 'functions'.", param="function_call")
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, older) is not None and getattr(request, newer) is not None:
            raise InvalidRequest(f"'{older}' and '{newer}' cannot be used together.", param=older)
    if isinstance(request.function_call, NamedFunction):
        name = request.function_call.name
        if name not in {function.name for function in request.functions or []}:
            raise InvalidRequest(
                f"'function_call.name' is {name[:80]!r}, which is none of 'functions'.",
                param="function_call.name",
            )


def convert_function_messages(request: ChatRequest | TemplateRequest) -> None:
    """Turn earlier calls and results of the older form into those of tools, in place."""
    calls = 0
    for index, message in enumerate(request.messages):
        if message.function_call is not None:
            calls += 1
            _convert_call(message, index, calls)
        elif message.role == "function":
            message.role = "tool"
            message.tool_call_id = message.tool_call_id or _call_id(max(calls, 1))


def _convert_call(message: ChatMessage, index: int, number: int) -> None:
    if message.tool_calls:
        path = f"messages[{index}].function_call"
        raise InvalidRequest(f"'{path}' cannot be used together with 'tool_calls'.", param=path)
    assert message.function_call is not None
    name, arguments = message.function_call.name, message.function_call.arguments
    function = {"name": name, "arguments": arguments or "{}"}
    message.tool_calls = [{"id": _call_id(number), "type": "function", "function": function}]
    message.function_call = None


def _call_id(number: int) -> str:
    """Return an id of nine characters, because Mistral's templates refuse every other length."""
    return f"call{number:05d}"


# A custom tool has no schema: its input is a text. It becomes a function with one parameter.

CUSTOM_INPUT = "input"  # the one parameter


def custom_parameters() -> dict[str, Any]:
    """Return the schema of a custom tool's function."""
    text = {"type": "string", "description": "The whole input, as plain text."}
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def describe_grammar(syntax: object, definition: object) -> str:
    """Return what a model is told of the grammar of a custom tool's input."""
    return f"\nThe input obeys this {syntax} grammar:\n{definition}"


def custom_arguments(text: object) -> str:
    """Return the arguments of a call of a custom tool's function."""
    return msgspec.json.encode({CUSTOM_INPUT: text if isinstance(text, str) else ""}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool; if the arguments were cut off, all that was written."""
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return arguments
    value = decoded.get(CUSTOM_INPUT) if isinstance(decoded, dict) else None
    return value if isinstance(value, str) else arguments


def convert_custom_tools(
    request: ChatRequest | TemplateRequest, ignored: IgnoredFields | None = None
) -> frozenset[str]:
    """Turn custom tools, their calls and their choice into functions in place. Return the tools' names.

    A grammar, to which no input is held, is added to `ignored`.

    Raises:
        InvalidRequest: a tool or the choice lacks what its type says.
    """
    names = set()
    for index, tool in enumerate(request.tools or []):
        path = f"tools[{index}]"
        if tool.type == "custom":
            custom = _present(tool.custom, f"{path}.custom")
            text, grammar = custom.description, custom.format and custom.format.grammar
            if grammar:
                text += describe_grammar(grammar.syntax, grammar.definition)
                if ignored is not None:
                    ignored.add(f"{path}.custom.format")
            names.add(custom.name)
            assert request.tools is not None
            request.tools[index] = Tool(Function(custom.name, text, custom_parameters()))
        elif not tool.function.name and "function" not in tool.__dict__.get("own", {}):
            _present(None, f"{path}.function")
    for message in request.messages:
        message.tool_calls = [*map(_convert_custom_call, message.tool_calls or [])] or None
    if isinstance(request, ChatRequest) and isinstance(request.tool_choice, ToolChoice):
        _convert_custom_choice(request, request.tool_choice)
    return frozenset(names)


_Value = TypeVar("_Value")


def _present(value: _Value | UnsetType | None, path: str) -> _Value:
    if value is None or isinstance(value, UnsetType):
        raise InvalidRequest(f"'{path}' is missing.", param=path)
    return value


def _convert_custom_call(call: dict[str, Any]) -> dict[str, Any]:
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom.get("input"))}
    return {"id": call.get("id"), "type": "function", "function": function}


def _convert_custom_choice(request: ChatRequest, choice: ToolChoice) -> None:
    if choice.type == "custom":
        request.tool_choice = ToolChoice(_present(choice.custom, "tool_choice.custom"))
    elif choice.type == "allowed_tools" and choice.allowed_tools:
        for entry in choice.allowed_tools.tools:
            if entry.get("type") == "custom":
                entry["function"] = entry.get("custom")


def control_tokens(form: CallFormat) -> list[str]:
    """Return the control tokens of a format, whose text the answer has to contain."""
    tokens = [*form.opens, form.close, form.middle, form.identity, form.elements, form.quote]
    if form.kind == "found" or form.thoughts or form.parameter:
        literals = *form.opens, form.lead, form.middle, form.again, form.close, *form.parameter
        literals += *form.thoughts, form.head, form.answer
        tokens = [token for text in literals for token in _CONTROL_TOKEN.findall(text)]
        tokens.append(form.elements)
    return list(dict.fromkeys(filter(None, tokens)))


_CONTROL_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|[|｜][^<>\s|｜]+[|｜]")


def describe_format(form: CallFormat) -> str:
    """Describe for a person in which notation calls are written."""
    if form.guessed:
        return "in a notation that is not known, so they are not constrained"
    if form.told:
        return "explained to the model in the question"
    if name := family_name(form):
        return f"in the notation of {name}"
    arguments = "{…}"
    if form.parameter:
        opening, separator, _, close = form.parameter
        arguments = f"{opening}KEY{separator}VALUE{close}…"
    call_text = f"{form.opens[0]}{form.lead}NAME{form.middle}{arguments}{form.close}"
    return (
        f"as seen in the template: {' '.join(call_text.replace(CALL_ID_PLACEHOLDER, 'ID').split())}"
    )


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """A request's tools as they are offered; `tools` is empty without tools. `calls` are the allowed ones."""

    form: CallFormat
    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    parallel: bool = True
    calls: ToolSet | None = None


NO_OFFER = ToolOffer(NO_TOOLS)


def offer_tools(request: ChatRequest, form: CallFormat) -> ToolOffer:
    """Return the tools of a request for a model that writes calls in this format."""
    if not request.tools or request.tool_choice == "none":
        return ToolOffer(form)
    required = request.tool_choice not in (None, "auto")
    functions = {tool.function.name: tool.function for tool in request.tools}
    # In OpenAI's API, a function without `parameters` takes none.
    schemas = {
        tool_name: function.parameters or {"type": "object", "properties": {}}
        for tool_name, function in functions.items()
    }
    shown = [tool.template_object() for tool in request.tools]
    parallel = request.parallel_tool_calls is not False
    callable_schemas = schemas
    if isinstance(request.tool_choice, ToolChoice):
        name = request.tool_choice.function.name
        callable_schemas, parallel = {name: schemas[name]}, False
    elif required:  # A small model would otherwise never stop calling.
        parallel = bool(request.parallel_tool_calls)
    strict = [name for name in callable_schemas if functions[name].strict]
    return ToolOffer(
        form, shown, schemas, parallel, ToolSet(form, callable_schemas, required, parallel, strict)
    )


_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


def check_tools(request: ChatRequest) -> None:
    """Check the tools of a request, before any model is loaded.

    Raises:
        InvalidRequest: a name is invalid, or the choice is not among the tools.
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
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        choice = _allow_only(request, choice, names)
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
    if isinstance(choice, ToolChoice) and not choice.function.name:
        path = "tool_choice.function"
        raise InvalidRequest(f"'{path}' is missing.", param=path)
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"'tool_choice' names '{choice.function.name[:80]}', which is not among the 'tools'.",
            param="tool_choice",
        )


def _allow_only(
    request: ChatRequest, choice: ToolChoice, names: set[str]
) -> Literal["auto", "required"]:
    """Offer only the tools that the choice lists, and return whether one has to be called.

    Raises:
        InvalidRequest: it lists none, or something else than functions among the tools.
    """
    path = "tool_choice.allowed_tools"
    if not choice.allowed_tools:
        raise InvalidRequest(f"'{path}' is missing.", param=path)
    allowed = set()
    for index, entry in enumerate(choice.allowed_tools.tools):
        function = entry.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise InvalidRequest(
                f"'{path}.tools[{index}]' must be a function with the name of one of the 'tools'.",
                param=f"{path}.tools[{index}]",
            )
        allowed.add(name)
    mode = choice.allowed_tools.mode
    if not allowed and mode == "required":
        raise InvalidRequest(f"'{path}.tools' must have at least 1 item.", param=f"{path}.tools")
    request.tools = [tool for tool in request.tools or [] if tool.function.name in allowed]
    request.tool_choice = mode
    return mode


_INSTRUCTION = """You may call these functions:
{tools}

To call one, answer with nothing but
<tool_call>
{{"name": "function's name", "arguments": {{...}}}}
</tool_call>
and you will be given its result. Otherwise answer as usual.

"""


def explain_tools(
    messages: list[frames.Message], tools: list[dict[str, Any]]
) -> list[frames.Message]:
    """Return the conversation for a template without tools: questions and answers contain them as text."""
    result_messages: list[frames.Message] = []
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    explained = not tools
    if tools and not any(message.role == "user" for message in messages):
        # A template without system messages also adds this one to the first question.
        instruction = _INSTRUCTION.format(tools=lines).rstrip()
        messages = [frames.Message("system", instruction), *messages]
        explained = True
    for message in messages:
        content = message.content or ""
        if message.role == "tool":
            result = format_tool_result(content)
            last = result_messages[-1] if result_messages else None
            if last is not None and last.role == "user":  # templates require alternating roles
                last.content = f"{last.content}\n{result}"
            else:
                result_messages.append(frames.Message("user", result))
            continue
        if calls := message.extra.get("tool_calls"):
            content = append_calls(content, calls)
        if message.role == "user" and not explained:
            explained = True
            content = _INSTRUCTION.format(tools=lines) + content
        extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
        result_messages.append(frames.Message(message.role, content, extra))
    return result_messages
