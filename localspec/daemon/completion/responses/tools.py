"""Tools of several kinds as functions, and calls back as what the client called the tool.

Functions, also those in namespaces, stay what they are. A custom tool takes one text. What OpenAI's own
servers run (web search, files, computers) is left out, with a sentence that says so.
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

    name: str  # the client's
    custom: bool = False
    namespace: str = ""


@dataclass(slots=True)
class Tools:
    """`offered` to the model; `kinds`, by the names they have there; `ignored`: what was left out."""

    offered: list[Tool] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    choice: Choice | ToolChoice = "auto"
    ignored: list[str] = field(default_factory=list)

    def kind(self, name: str) -> Kind:
        return self.kinds.get(name) or Kind(name)

    def name_of(self, name: str, namespace: str = "") -> str:
        """What the model knows a tool of the client's as."""
        wanted = (name, namespace)
        return next((k for k, v in self.kinds.items() if (v.name, v.namespace) == wanted), name)


def translated(tools: list[dict[str, Any]], choice: str | dict[str, Any] | None) -> Tools:
    """What a request's `tools` and `tool_choice` come to.

    Raises:
        InvalidRequest: a tool without a name or with a schema that is none; a choice that is none.
    """
    found = Tools()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        match tool.get("type"):
            case "namespace":
                _add_namespace(found, tool, path)
            case "function" | "custom":
                _add(found, tool, path)
            case other:
                found.ignored.append(f"'{path}': a tool of type {_shown(other)} cannot run here.")
    _choose(found, choice)
    return found


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()[:80]


def _add_namespace(found: Tools, tool: dict[str, Any], path: str) -> None:
    name, inner = tool.get("name"), tool.get("tools")
    if not (isinstance(name, str) and isinstance(inner, list)):
        raise InvalidRequest(f"'{path}' needs a 'name' and 'tools'.", param=path)
    for index, each in enumerate(inner):
        if isinstance(each, dict) and each.get("type") in ("function", "custom"):
            _add(found, each, f"{path}.tools[{index}]", name)
        else:
            found.ignored.append(f"'{path}.tools[{index}]' is no function and cannot run here.")


def _add(found: Tools, tool: dict[str, Any], path: str, namespace: str = "") -> None:
    name = tool.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(f"'{path}.name' must be a string.", param=f"{path}.name")
    custom = tool["type"] == "custom"
    # In a namespace another tool may have the same name.
    known = f"{namespace}.{name}" if namespace and name in found.kinds else name
    described = tool.get("description")
    text = described if isinstance(described, str) else ""
    parameters: dict[str, Any] | None
    if custom:
        parameters = _one_text(found, tool, path)
        text += _told(tool)
    else:
        parameters = tool.get("parameters")
        if not isinstance(parameters, dict | None):
            path += ".parameters"
            raise InvalidRequest(f"'{path}' must be an object.", param=path)
    found.kinds[known] = Kind(name, custom, namespace)
    offered = Tool(Function(known, text, parameters, tool.get("strict")))
    function = {"name": known, "description": text or None, "parameters": parameters}
    # In the order of keys in which models were shown them.
    offered.__dict__["own"] = {"type": "function", "function": function}
    found.offered.append(offered)


def _one_text(found: Tools, tool: dict[str, Any], path: str) -> dict[str, Any]:
    if _grammar(tool):
        found.ignored.append(f"'{path}.format': the model is told the grammar, and not held to it.")
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


def _told(tool: dict[str, Any]) -> str:
    form = _grammar(tool)
    if form is None:
        return ""
    return f"\nThe input obeys this {form.get('syntax')} grammar:\n{form.get('definition')}"


def _choose(found: Tools, choice: str | dict[str, Any] | None) -> None:
    if choice in (None, "auto"):
        return
    if choice in ("none", "required"):
        found.choice = choice  # type: ignore[assignment] # one of these two
    elif isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        found.choice = _one(found, choice)
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        _allow(found, choice)
    elif isinstance(choice, dict) and isinstance(choice.get("type"), str):
        found.ignored.append(f"'tool_choice': a tool of type {_shown(choice['type'])} is not here.")
    else:
        raise InvalidRequest(
            "'tool_choice' must be 'none', 'auto', 'required', or an object with a 'type'.",
            param="tool_choice",
        )
    if found.choice == "required" and not found.offered:
        found.choice = "auto"
        found.ignored.append("'tool_choice': there is no tool here that could be called.")


def _one(found: Tools, choice: dict[str, Any]) -> ToolChoice:
    name = choice.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("'tool_choice.name' must be a string.", param="tool_choice.name")
    return ToolChoice(NamedFunction(found.name_of(name)))


def _allow(found: Tools, choice: dict[str, Any]) -> None:
    """Only these are offered."""
    names = set(_names(choice))
    found.offered = [
        each for each in found.offered if found.kinds[each.function.name].name in names
    ]
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(
            "'tool_choice.mode' must be 'auto' or 'required'.", param="tool_choice.mode"
        )
    found.choice = mode


def _names(choice: dict[str, Any]) -> Iterator[str]:
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequest("'tool_choice.tools' must be a list.", param="tool_choice.tools")
    for each in tools:
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            yield each["name"]
