"""gpt-oss's answers, which are messages in channels, in the notation that other models have for the same:
thoughts between <think> and </think>, calls between <tool_call> and </tool_call>, and text.
"""

from __future__ import annotations

import re
from typing import Literal

OPENING = "<|channel|>"
# Control tokens of such vocabularies; the one that ends a call ends the answer, too.
SHOWN = [OPENING, "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_CALLED = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
_OPENED = {"thoughts": "<think>", "text": "", "call": "<tool_call>\n"}
_CLOSED = {"thoughts": "</think>", "text": "", "call": "}\n</tool_call>"}


class Channels:
    """One answer, while it comes. What does not begin with a channel stays as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._state: Literal["start", "plain", "head", "thoughts", "text", "call"] = "start"

    def push(self, text: str) -> str:
        self._held += text
        return self._read(final=False)

    def finish(self) -> str:
        """What was held back, once the answer is over."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> str:
        found, goes_on = "", True
        while goes_on:
            match self._state:
                case "start":
                    goes_on = self._start(final)
                case "plain":
                    found, self._held, goes_on = found + self._held, "", False
                case "head":
                    more, goes_on = self._head()
                    found += more
                case _:
                    more, goes_on = self._body(final)
                    found += more
        return found

    def _start(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._state = "head"
        elif final or not OPENING.startswith(text):
            self._state = "plain"
        return self._state != "start"

    def _head(self) -> tuple[str, bool]:
        """Up to a message's text: whom it is for."""
        head, found, rest = self._held.partition(_MESSAGE)
        if not found:
            return "", False
        self._held = rest
        channel = _CHANNEL.search(head)
        if called := _CALLED.search(head):
            self._state = "call"
            return f'{_OPENED["call"]}{{"name": "{called[1]}", "arguments": ', True
        self._state = "thoughts" if channel and channel[1] == "analysis" else "text"
        return _OPENED[self._state], True

    def _body(self, final: bool) -> tuple[str, bool]:
        ends = [at for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        end = min(ends) if ends else len(self._held)
        if not ends and not final:
            end -= max(_begun(self._held, mark) for mark in _ENDS)
        text, self._held = self._held[:end], self._held[end:]
        if not ends and not (final and self._state == "call"):
            return text, False  # thoughts that are cut off stay open
        text += _CLOSED[self._state]
        self._state = "head"
        return text, bool(ends)


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` a marker may begin with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
