"""Rewrite a conversation in a form that the chat template supports, so that none of its content is lost.

A template silently ignores content that it does not support: a system message, a second one, an unknown
role, the text beside a call, the second of two calls. Therefore a skeleton of the conversation is
rendered first: the same messages with a mark in place of each text. If a mark is missing from the result
or out of order, other wordings of the conversation are tried, as in llama-server for a template without a
system role. If all wordings fail, the request is rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any

from localspec.chat.families import calls_as_text
from localspec.chat.notations.family import CallsAsText
from localspec.errors import InvalidRequest, LocalspecError, TemplateFailed, TemplateRaised
from localspec.protocol.calls import EXPLAINED, CallFormat
from localspec.protocol.dialect import MessageForms

Messages = list[dict[str, Any]]
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_MAX_NAMED_ROLES = 12  # Roles that an error names; a conversation may have thousands of messages.


def find_wording(
    messages: Messages, render: Callable[[Messages], str], form: CallFormat = EXPLAINED
) -> Messages:
    """Return the first wording of `messages` that `render` renders without loss, usually the original.

    form: how the model writes calls.

    Raises:
        InvalidRequest: every wording loses a message; the error names its role.
        TemplateFailed: the template raised, and every other wording fails.
    """
    first: LocalspecError | None = None
    problem: LocalspecError | None
    tried: list[Messages] = []
    for wording in _wordings(messages, form):
        if wording in tried:
            continue
        tried.append(wording)
        try:
            problem = _find_loss(wording, render(_skeleton(wording)))
        except TemplateRaised as refusal:
            roles = ", ".join(message["role"] for message in messages[:_MAX_NAMED_ROLES])
            more = ", …" if len(messages) > _MAX_NAMED_ROLES else ""
            problem = TemplateFailed(
                f"The model's chat template failed: {refusal} (the roles are: {roles}{more})"
            )
        if problem is None:
            return wording
        first = first or problem  # The problem with the original wording is reported.
    assert first is not None
    raise first


def _wordings(messages: Messages, form: CallFormat) -> Iterator[Messages]:
    """Yield all wordings of a conversation, the original first."""
    for wording in _reword_calls(messages, form):
        yield from _reword_system(wording)
    # Some templates reject chats whose turns do not alternate.
    for wording in _reword_calls(messages, form):
        yield from map(_join_alternating, _reword_system(wording))


def _reword_system(messages: Messages) -> Iterator[Messages]:
    """Yield wordings of a conversation with different places for its system messages."""
    yield messages
    yield _join_system(messages)
    yield _move_system_text(messages, keep_first=True)
    yield _move_system_text(messages, keep_first=False)


def _join_alternating(messages: Messages) -> Messages:
    """Join consecutive questions, and consecutive answers except the last, which may be continued."""
    result: Messages = []
    for index, message in enumerate(messages):
        previous = result[-1] if result else None
        same_role = previous is not None and previous["role"] == message["role"]
        are_texts = {*message, *(previous or ())} <= {"role", "content"}
        joinable = index + 1 < len(messages) and are_texts
        if same_role and (message["role"] == USER or (message["role"] == ASSISTANT and joinable)):
            assert previous is not None
            result[-1] = _with_text(previous, previous["content"], message["content"])
        else:
            result.append(message)
    return result


def _join_system(messages: Messages) -> Messages:
    joined: Messages = []
    for message in messages:
        if message["role"] == SYSTEM and joined and joined[-1]["role"] == SYSTEM:
            joined[-1] = _with_text(joined[-1], joined[-1]["content"], message["content"])
        else:
            joined.append(message)
    return joined


def _move_system_text(messages: Messages, *, keep_first: bool) -> Messages:
    """Move the text of system messages to the adjacent question; keep_first: except those at the start."""
    result: Messages = []
    pending = ""
    for message in _join_system(messages):
        if message["role"] == SYSTEM and (result or not keep_first):
            pending = message["content"]
            continue
        if pending and message["role"] == USER:
            message = _with_text(message, pending, message["content"])
        elif pending:
            _append_to_question(result, pending)
        pending = ""
        result.append(message)
    if pending:
        _append_to_question(result, pending)
    return result


def _append_to_question(messages: Messages, text: str) -> None:
    """Add `text` to the last message if that is a question, or as a new question."""
    if messages and messages[-1]["role"] == USER:
        messages[-1] = _with_text(messages[-1], messages[-1]["content"], text)
    else:
        messages.append({"role": USER, "content": text})


def _has_text(message: dict[str, Any]) -> bool:
    return bool((message["content"] or "").strip())


def _with_text(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    return {**message, "content": "\n".join(text for text in texts if text)}


def _reword_calls(messages: Messages, form: CallFormat) -> Iterator[Messages]:
    """Yield `messages`, then wordings of their calls that other templates need, and at last as text."""
    yield messages
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return
    # A template that supports null in a small chat may not support it with the tools of this one.
    yield [{**message, "content": message["content"] or ""} for message in messages]
    separate = _separate_text(messages)
    wordings = [messages, separate, _split_calls(messages), _split_calls(separate)]
    yield from wordings[1:]
    yield from map(_with_short_ids, wordings)
    if write := calls_as_text(form):
        yield _with_calls_in_text(messages, write)
    yield _as_text(messages)


def _separate_text(messages: Messages) -> Messages:
    """Move text beside calls to a message before them, because some templates write only the calls."""
    result: Messages = []
    for message in messages:
        if message.get("tool_calls") and (message["content"] or "").strip():
            result.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": None}
        result.append(message)
    return result


def _split_calls(messages: Messages) -> Messages:
    """Put parallel calls into messages of their own, each followed by its result."""
    rewritten: Messages = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            rewritten.append(message)
            continue
        tool_messages = list(takewhile(lambda m: m["role"] == "tool", messages[index:]))
        index += len(tool_messages)
        results: dict[Any, Messages] = {}
        for tool_message in tool_messages:
            results.setdefault(tool_message.get("tool_call_id"), []).append(tool_message)
        for call in calls:
            rewritten.append({**message, "tool_calls": [call]})
            rewritten += results.pop(call.get("id"), [])
            message = {"role": message["role"], "content": None}
        rewritten += [result for unmatched in results.values() for result in unmatched]
    return rewritten


def _with_short_ids(messages: Messages) -> Messages:
    """Replace the ids of calls by nine letters and digits, which Mistral's templates require."""
    result: Messages = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        result.append(message)
    return result


