"""Kept responses: their items again, those of their input, and what the ids of items mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from localspec.daemon.completion.responses.output import Style, written
from localspec.daemon.completion.responses.tools import Tools, translated
from localspec.protocol.answers import ToolCall
from localspec.protocol.clients.responses.items import (
    AnyItem,
    FunctionOutput,
    InputText,
    Message,
    OutputItem,
    ResponseObject,
)
from localspec.protocol.conversations import StoredMessage
from localspec.protocol.requests import ChatMessage

_KEY = 24  # letters of a response's id after its prefix; a conversation's are fewer
_ID = re.compile(
    r"(?P<kind>msg|rs|fc|ctc|fco)_(?P<key>[0-9a-f]+?)(?:at(?P<at>\d+))?(?:_(?P<n>\d+))?"
)


def response(body: str, answer: StoredMessage, *, opaque: bool) -> ResponseObject:
    """As it was sent, with the items of its answer; `opaque`: as Style has it."""
    found = msgspec.json.decode(body, type=ResponseObject)
    key = found.id.removeprefix("resp_")
    tools = translated(found.tools, None)
    summary = bool(found.reasoning.get("summary"))
    found.output = _answer(
        answer, Style(key, tools, summary, opaque), cut=found.status != "completed"
    )
    return found


def _answer(message: StoredMessage, style: Style, *, cut: bool = False) -> list[OutputItem]:
    calls = msgspec.convert(message.tool_calls or [], list[ToolCall])
    return written(style, message.reasoning_content or "", message.content, calls, cut=cut)


def body(response: ResponseObject) -> str:
    """What no message of its conversation says."""
    return msgspec.json.encode(msgspec.structs.replace(response, output=[])).decode()


def items(
    conversation: str, messages: Sequence[StoredMessage], ids: Mapping[int, str]
) -> list[AnyItem]:
    """The items of messages; `ids` of the responses that they answer, by their index."""
    found: list[AnyItem] = []
    for index, message in enumerate(messages):
        key = f"{conversation}at{index}"
        if message.role == "assistant":
            key = ids[index].removeprefix("resp_") if index in ids else key
            found += _answer(message, Style(key, Tools()))
        elif message.role == "tool":
            call = message.tool_call_id or ""
            found.append(FunctionOutput(f"fco_{key}", call, message.content))
        else:
            found.append(Message(f"msg_{key}", message.role, [InputText(message.content)]))
    return found


class Reference:
    """What an item's id means: the answer of a response, or a message of a conversation.

    Raises:
        ValueError: it is no id of ours.
    """

    def __init__(self, name: str) -> None:
        found = _ID.fullmatch(name)
        if found is None or (found["at"] is None and len(found["key"]) != _KEY):
            raise ValueError(name)
        self._kind, self._call = found["kind"], int(found["n"] or 0)
        self.conversation = found["key"] if found["at"] else ""
        self.index = int(found["at"] or -1)
        self.response = "" if found["at"] else f"resp_{found['key']}"

    def part(self, message: ChatMessage) -> ChatMessage:
        """Of the message the part that is meant.

        Raises:
            ValueError: it has no such part.
        """
        if message.role != "assistant":
            return message
        part: dict[str, Any] = {"role": "assistant"}
        match self._kind:
            case "msg":
                part["content"] = message.content
            case "rs":
                part["reasoning_content"] = message.reasoning_content
            case _:
                part["tool_calls"] = (message.tool_calls or [])[self._call : self._call + 1]
        if not any(part[each] for each in part if each != "role"):
            raise ValueError(self._kind)
        return ChatMessage(**part)
