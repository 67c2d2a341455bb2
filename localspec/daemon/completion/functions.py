"""Translate OpenAI's older form of tools: `functions`, `function_call` and the role "function".

They become tools before anything else reads the request, and the answer's call is translated back.
"""

from __future__ import annotations

from localspec.errors import InvalidRequest
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    NamedFunction,
    TemplateRequest,
    Tool,
    ToolChoice,
)


def as_tools(request: ChatRequest) -> bool:
    """Turn functions into tools in place; return whether the answer's call must have the older form.

    Raises:
        InvalidRequest: the request has both forms, or a choice without functions.
    """
    _check(request)
    messages_as_tools(request)
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


def messages_as_tools(request: ChatRequest | TemplateRequest) -> None:
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
