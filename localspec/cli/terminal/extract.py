"""Code blocks out of Markdown."""

from __future__ import annotations

import re
from typing import Any

from localspec.errors import LocalspecError

FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})(?P<info>.*)$")

# A line's end to Markdown; str.splitlines knows more of them, and would lose them from within a line.
_LINE_END = re.compile(r"\r\n|\n|\r")


def blocks(text: str) -> list[str]:
    """The contents of every fenced block; one that is not closed ends with the text."""
    found: list[list[str]] = []
    fence = ""
    for line in _LINE_END.split(text.removesuffix("\n")):
        match = FENCE.match(line)
        if not fence:
            if match and not ("`" in match["info"] and match["fence"][0] == "`"):
                fence = match["fence"]
                found.append([])
        elif match and match["fence"].startswith(fence) and not match["info"].strip():
            fence = ""
        else:
            found[-1].append(line)
    return ["\n".join(lines) for lines in found]


def code(answer: dict[str, Any], *, last: bool, kept: bool) -> str:
    """The first or last block of a chat completion, as it is.

    Raises:
        LocalspecError: there is none. `kept`: whether the history has the answer.
    """
    text = answer["choices"][0]["message"]["content"] or ""
    found = blocks(text)
    if found:
        return found[-1 if last else 0]
    where = "to read it: localspec history show last" if kept else f"it was:\n{text}"
    why = ""
    if answer.get("model") == "builtin":
        why = (
            " (the small pair that comes with localspec writes code only when asked for an example)"
        )
    raise LocalspecError(f"The answer has no code block{why}; {where}")
