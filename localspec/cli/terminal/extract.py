"""Extract code blocks from answers."""

from __future__ import annotations

from typing import Any

from localspec.cli.terminal.fences import blocks
from localspec.errors import LocalspecError

__all__ = ["blocks", "code", "last_answer", "last_code"]


def code(answer: dict[str, Any], *, last: bool, saved: bool) -> str:
    """Return the first or last block of a chat completion, as it is.

    `saved`: whether the history has the answer, for the error message. Raises LocalspecError if there is no
    block.
    """
    text = answer["choices"][0]["message"]["content"] or ""
    if found_blocks := blocks(text):
        return found_blocks[-1 if last else 0]
    remedy = "to read it: localspec history show last" if saved else f"the answer was:\n{text}"
    explanation = ""
    if answer.get("model") == "builtin":
        explanation = " (the built-in demo pair writes code only when asked for an example)"
    raise LocalspecError(f"The answer has no code block{explanation}; {remedy}")


def last_answer(conversation: dict[str, Any]) -> str:
    """Return the last answer of a saved conversation.

    Raises LocalspecError if there is none.
    """
    for message in reversed(conversation["messages"]):
        if message["role"] == "assistant":
            return str(message["content"])
    raise LocalspecError(f"Conversation {conversation['id']} has no answer.")


def last_code(conversation: dict[str, Any], *, last: bool) -> str:
    """Return the first or last code block of the last answer of a saved conversation.

    Raises LocalspecError if there is none.
    """
    if found_blocks := blocks(last_answer(conversation)):
        return found_blocks[-1 if last else 0]
    raise LocalspecError(
        "The last answer has no code block; to read it: "
        f"localspec history show {conversation['id']} --last"
    )
