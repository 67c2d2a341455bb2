"""How a chat template wants its messages: what differs between models, found by rendering small chats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

Messages = list[dict[str, Any]]
MARK = "zqplaceqz"  # stands for a text; no template has it
_NOTHING = re.compile(r"\b(?:none|null)\b", re.IGNORECASE)


class Refused(Exception):
    """The template itself raised, as they do for roles that they do not want."""


class Habits:
    """Of one template. `render` makes text of messages, and raises Refused where the template does."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render

    def worded(self, messages: Messages) -> Messages:
        """`messages` as the template reads them; nothing that is said is changed."""
        return [self._worded(each) for each in messages]

    def _worded(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if message["content"] is None and not self.knows_null:
            message["content"] = ""
        if message.get("tool_calls") and self.wants_text:
            message = _with_text_arguments(message)
        if (thoughts := message.get("reasoning_content")) is not None:
            # what gpt-oss calls them; as in transformers
            message = {"thinking": thoughts, **message}
        return _in_parts(message) if self.wants_parts else message

    @cached_property
    def wants_parts(self) -> bool:
        """Whether it reads a message's text in a list of parts only."""
        message = {"role": "user", "content": MARK}
        return not self._writes([message]) and self._writes([_in_parts(message)])

    @cached_property
    def knows_null(self) -> bool:
        """Whether a call without text may have null for it: not where that is written, or fails.

        Where null is told from an empty text, the latter is a turn of its own.
        """
        for more in ({}, {"reasoning_content": "So."}):
            try:
                counts = [
                    len(_NOTHING.findall(self._render(self._calls(content, MARK, **more))))
                    for content in ("", None)
                ]
            except Refused:
                return False
            if counts[0] != counts[1]:
                return False
        return True

    @cached_property
    def wants_text(self) -> bool:
        """Whether it takes the arguments of a call as their JSON only, and not as an object."""
        chat = self._calls("", MARK)
        return not self._writes(chat) and self._writes([*map(_with_text_arguments, chat)])

    def _calls(self, content: str | None, argument: str, **more: Any) -> Messages:
        """A question, a call and its result."""
        function = {"name": "look", "arguments": {"at": argument}}
        call = {"id": "abcdef123", "type": "function", "function": function}
        chat: Messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": content, "tool_calls": [call], **more},
            {"role": "tool", "content": "Seen.", "tool_call_id": call["id"], "name": "look"},
        ]
        return [*map(_in_parts, chat)] if self.wants_parts else chat

    def _writes(self, messages: Messages) -> bool:
        try:
            return MARK in self._render(messages)
        except Refused:
            return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return message if text is None else {**message, "content": [{"type": "text", "text": text}]}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**function, "arguments": _json(function.get("arguments"))}}
        for call in message.get("tool_calls") or ()
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
