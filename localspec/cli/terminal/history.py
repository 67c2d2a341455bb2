"""Print conversations of the history."""

from __future__ import annotations

import sys
from typing import Any

from localspec.cli.terminal import layout, render
from localspec.cli.terminal.figures import format_time

_FINISH_NOTES = {
    "interrupted": "(interrupted)",
    "failed": "(interrupted by an error)",
    "length": "(truncated: token limit or context)",
}


def listing(conversations: list[dict[str, Any]]) -> None:
    """Print conversations as a table."""
    rows = [["ID", "WHEN", "TURNS", "QUESTION"]]
    for entry in conversations:
        turns = str((entry["messages"] + 1) // 2)
        rows.append([entry["id"], format_time(entry["updated"]), turns, entry["title"]])
    render.table(rows)


def matches(conversations: list[dict[str, Any]]) -> None:
    """Print conversations with the line that contains the searched text, highlighted on a terminal."""
    columns = layout.width(sys.stdout)
    for entry in conversations:
        render.line(f"{entry['id']}  {format_time(entry['updated'])}  {entry['title']}")
        match = entry["match"]
        label = f"  {'Title' if match['role'] == 'title' else _role_title(match['role'])}: "
        render.highlighted(label, *_shorten_match(match, columns and columns - len(label)))


def _shorten_match(match: dict[str, Any], max_cells: int | None) -> tuple[str, int, int]:
    """Return the part of a line that fits, with the match in it, and the match's start and end."""
    line, start, end = match["line"], match["start"], match["end"]
    begin, stop = 0, len(line)
    while max_cells is not None and begin < stop - 1 and layout.cells(line[begin:stop]) > max_cells:
        if start - begin > max_cells // 4:  # a quarter is kept for the text before the match
            begin += 1
        else:
            stop -= 1
    visible = f"…{line[begin + 1 : stop]}" if begin else line[:stop]
    visible = f"{visible[:-1]}…" if stop < len(line) else visible
    return visible, start - begin, min(end, stop) - begin


def conversation(entry: dict[str, Any], *, plain: bool = False) -> None:
    """Print a conversation as a document. Markdown is drawn on a terminal unless `plain`."""
    render.dim(f"{entry['id']}, {format_time(entry['updated'])}, {entry['model']}")
    for message in entry["messages"]:
        text = f"## {_role_title(message['role'])}\n\n{_format_message(message)}"
        note = _FINISH_NOTES.get(message.get("finish") or "")
        render.answer(text + (f"\n\n*{note}*" if note else ""), plain=plain)
        render.line("")


def _role_title(role: str) -> str:
    return {"user": "You", "assistant": "Answer", "system": "System"}.get(role, role)


def _format_message(message: dict[str, Any]) -> str:
    """Return reasoning as a quotation, then the text, then one line for each tool call."""
    reasoning = (message.get("reasoning_content") or "").strip()
    parts = ["\n".join(f"> {line}" for line in reasoning.splitlines()), message["content"].rstrip()]
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    parts += [f"    {function.get('name')}({function.get('arguments')})" for function in functions]
    return "\n\n".join(filter(None, parts))
