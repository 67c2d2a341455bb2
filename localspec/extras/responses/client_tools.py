"""The tools that OpenAI has defined and the client runs: shells, patches, computers, searches for tools.

Such a tool has a type and no schema, and its calls are items of their own. A model is told the schema of the
call as that of a function, whose arguments become the item.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from localspec.extras.responses.wire import (
    ApplyPatchCall,
    ComputerCall,
    InputItem,
    LocalShellCall,
    OutputItem,
    ShellCall,
    Status,
    ToolSearchCall,
)

_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1}
_MILLISECONDS = _INTEGER | {"description": "Limit of time, in milliseconds."}


class ClientTool(NamedTuple):
    """What a model is told about a tool, and the item of its calls.

    - `member`: the field of the item that holds the arguments, or the one argument of that name.
    - `id_prefix`: what ids of its items begin with.
    """

    item: type[OutputItem]
    id_prefix: str
    member: str
    description: str
    parameters: dict[str, Any]

    @property
    def item_type(self) -> str:
        return str(self.item.__struct_config__.tag)

    def build_item(self, key: str, call_id: str, arguments: str, status: Status) -> Any:
        """Return the item of a call; None if its arguments are cut off or have another shape."""
        item = {"type": self.item_type, "id": f"{self.id_prefix}_{key}", "call_id": call_id}
        if status == "incomplete" and self.item is ApplyPatchCall:
            status = "in_progress"  # it has no other status
        try:
            value = msgspec.json.decode(arguments, type=dict[str, Any])
            value = value[self.member] if self.item is ComputerCall else value
            if self.item is LocalShellCall:
                value = {"env": {}, **value, "type": "exec"}
            return msgspec.convert({**item, "status": status, self.member: value}, self.item)
        except (msgspec.DecodeError, KeyError, RecursionError):
            return None

    def read_arguments(self, item: InputItem) -> dict[str, Any]:
        """Return the arguments of an earlier call."""
        value = getattr(item, self.member)
        if self.item is ComputerCall:
            return {self.member: value}
        arguments = {name: part for name, part in dict(value or {}).items() if part is not None}
        if self.item is LocalShellCall:
            arguments.pop("type", None)
        return {name: part for name, part in arguments.items() if part != {}}


def find_client_tool(tool: dict[str, Any]) -> ClientTool | None:
    """Return what a tool of a request means; None if the client does not run it."""
    known = CLIENT_TOOLS.get(str(tool.get("type")))
    if known is None:
        return None
    if known.item is ToolSearchCall:
        schema, text = tool.get("parameters"), tool.get("description")
        if tool.get("execution") != "client" or not isinstance(schema, dict):
            return None
        return known._replace(
            description=text if isinstance(text, str) else known.description, parameters=schema
        )
    environment = tool.get("environment")
    environment = environment if isinstance(environment, dict) else {"type": "local"}
    if environment.get("type") != "local":
        return None
    if "display_width" in tool:
        size = f"{tool['display_width']} x {tool.get('display_height')} pixels"
        return known._replace(description=f"{known.description} It has {size}.")
    skills = environment.get("skills")
    if isinstance(skills, list) and skills:
        lines = [
            f"\n- {skill.get('name')}, in {skill.get('path')}: {skill.get('description')}"
            for skill in skills
            if isinstance(skill, dict)
        ]
        return known._replace(description=f"{known.description}\nSkills:{''.join(lines)}")
    return known


def find_call(item: InputItem) -> tuple[str, ClientTool] | None:
    """Return the type of the tool that an item calls; None if it is no call of these tools."""
    found = [(kind, tool) for kind, tool in CLIENT_TOOLS.items() if tool.item_type == item.type]
    return next((entry for entry in found if getattr(item, entry[1].member) is not None), None)


def describe_shell_output(outputs: list[Any]) -> str:
    """Return the results of shell commands as a model reads them."""
    parts = []
    for output in outputs:
        if not isinstance(output, dict):
            parts.append(msgspec.json.encode(output).decode())
            continue
        parts += [str(output.get(name) or "").rstrip("\n") for name in ("stdout", "stderr")]
        outcome = output.get("outcome")
        outcome = outcome if isinstance(outcome, dict) else {}
        ends = {"timeout": "Timed out.", "exit": f"Exit code: {outcome.get('exit_code')}"}
        parts.append(ends.get(str(outcome.get("type")), ""))
    return "\n".join(filter(None, parts))


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


def _action(kind: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return _object(["type", *properties], type=_TEXT | {"enum": [kind]}, **properties)


_PLACE = {"x": _INTEGER, "y": _INTEGER}
_BUTTON = _TEXT | {"enum": ["left", "right", "wheel", "back", "forward"]}
_ACTION = {
    "anyOf": [
        _action("click", button=_BUTTON, **_PLACE),
        _action("double_click", **_PLACE),
        _action("drag", path={"type": "array", "items": _object(["x", "y"], **_PLACE)}),
        _action("keypress", keys=_TEXTS),
        _action("move", **_PLACE),
        _action("screenshot"),
        _action("scroll", **_PLACE, scroll_x=_INTEGER, scroll_y=_INTEGER),
        _action("type", text=_TEXT),
        _action("wait"),
    ]
}
_DIFF = _TEXT | {
    "description": "Each line of a new file begins with '+'. A change has a line '@@' before each place, "
    "then lines that stay, which begin with a blank, that go ('-') and that come ('+'), with three "
    "lines of context around them."
}
_SHELL = "Run shell commands. The result is what each of them printed, and its exit code."
_COMPUTER = "Use the mouse and the keyboard of a computer. The result is a picture of its screen."
CLIENT_TOOLS = {
    "shell": ClientTool(
        ShellCall,
        "sh",
        "action",
        _SHELL,
        _object(
            ["commands"],
            commands=_TEXTS,
            timeout_ms=_MILLISECONDS,
            max_output_length=_INTEGER | {"description": "Characters of the output to return."},
        ),
    ),
    "local_shell": ClientTool(
        LocalShellCall,
        "lsh",
        "action",
        "Run a command. The result is what it printed.",
        _object(
            ["command"],
            command=_TEXTS | {"description": "The program and its arguments."},
            working_directory=_TEXT,
            timeout_ms=_MILLISECONDS,
        ),
    ),
    "apply_patch": ClientTool(
        ApplyPatchCall,
        "apc",
        "operation",
        "Create, change or delete a file.",
        _object(
            ["type", "path"],
            type=_TEXT | {"enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_DIFF,
        ),
    ),
    "computer": ClientTool(
        ComputerCall,
        "cu",
        "actions",
        _COMPUTER,
        _object(["actions"], actions={"type": "array", "items": _ACTION, "minItems": 1}),
    ),
    "computer_use_preview": ClientTool(
        ComputerCall, "cu", "action", _COMPUTER, _object(["action"], action=_ACTION)
    ),
    "tool_search": ClientTool(
        ToolSearchCall, "tsc", "arguments", "Search for tools and load them.", {}
    ),
}
