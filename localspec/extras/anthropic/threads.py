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
    """Return an assistant's message; None for an answer without any content blocks."""
    thoughts = message.reasoning_content
    calls = [_decode_arguments(call) for call in message.tool_calls or []]
    is_answer = message.kind is not None
    if is_answer and not (message.content or calls or thoughts):
        return None
    content = message.content if message.content or not (calls or thoughts) else None
    return ChatMessage("assistant", content, None, calls or None, None, thoughts)


def _decode_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, which is empty if the call was cut off."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = call_input(arguments)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def prepare_for_history(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages of a request in the form in which the history stores them: arguments as JSON text."""
    return [_encode_arguments(message) for message in messages]


def _encode_arguments(message: ChatMessage) -> ChatMessage:
    calls = []
    for call in message.tool_calls or []:
        function = call["function"]
        arguments = msgspec.json.encode(function["arguments"]).decode()
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return msgspec.structs.replace(message, tool_calls=calls or None)