def _short_id(name: Any) -> str:
    """Return an id of nine letters and digits for any id; one that is such is not changed."""
    text = str(name)
    is_short = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode()).hexdigest()[:9]


def _with_calls_in_text(messages: Messages, write: CallsAsText) -> Messages:
    """Write calls into the texts of their messages, where some templates expect them."""
    return [
        {
            **{key: value for key, value in message.items() if key != "tool_calls"},
            "content": f"{message['content'] or ''}{write(message['tool_calls'])}",
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _as_text(messages: Messages) -> Messages:
    """Rewrite calls and results as text of answers and questions."""
    rewritten: Messages = []
    last_result: dict[str, Any] | None = None  # The last message, if it ends with a result.
    for message in messages:
        previous = rewritten[-1] if rewritten else None
        is_result = message["role"] == "tool"
        if calls := message.get("tool_calls"):
            text = append_calls(message["content"], calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = text
        elif is_result:
            message = {"role": USER, "content": format_tool_result(message["content"])}
        both_from_user = previous and previous["role"] == message["role"] == USER
        if previous and both_from_user and (is_result or previous is last_result):
            # Templates require the roles to alternate.
            message = {**previous, "content": f"{previous['content']}\n{message['content']}"}
            rewritten.pop()
        rewritten.append(message)
        last_result = message if is_result else None
    return rewritten


def append_calls(text: str | None, calls: Iterable[dict[str, Any]]) -> str:
    """Return an answer's text, followed by each of its calls."""
    return "\n".join([*([text] if text else []), *map(_format_call, calls)])


def format_tool_result(text: str | None) -> str:
    """Return a tool's result as the text of a user message."""
    return f"<tool_response>\n{text or ''}\n</tool_response>"


def _format_call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    body = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


# The same messages in the forms that a template reads.


def with_forms(messages: Messages, forms: MessageForms) -> Messages:
    """Return `messages` in the forms that the template reads, with the same content."""
    return [_with_forms(message, forms) for message in messages]


def _with_forms(message: dict[str, Any], forms: MessageForms) -> dict[str, Any]:
    message = dict(message)
    if message["content"] is None and not forms.null_text:
        message["content"] = ""
    if message.get("tool_calls") and forms.json_arguments:
        message = with_text_arguments(message)
    if (thoughts := message.get("reasoning_content")) is not None:
        # The name that gpt-oss uses for thoughts, as in transformers.
        message = {"thinking": thoughts, **message}
    return with_parts(message) if forms.parts else message


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text in a list of parts."""
    text = message["content"]
    return message if text is None else {**message, "content": [{"type": "text", "text": text}]}


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    calls = [
        {**call, "function": {**function, "arguments": _json(function.get("arguments"))}}
        for call in message.get("tool_calls") or ()
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _mark(index: int, part: str = "text") -> str:
    # Letters and digits that no template contains, so that no mark is the beginning of another.
    return f"zq{index}{part}qz"


def _skeleton(messages: Messages) -> Messages:
    """Return the messages with marks in place of their texts and calls."""
    return [_marked(message, index) for index, message in enumerate(messages)]


def _marked(message: dict[str, Any], index: int) -> dict[str, Any]:
    marked = dict(message)
    if _has_text(message):
        marked["content"] = _mark(index)
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "name": _mark(index, f"call{number}name"),
                    "arguments": {"key": _mark(index, f"call{number}value")},
                },
            }
            for number, call in enumerate(calls)
        ]
    return marked


def _find_loss(messages: Messages, text: str) -> InvalidRequest | None:
    """Return the error for a mark of the skeleton that is missing in `text` or out of order, if any."""
    position = 0
    for index, message in enumerate(messages):
        role = message["role"]
        if _has_text(message):
            position = text.find(_mark(index), position)
            if position < 0:
                return InvalidRequest(
                    f"This model's chat template has no place for a message of the role '{role}' "
                    "where it stands, and would lose its text.",
                    param="messages",
                )
        for number in range(len(message.get("tool_calls") or ())):
            parts = (f"call{number}{part}" for part in ("name", "value"))
            if not all(_mark(index, part) in text for part in parts):
                return InvalidRequest(
                    "This model's chat template has no place for the 'tool_calls' of a message of "
                    f"the role '{role}', and would lose them.",
                    param="messages",
                )
    return None
