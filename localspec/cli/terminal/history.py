"""How conversations look."""

from __future__ import annotations

import time
from typing import Any

from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import table

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
    table(rows)


def conversation(found: dict[str, Any]) -> None:
    """As a document; Markdown is drawn on a terminal."""
    render.dim(f"{found['id']}, {_when(found['created'])}, {found['model']}")
    for message in found["messages"]:
        who = {"user": "You", "assistant": "Answer", "system": "System"}
        printer = render.printer()
        text = f"## {who.get(message['role'], message['role'])}\n\n{_said(message)}"
        why = _WHY.get(message.get("finish") or "")
        printer.text(text + (f"\n\n*{why}*" if why else ""), [])
        printer.close()
        render.line("")


def _said(message: dict[str, Any]) -> str:
    """Thoughts as a quotation, then the text, then a line for each call."""
    thoughts = (message.get("reasoning_content") or "").strip()
    parts = ["\n".join(f"> {line}" for line in thoughts.splitlines()), message["content"].rstrip()]
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    parts += [f"    {each.get('name')}({each.get('arguments')})" for each in functions]
    return "\n\n".join(part for part in parts if part)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
