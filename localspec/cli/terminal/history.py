"""How conversations look."""

from __future__ import annotations

import sys
import time
from typing import Any

from localspec.cli.terminal import layout, render

_WHY = {
    "interrupted": "(interrupted)",
    "failed": "(interrupted by an error)",
    "length": "(truncated: token limit or context)",
}


def listing(found: list[dict[str, Any]]) -> None:
    rows = [["ID", "WHEN", "TURNS", "QUESTION"]]
    for each in found:
        turns = str((each["messages"] + 1) // 2)
        rows.append([each["id"], _when(each["updated"]), turns, each["title"]])
    render.table(rows)


def matches(found: list[dict[str, Any]]) -> None:
    """Each with the line where it says what was searched, which a terminal highlights."""
    room = layout.width(sys.stdout)
    for each in found:
        render.line(f"{each['id']}  {_when(each['updated'])}  {each['title']}")
        match = each["match"]
        who = f"  {'Title' if match['role'] == 'title' else _who(match['role'])}: "
        render.highlighted(who, *_cut(match, room and room - len(who)))


def _cut(match: dict[str, Any], room: int | None) -> tuple[str, int, int]:
    """Of the line what fits, with what was found in it, and from and to of that."""
    line, start, end = match["line"], match["start"], match["end"]
    left, right = 0, len(line)
    while room is not None and left < right - 1 and layout.cells(line[left:right]) > room:
        if start - left > room // 4:  # so much stays of what comes before
            left += 1
        else:
            right -= 1
    shown = line[left:right]
    shown = f"…{shown[1:]}" if left else shown
    shown = f"{shown[:-1]}…" if right < len(line) else shown
    return shown, start - left, min(end, right) - left


def answer(text: str) -> None:
    """One answer alone."""
    printer = render.printer()
    printer.text(text, [])
    printer.close()


def conversation(found: dict[str, Any], *, plain: bool = False) -> None:
    """As a document; Markdown is drawn on a terminal unless it is to be `plain`."""
    render.dim(f"{found['id']}, {_when(found['created'])}, {found['model']}")
    for message in found["messages"]:
        printer = render.printer(plain=plain)
        text = f"## {_who(message['role'])}\n\n{_said(message)}"
        why = _WHY.get(message.get("finish") or "")
        printer.text(text + (f"\n\n*{why}*" if why else ""), [])
        printer.close()
        render.line("")


def _who(role: str) -> str:
    return {"user": "You", "assistant": "Answer", "system": "System"}.get(role, role)


def _said(message: dict[str, Any]) -> str:
    """Thoughts as a quotation, then the text, then a line for each call."""
    thoughts = (message.get("reasoning_content") or "").strip()
    parts = ["\n".join(f"> {line}" for line in thoughts.splitlines()), message["content"].rstrip()]
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    parts += [f"    {each.get('name')}({each.get('arguments')})" for each in functions]
    return "\n\n".join(part for part in parts if part)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
