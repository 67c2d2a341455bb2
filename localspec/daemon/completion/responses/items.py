"""Items of the input into the messages of a chat, and kept messages into items.

A model's turn is one message to its template: thoughts, text and calls that follow each other are joined.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.daemon.completion.responses.tools import INPUT, Tools
from localspec.errors import InvalidRequest
from localspec.protocol.clients.responses.requests import InputItem, Part
from localspec.protocol.requests import ChatMessage

_OPAQUE = "localspec."  # how the thoughts begin that we gave out for clients to bring back
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

Resolve = Callable[[str], ChatMessage]


def opaque(thoughts: str) -> str:
    """Thoughts as a client keeps them that keeps no thoughts it can read."""
    return _OPAQUE + base64.b64encode(thoughts.encode()).decode()


def opened(text: str | None) -> str:
    """The thoughts again; nothing of what another server made."""
    if not text or not text.startswith(_OPAQUE):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_OPAQUE), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


@dataclass(slots=True)
class Messages:
    """Messages so far, and sentences about items that were left out.

    `resolve` finds what an item reference means.
    """

    tools: Tools
    resolve: Resolve
    said: list[ChatMessage] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add(self, items: Sequence[InputItem]) -> None:
        """Raises: InvalidRequest: an item that lacks what its type needs, or is no text."""
        for index, item in enumerate(items):
            self._one(item, f"input[{index}]")

    def _one(self, item: InputItem, path: str) -> None:
        match item.type or "message":
            case "message" | None:
                self._message(item, path)
            case "reasoning":
                self._reasoning(item, path)
            case "function_call":
                self._call(item, path, _arguments(item.arguments))
            case "custom_tool_call":
                text = item.input if isinstance(item.input, str) else ""
                self._call(item, path, msgspec.json.encode({INPUT: text}).decode())
            case "function_call_output" | "custom_tool_call_output":
                call = _needed(item.call_id, f"{path}.call_id")
                text = _output(item.output, f"{path}.output")
                self.said.append(ChatMessage("tool", text, tool_call_id=call))
            case "item_reference":
                self._refer(_needed(item.id, f"{path}.id"))
            case other:
                self.ignored.append(f"'{path}': an item of type '{other[:80]}' is not read here.")

    def _message(self, item: InputItem, path: str) -> None:
        role = _needed(item.role, f"{path}.role")
        if isinstance(item.content, dict):
            path += ".content"
            raise InvalidRequest(f"'{path}' must be a string or a list of parts.", param=path)
        text = _text(item.content or "", f"{path}.content")
        if role != "assistant":
            self.said.append(ChatMessage("developer" if role == "system" else role, text))
            return
        turn = self._turn(lambda last: not last.content and not last.tool_calls)
        turn.content = text

    def _reasoning(self, item: InputItem, path: str) -> None:
        parts = item.content if isinstance(item.content, list) else []
        text = _text(parts, f"{path}.content") or opened(item.encrypted_content)
        text = text or _text(item.summary or [], f"{path}.summary")
        if text:
            turn = self._turn(lambda last: not last.content and not last.tool_calls)
            turn.reasoning_content = "\n".join(filter(None, [turn.reasoning_content, text]))

    def _call(self, item: InputItem, path: str, arguments: str) -> None:
        call, name = _needed(item.call_id, f"{path}.call_id"), _needed(item.name, f"{path}.name")
        self._calls(call, self.tools.name_of(name, item.namespace or ""), arguments)

    def _calls(self, call: str, name: str, arguments: str) -> None:
        turn = self._turn(lambda last: True)
        function = {"name": name, "arguments": arguments}
        made = {"id": call, "type": "function", "function": function}
        turn.tool_calls = [*(turn.tool_calls or []), made]

    def _refer(self, reference: str) -> None:
        """What was kept: of an answer the part that the id names."""
        kept = self.resolve(reference)
        if kept.role != "assistant":
            self.said.append(kept)
            return
        if kept.tool_calls:
            for call in kept.tool_calls:
                function = call["function"]
                self._calls(call["id"], function["name"], function["arguments"])
            return
        turn = self._turn(lambda last: not last.content and not last.tool_calls)
        turn.reasoning_content = turn.reasoning_content or kept.reasoning_content
        turn.content = kept.content

    def _turn(self, fits: Callable[[ChatMessage], bool]) -> ChatMessage:
        """The model's turn that is being read, if it `fits`, else a new one."""
        last = self.said[-1] if self.said else None
        if last is None or last.role != "assistant" or not fits(last):
            self.said.append(last := ChatMessage("assistant"))
        return last


def _needed(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest(f"'{path}' is missing.", param=path)
    return value


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value or {}).decode()


def _text(content: str | list[Part], path: str) -> str:
    """The parts' texts, a part a line as in a chat.

    Raises:
        InvalidRequest: a part that is no text; this model reads nothing else.
    """
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in (*_TEXTS, "refusal"):
            path = f"{path}[{index}]"
            raise InvalidRequest(
                f"'{path}' is of type '{(part.type or '')[:80]}'; this model reads text alone, in parts "
                "of type 'input_text' with a 'text'.",
                param=f"{path}.type",
            )
        texts.append(text)
    return "\n".join(texts)


def _output(value: Any, path: str) -> str:
    """A call's result: text, parts of text, or whatever JSON a client sends."""
    if isinstance(value, list):
        try:
            value = msgspec.convert(value, list[Part])
        except msgspec.ValidationError:
            return msgspec.json.encode(value).decode()
        return _text(value, path)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
