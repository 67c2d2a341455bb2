"""Translate tools of several kinds into functions, and calls back into what the client called the tool.

Functions stay what they are, even inside namespaces. A custom tool becomes a function with one text. Tools
that OpenAI's own servers run (web search, files, computers) are left out, with a sentence that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from localspec.errors import InvalidRequest
from localspec.protocol.requests import Function, NamedFunction, Tool, ToolChoice

INPUT = "input"  # the one parameter of a custom tool

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a function stands for."""

    name: str  # the client's name of the tool
    custom: bool = False
    namespace: str = ""


@dataclass(slots=True)
class Tools:
    """The tools that the model is offered.

    `kinds` maps the model's name of each tool to what it stands for, and `ignored` has a sentence for each
    tool that was left out.
    """

    offered: list[Tool] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    choice: Choice | ToolChoice = "auto"
    ignored: list[str] = field(default_factory=list)

    def kind(self, name: str) -> Kind:
        """Return what the model's name of a tool stands for."""
        return self.kinds.get(name) or Kind(name)

    def name_of(self, name: str, namespace: str = "") -> str:
        """Return the model's name of a client's tool."""
        for model_name, kind in self.kinds.items():
            if (kind.name, kind.namespace) == (name, namespace):
                return model_name
        return name


def translated(tools: list[dict[str, Any]], choice: str | dict[str, Any] | None) -> Tools:
    """Translate `tools` and `tool_choice` of a request.

    Raises:
        InvalidRequest: a tool has no name or an invalid schema, or the choice is invalid.
    """
    result = Tools()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        match tool.get("type"):
            case "namespace":
                _add_namespace(result, tool, path)
            case "function" | "custom":
                _add(result, tool, path)
            case unknown_type:
                result.ignored.append(
                    f"'{path}': a tool of type {_to_json(unknown_type)} cannot run here."
                )
    _choose(result, choice)
    return result


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()[:80]


def _add_namespace(result: Tools, tool: dict[str, Any], path: str) -> None:
    name, nested_tools = tool.get("name"), tool.get("tools")
    if not (isinstance(name, str) and isinstance(nested_tools, list)):
        raise InvalidRequest(f"'{path}' needs a 'name' and 'tools'.", param=path)
    for index, nested in enumerate(nested_tools):
        if isinstance(nested, dict) and nested.get("type") in ("function", "custom"):
            _add(result, nested, f"{path}.tools[{index}]", name)
        else:
            result.ignored.append(f"'{path}.tools[{index}]' is no function and cannot run here.")


def _add(result: Tools, tool: dict[str, Any], path: str, namespace: str = "") -> None:
    name = tool.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(f"'{path}.name' must be a string.", param=f"{path}.name")
    custom = tool["type"] == "custom"
    # A tool outside of the namespace may have the same name.
    model_name = f"{namespace}.{name}" if namespace and name in result.kinds else name
    description = tool.get("description")
    text = description if isinstance(description, str) else ""
    parameters: dict[str, Any] | None
    if custom:
        parameters = _text_parameter(result, tool, path)
        text += _grammar_text(tool)
    else:
        parameters = tool.get("parameters")
        if not isinstance(parameters, dict | None):
            path += ".parameters"
            raise InvalidRequest(f"'{path}' must be an object.", param=path)
    result.kinds[model_name] = Kind(name, custom, namespace)
    offered = Tool(Function(model_name, text, parameters, tool.get("strict")))
    function = {"name": model_name, "description": text or None, "parameters": parameters}
    # Models were trained with the keys in this order.
    offered.__dict__["own"] = {"type": "function", "function": function}
    result.offered.append(offered)


def _text_parameter(result: Tools, tool: dict[str, Any], path: str) -> dict[str, Any]:
    if _grammar(tool):
        result.ignored.append(
            f"'{path}.format': the model is told the grammar, and not held to it."
        )
    text = {"type": "string", "description": "The whole input, as plain text."}
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _grammar(tool: dict[str, Any]) -> dict[str, Any] | None:
    form = tool.get("format")
    return form if isinstance(form, dict) and form.get("type") == "grammar" else None


def _grammar_text(tool: dict[str, Any]) -> str:
    form = _grammar(tool)
    if form is None:
        return ""
    return f"\nThe input obeys this {form.get('syntax')} grammar:\n{form.get('definition')}"


def _choose(result: Tools, choice: str | dict[str, Any] | None) -> None:
    if choice in (None, "auto"):
        return
    if choice in ("none", "required"):
        result.choice = choice  # type: ignore[assignment] # one of these two
    elif isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        result.choice = _one_tool(result, choice)
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        _allow_only(result, choice)
    elif isinstance(choice, dict) and isinstance(choice.get("type"), str):
        result.ignored.append(
            f"'tool_choice': a tool of type {_to_json(choice['type'])} is not here."
        )
    else:
        raise InvalidRequest(
            "'tool_choice' must be 'none', 'auto', 'required', or an object with a 'type'.",
            param="tool_choice",
        )
    if result.choice == "required" and not result.offered:
        result.choice = "auto"
        result.ignored.append("'tool_choice': there is no tool here that could be called.")


def _one_tool(result: Tools, choice: dict[str, Any]) -> ToolChoice:
    name = choice.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("'tool_choice.name' must be a string.", param="tool_choice.name")
    return ToolChoice(NamedFunction(result.name_of(name)))


def _allow_only(result: Tools, choice: dict[str, Any]) -> None:
    """Offer only the tools that the choice lists."""
    names = set(_allowed_names(choice))
    result.offered = [
        tool for tool in result.offered if result.kinds[tool.function.name].name in names
    ]
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(
            "'tool_choice.mode' must be 'auto' or 'required'.", param="tool_choice.mode"
        )
    result.choice = mode


def _allowed_names(choice: dict[str, Any]) -> Iterator[str]:
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequest("'tool_choice.tools' must be a list.", param="tool_choice.tools")
    for entry in tools:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            yield entry["name"]
