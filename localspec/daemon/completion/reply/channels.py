"""Rewrite gpt-oss's answers, which are messages in channels, in the notation of other models.

Reasoning goes between <think> and </think>, calls between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import re
from typing import Literal

OPENING = "<|channel|>"
# Control tokens of such vocabularies. The token that ends a call also ends the answer, so it is not here.
SHOWN = [OPENING, "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]
_MESSAGE = "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION_NAME = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
_OPENINGS = {"thoughts": "<think>", "text": "", "call": "<tool_call>\n"}
_CLOSINGS = {"thoughts": "</think>", "text": "", "call": "}\n</tool_call>"}


class Channels:
    """Rewrites one answer while it arrives; an answer that does not begin with a channel stays as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._state: Literal["start", "plain", "head", "thoughts", "text", "call"] = "start"

    def push(self, text: str) -> str:
        """Consume more text, and return what is certain of the rewritten answer."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> str:
        output, can_continue = "", True
        while can_continue:
            match self._state:
                case "start":
                    can_continue = self._start(final)
                case "plain":
                    output, self._held, can_continue = output + self._held, "", False
                case "head":
                    text, can_continue = self._head()
                    output += text
                case _:
                    text, can_continue = self._body(final)
                    output += text
        return output

    def _start(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._state = "head"
        elif final or not OPENING.startswith(text):
            self._state = "plain"
        return self._state != "start"

    def _head(self) -> tuple[str, bool]:
        """Read the head of a message, which names its recipient; return output and whether it is complete."""
        head, separator, remaining = self._held.partition(_MESSAGE)
        if not separator:
            return "", False
        self._held = remaining
        channel = _CHANNEL.search(head)
        if function := _FUNCTION_NAME.search(head):
            self._state = "call"
            return f'{_OPENINGS["call"]}{{"name": "{function[1]}", "arguments": ', True
        self._state = "thoughts" if channel and channel[1] == "analysis" else "text"
        return _OPENINGS[self._state], True

    def _body(self, final: bool) -> tuple[str, bool]:
        positions = [
            position for marker in _MESSAGE_ENDS if (position := self._held.find(marker)) >= 0
        ]
        end = min(positions) if positions else len(self._held)
        if not positions and not final:
            end -= max(_partial_length(self._held, marker) for marker in _MESSAGE_ENDS)
        text, self._held = self._held[:end], self._held[end:]
        if not positions and not (final and self._state == "call"):
            return text, False  # reasoning that was cut off stays open
        text += _CLOSINGS[self._state]
        self._state = "head"
        return text, bool(positions)


def _partial_length(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may begin the marker."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
