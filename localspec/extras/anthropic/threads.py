"""Translate Anthropic's threads: stored conversations, to which a request adds only its new messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from localspec.errors import ThreadMismatch
from localspec.extras.anthropic.answer import call_input
from localspec.extras.anthropic.request import system_prompt
from localspec.extras.anthropic.wire import CountTokensRequest, Tools
from localspec.protocol.conversations import StoredMessage
from localspec.protocol.requests import ChatMessage


class ThreadState(msgspec.Struct):
    """What a thread stores of its requests beside the messages. The system prompt is a message."""

    tools: Tools = []


def encode_state(body: CountTokensRequest) -> str:
    """Return the JSON that is stored with the answer to `body`."""
    return msgspec.json.encode(ThreadState(body.offered or [])).decode()


def inherit_tools(body: CountTokensRequest, state: str, before: Sequence[ChatMessage]) -> None:
    """Complete `body`, which continues a thread, with the thread's tools, and drop its system prompt.

    `before`: the thread's messages, which begin with the system prompt.

    Raises:
        ThreadMismatch: the request has another system prompt or other tools than the thread.
    """
    stored = msgspec.json.decode(state, type=ThreadState)
    system = [message.content for message in before if message.role == "system"]
    changed = []
    if body.system and [message.content for message in system_prompt(body)] != system:
        changed.append("system")
    if body.offered is not None and body.offered != stored.tools:
        changed.append("tools")
    if changed:
        names = " and ".join(f"'{name}'" for name in changed)
        raise ThreadMismatch(
            f"{names} cannot change in a thread: leave out what the thread was created with, or send the "
            'whole conversation with "thread": {"type": "create"}.',
            param=changed[0],
        )
    body.system, body.offered = None, stored.tools


def replay(stored: Sequence[StoredMessage]) -> list[ChatMessage]:
    """Return stored messages as a client that stores the conversation itself would send them."""
    messages = []
    for message in stored:
        if message.role != "assistant":
            content, call = message.content, message.tool_call_id
            messages.append(ChatMessage(message.role, content, message.name, None, call))
        elif answer := _assistant_message(message):
            messages.append(answer)
    return messages


def _assistant_message(message: StoredMessage) -> ChatMessage | None:
    thoughts, calls = message.reasoning_content, []
    for call in message.tool_calls or []:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = call_input(arguments)  # empty if the call was cut off
        calls.append({**call, "function": {**function, "arguments": arguments or {}}})
    if message.kind is not None and not (message.content or calls or thoughts):
        return None  # an answer without any content blocks
    content = message.content if message.content or not (calls or thoughts) else None
    return ChatMessage("assistant", content, None, calls or None, None, thoughts)


def prepare_for_history(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages of a request in the form in which the history stores them: arguments as JSON text."""

    def encode(call: dict[str, Any]) -> dict[str, Any]:
        arguments = msgspec.json.encode(call["function"]["arguments"]).decode()
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        msgspec.structs.replace(
            message, tool_calls=[*map(encode, message.tool_calls or [])] or None
        )
        for message in messages
    ]
