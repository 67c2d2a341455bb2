"""Code blocks out of answers."""

from __future__ import annotations

from typing import Any

from localspec.cli.terminal.markdown.fences import blocks
from localspec.errors import LocalspecError

__all__ = ["blocks", "code", "kept_answer", "kept_code"]


def code(answer: dict[str, Any], *, last: bool, kept: bool) -> str:
    """The first or last block of a chat completion, as it is.

    Raises:
        LocalspecError: there is none. `kept`: whether the history has the answer.
    """
    text = answer["choices"][0]["message"]["content"] or ""
    found = blocks(text)
    if found:
        return found[-1 if last else 0]
    where = "to read it: localspec history show last" if kept else f"the answer was:\n{text}"
    why = ""
    if answer.get("model") == "builtin":
        why = " (the built-in demo pair writes code only when asked for an example)"
    raise LocalspecError(f"The answer has no code block{why}; {where}")


def kept_answer(found: dict[str, Any]) -> str:
    """The last answer of a conversation of the history. Raises LocalspecError: there is none."""
    for message in reversed(found["messages"]):
        if message["role"] == "assistant":
            return str(message["content"])
    raise LocalspecError(f"Conversation {found['id']} has no answer.")


def kept_code(found: dict[str, Any], *, last: bool) -> str:
    """Its first or last block of code. Raises LocalspecError: there is none."""
    found_blocks = blocks(kept_answer(found))
    if not found_blocks:
        raise LocalspecError(
            f"The last answer has no code block; to read it: localspec history show {found['id']} --last"
        )
    return found_blocks[-1 if last else 0]
