"""How conversations look."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from localspec.cli.terminal import render

_WHY = {
    "interrupted": "(interrupted)",
    "failed": "(cut off by an error)",
    "length": "(cut off: as many tokens as were wanted, or fit)",
}


def listing(found: list[dict[str, Any]]) -> None:
    rows = [["ID", "WHEN", "TURNS", "QUESTION"]]
    for each in found:
        turns = str((each["messages"] + 1) // 2)
        rows.append([each["id"], _when(each["updated"]), turns, each["title"]])
    render.table(rows)


def matches(found: list[dict[str, Any]]) -> None:
    """Each with the line where it says what was searched, which a terminal highlights."""
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for each in found:
        head = (
            f"{each['id']}  {_when(each['updated'])}  {render.harmless(each['title'], lines=False)}"
        )
        render.line(f"{head[: room - 1]}…" if room and len(head) > room else head)
        match = each["match"]
        who = f"  {'Title' if match['role'] == 'title' else _who(match['role'])}: "
        render.highlighted(who, *_cut(match, room - len(who) if room else 0))


def _cut(match: dict[str, Any], room: int) -> tuple[str, int, int]:
    """The line with what was found in it, from and to, in so many columns; 0: all of it."""
    line, start, end = match["line"], match["start"], match["end"]
    if not room or len(line) <= room:
        return line, start, end
    cut = max(0, min(start - room // 4, len(line) - room))
    shown = line[cut : cut + room]
    if cut:
        shown = f"…{shown[1:]}"
    if cut + room < len(line):
        shown = f"{shown[:-1]}…"
    return shown, start - cut, min(end - cut, room)


def answer(text: str) -> None:
    """One answer alone."""
    printer = render.printer()
    printer.text(text, [])
    printer.close()


def conversation(found: dict[str, Any]) -> None:
    """As a document; Markdown is drawn on a terminal."""
    render.dim(f"{found['id']}, {_when(found['created'])}, {found['model']}")
    for message in found["messages"]:
        printer = render.printer()
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
