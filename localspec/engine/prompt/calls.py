"""A conversation's calls in other places: some templates have none for all that an answer may hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from localspec.engine.prompt.habits import Messages
from localspec.protocol import calls_as_text


def wordings(messages: Messages) -> Iterator[Messages]:
    """`messages`, then with their calls as other templates have them, and at last as text."""
    yield messages
    if not any(each.get("tool_calls") or each["role"] == "tool" for each in messages):
        return
    # where null is no trouble in small, it may be one beside this chat's tools
    yield [{**each, "content": each["content"] or ""} for each in messages]
    separate = apart(messages)
    in_calls = [messages, separate, one_each(messages), one_each(separate)]
    yield from in_calls[1:]
    yield from map(with_short_ids, in_calls)
    yield as_text(messages)


def apart(messages: Messages) -> Messages:
    """Text beside calls as a message before them: some templates write only the calls."""
    found: Messages = []
    for message in messages:
        if message.get("tool_calls") and (message["content"] or "").strip():
            found.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": None}
        found.append(message)
    return found


def one_each(messages: Messages) -> Messages:
    """Calls that were made at once as one after the other, each with its result behind it."""
    found: Messages = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        answers = list(takewhile(lambda each: each["role"] == "tool", messages[at:]))
        at += len(answers)
        results: dict[Any, Messages] = {}
        for each in answers:
            results.setdefault(each.get("tool_call_id"), []).append(each)
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            found += results.pop(call.get("id"), [])
            message = {"role": message["role"], "content": None}
        found += [each for left in results.values() for each in left]
    return found


def with_short_ids(messages: Messages) -> Messages:
    """Ids of calls as Mistral's templates want them, nine letters and digits, whoever gave them."""
    found: Messages = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
        if "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])
        found.append(message)
    return found


def _short(name: Any) -> str:
    known = str(name)
    short = len(known) == 9 and known.isascii() and known.isalnum()
    return known if short else hashlib.sha256(known.encode()).hexdigest()[:9]


def as_text(messages: Messages) -> Messages:
    """Calls and results as text of answers and questions."""
    found: Messages = []
    last: dict[str, Any] | None = None  # what ends with a result
    for message in messages:
        before = found[-1] if found else None
        result = message["role"] == "tool"
        if calls := message.get("tool_calls"):
            text = calls_as_text.with_calls(message["content"], calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = text
        elif result:
            message = {"role": "user", "content": calls_as_text.result(message["content"])}
        if before and before["role"] == message["role"] == "user" and (result or before is last):
            # templates want the roles to alternate
            message = {**before, "content": f"{before['content']}\n{message['content']}"}
            found.pop()
        found.append(message)
        last = message if result else None
    return found
