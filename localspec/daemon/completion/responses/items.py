"""Translate items of the input into messages of a chat.

A template expects a model's turn as one message, so consecutive reasoning, text and calls are joined.
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

_OPAQUE_PREFIX = "localspec."  # of reasoning that clients store and send back unread
_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

Resolve = Callable[[str], ChatMessage]


def opaque(thoughts: str) -> str:
    """Encode reasoning for clients that must not store it in readable form."""
    return _OPAQUE_PREFIX + base64.b64encode(thoughts.encode()).decode()


def opened(text: str | None) -> str:
    """Decode reasoning that `opaque` encoded; "" if another server made it."""
    if not text or not text.startswith(_OPAQUE_PREFIX):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_OPAQUE_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


@dataclass(slots=True)
class Messages:
    """The messages so far, and sentences about items that were left out.

    `resolve` returns the stored message that an item reference means.
    """

    tools: Tools
    resolve: Resolve
    said: list[ChatMessage] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def add(self, items: Sequence[InputItem]) -> None:
        """Add the messages of some items.

        Raises:
            InvalidRequest: an item lacks a required field, or is not text.
        """
        for index, item in enumerate(items):
            self._add_item(item, f"input[{index}]")

    def _add_item(self, item: InputItem, path: str) -> None:
        match item.type or "message":
            case "message" | None:
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                self._add_call_item(item, path, _arguments(item.arguments))
            case "custom_tool_call":
                text = item.input if isinstance(item.input, str) else ""
                self._add_call_item(item, path, msgspec.json.encode({INPUT: text}).decode())
            case "function_call_output" | "custom_tool_call_output":
                call_id = _require(item.call_id, f"{path}.call_id")
                text = _output(item.output, f"{path}.output")
                self.said.append(ChatMessage("tool", text, tool_call_id=call_id))
            case "item_reference":
                self._add_referenced(_require(item.id, f"{path}.id"))
            case other:
                self.ignored.append(f"'{path}': an item of type '{other[:80]}' is not read here.")

    def _add_message(self, item: InputItem, path: str) -> None:
        role = _require(item.role, f"{path}.role")
        if isinstance(item.content, dict):
            path += ".content"
            raise InvalidRequest(f"'{path}' must be a string or a list of parts.", param=path)
        text = _text(item.content or "", f"{path}.content")
        if role != "assistant":
            self.said.append(ChatMessage("developer" if role == "system" else role, text))
            return
        turn = self._turn(lambda last: not last.content and not last.tool_calls)
        turn.content = text

    def _add_reasoning(self, item: InputItem, path: str) -> None:
        parts = item.content if isinstance(item.content, list) else []
        text = _text(parts, f"{path}.content") or opened(item.encrypted_content)
        text = text or _text(item.summary or [], f"{path}.summary")
        if text:
            turn = self._turn(lambda last: not last.content and not last.tool_calls)
            turn.reasoning_content = "\n".join(filter(None, [turn.reasoning_content, text]))

    def _add_call_item(self, item: InputItem, path: str, arguments: str) -> None:
        call_id, name = (
            _require(item.call_id, f"{path}.call_id"),
            _require(item.name, f"{path}.name"),
        )
        self._add_call(call_id, self.tools.name_of(name, item.namespace or ""), arguments)

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        turn = self._turn(lambda last: True)
        function = {"name": name, "arguments": arguments}
        tool_call = {"id": call_id, "type": "function", "function": function}
        turn.tool_calls = [*(turn.tool_calls or []), tool_call]

    def _add_referenced(self, reference: str) -> None:
        """Add the stored message, or the part of an answer, that the id means."""
        stored = self.resolve(reference)
        if stored.role != "assistant":
            self.said.append(stored)
            return
        if stored.tool_calls:
            for call in stored.tool_calls:
                function = call["function"]
                self._add_call(call["id"], function["name"], function["arguments"])
            return
        turn = self._turn(lambda last: not last.content and not last.tool_calls)
        turn.reasoning_content = turn.reasoning_content or stored.reasoning_content
        turn.content = stored.content

    def _turn(self, fits: Callable[[ChatMessage], bool]) -> ChatMessage:
        """Return the model's current turn if it `fits`, else a new one."""
        last = self.said[-1] if self.said else None
        if last is None or last.role != "assistant" or not fits(last):
            self.said.append(last := ChatMessage("assistant"))
        return last


def _require(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest(f"'{path}' is missing.", param=path)
    return value


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value or {}).decode()


def _text(content: str | list[Part], path: str) -> str:
    """Return the text of the parts, one line per part as in a chat.

    Raises:
        InvalidRequest: a part is not text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in (*_TEXT_TYPES, "refusal"):
            path = f"{path}[{index}]"
            raise InvalidRequest(
                f"'{path}' is of type '{(part.type or '')[:80]}'; this model reads text alone, in parts "
                "of type 'input_text' with a 'text'.",
                param=f"{path}.type",
            )
        texts.append(text)
    return "\n".join(texts)


def _output(value: Any, path: str) -> str:
    """Return a call's result as text; clients send text, parts of text, or any other JSON."""
    if isinstance(value, list):
        try:
            value = msgspec.convert(value, list[Part])
        except msgspec.ValidationError:
            return msgspec.json.encode(value).decode()
        return _text(value, path)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
