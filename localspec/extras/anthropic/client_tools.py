"""The tools that Anthropic has defined and the client runs: shell, text editor, memory and computer.

Such a tool has a type with a date and no schema, because Anthropic's models were trained with it. Other
models are told the schema that Anthropic has published for that date.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from localspec.errors import InvalidRequest

_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_POINT: dict[str, Any] = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_RANGE = _POINT | {"description": "Of view: first and last line, counted from 1; -1 is the end."}
_COMMANDS = ["view", "create", "str_replace", "insert"]
_COMPUTER_TEXT = "The text of type, or the keys of key and hold_key: ctrl+s, Return."
_INSERT_LINE = _INTEGER | {
    "description": "Of insert: the line after which text is inserted; 0 is the beginning."
}


class ClientTool(NamedTuple):
    """What a model is told about a tool, and the fields of its definition that this takes care of."""

    name: str
    description: str
    parameters: dict[str, Any]
    fields: frozenset[str] = frozenset()


def find_client_tool(definition: dict[str, Any], path: str) -> ClientTool | None:
    """Return what a tool's definition means; None if the client does not run tools of its type."""
    kind, _, date = str(definition.get("type")).rpartition("_")
    if kind in ("browser_toolset", "computer_toolset"):
        problem = "is not supported, because it is a set of tools. Send tools with a schema, or"
        raise InvalidRequest.at(path, f"{problem} 'computer_20251124'.")
    define = _TOOLS.get(kind)
    return define(date, definition) if define and date.isdigit() else None


def _define_bash(date: str, definition: dict[str, Any]) -> ClientTool:
    command = _TEXT | {"description": "The command to run; it is not read with restart."}
    restart = {"type": "boolean", "description": "True restarts the shell."}
    return ClientTool(
        "bash",
        "Run a command in a bash shell that keeps its state from call to call.",
        _object(["command"], command=command, restart=restart),
    )


def _define_editor(date: str, definition: dict[str, Any]) -> ClientTool:
    is_older = date < "20250429"  # dates of the same form, which are ordered as texts
    commands = [*_COMMANDS, *(["undo_edit"] if is_older else [])]
    new_text = "Of str_replace: the new text." + (" Of insert: the text." if is_older else "")
    parameters = _object(
        ["command", "path"],
        command=_TEXT | {"enum": commands},
        path=_TEXT | {"description": "Path of the file, or of a directory to view."},
        view_range=_RANGE,
        file_text=_TEXT | {"description": "Of create: the content of the file."},
        old_str=_TEXT | {"description": "Of str_replace: the text to replace, which occurs once."},
        new_str=_TEXT | {"description": new_text},
        insert_line=_INSERT_LINE,
    )
    if not is_older:
        parameters["properties"]["insert_text"] = _TEXT | {"description": "Of insert: the text."}
    description = "View, create and edit text files."
    if limit := definition.get("max_characters"):
        description += f" A view shows at most {limit} characters."
    name = "str_replace_editor" if is_older else "str_replace_based_edit_tool"
    return ClientTool(name, description, parameters, frozenset({"max_characters"}))


def _define_memory(date: str, definition: dict[str, Any]) -> ClientTool:
    return ClientTool(
        "memory",
        "Keep notes in files below /memories, which later conversations can read. View /memories before "
        "you begin a task.",
        _object(
            ["command"],
            command=_TEXT | {"enum": [*_COMMANDS, "delete", "rename"]},
            path=_TEXT | {"description": "Path of the file or directory, except of rename."},
            view_range=_RANGE,
            file_text=_TEXT | {"description": "Of create: the content of the file."},
            old_str=_TEXT | {"description": "Of str_replace: the text to replace."},
            new_str=_TEXT | {"description": "Of str_replace: the new text."},
            insert_line=_INSERT_LINE,
            insert_text=_TEXT | {"description": "Of insert: the text."},
            old_path=_TEXT | {"description": "Of rename: the path until now."},
            new_path=_TEXT | {"description": "Of rename: the new path."},
        ),
    )


def _define_computer(date: str, definition: dict[str, Any]) -> ClientTool:
    actions = ["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"]
    actions += ["middle_click", "double_click", "screenshot", "cursor_position"]
    parameters = _object(
        ["action"],
        action=_TEXT | {"enum": actions},
        coordinate=_POINT | {"description": "Pixels from the left and from the top."},
        text=_TEXT | {"description": _COMPUTER_TEXT},
    )
    properties = parameters["properties"]
    if date >= "20250124":
        actions += ["left_mouse_down", "left_mouse_up", "triple_click"]
        actions += ["scroll", "hold_key", "wait"]
        properties["scroll_direction"] = _TEXT | {"enum": ["up", "down", "left", "right"]}
        properties["scroll_amount"] = _INTEGER | {"description": "Clicks of the wheel."}
        properties["start_coordinate"] = _POINT | {"description": "Where left_click_drag begins."}
        seconds = "Seconds, of hold_key and wait."
        properties["duration"] = {"type": "number", "description": seconds}
    if definition.get("enable_zoom"):
        actions.append("zoom")
        region = _POINT | {"minItems": 4, "maxItems": 4}
        properties["region"] = region | {"description": "Of zoom: left, top, right and bottom."}
    width, height = (definition.get(f"display_{side}_px") for side in ("width", "height"))
    return ClientTool(
        "computer",
        f"Use the mouse and the keyboard of a computer, and see its screen of {width} x {height} pixels. "
        "Take a screenshot to see what an action did.",
        parameters,
        frozenset({"display_width_px", "display_height_px", "display_number", "enable_zoom"}),
    )


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


_TOOLS: dict[str, Callable[[str, dict[str, Any]], ClientTool]] = {
    "bash": _define_bash,
    "text_editor": _define_editor,
    "memory": _define_memory,
    "computer": _define_computer,
}
