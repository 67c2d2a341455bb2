"""A conversation in the wordings that a chat template knows, so that nothing that was sent is lost.

A template passes over what it has no place for without a word: a system message, a second one, a role
it does not know, the text beside a call, the second of two calls. So a conversation's skeleton is rendered
first, the same messages with a mark in place of each text. Where a mark does not come out, or not in its
order, other wordings are tried, as llama-server does where a template has no system role; and if all fail,
the request is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from localspec.errors import InvalidRequest, LocalspecError, TemplateFailed
from localspec.protocol.calls import result_text, with_calls

Messages = list[dict[str, Any]]
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_MOST_NAMED = 12  # roles in a refusal; a conversation may have thousands


class TemplateRaised(Exception):
    """The template itself raised, as they do for roles that they do not want."""


def fitted(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """The first wording of `messages` of which `render` loses nothing; mostly they themselves.

    Raises:
        InvalidRequest: every wording loses a message; its place and role are named.
        TemplateFailed: the template raised, and no other wording is whole.
    """
    first: LocalspecError | None = None
    problem: LocalspecError | None
    tried: list[Messages] = []
    for wording in _wordings(messages):
        if wording in tried:
            continue
        tried.append(wording)
        try:
            problem = _loss(wording, render(_skeleton(wording)))
        except TemplateRaised as refusal:
            roles = ", ".join(each["role"] for each in messages[:_MOST_NAMED])
            more = ", …" if len(messages) > _MOST_NAMED else ""
            problem = TemplateFailed(
                f"The model's chat template failed: {refusal} (the roles are: {roles}{more})"
            )
        if problem is None:
            return wording
        first = first or problem  # the one of what was sent
    assert first is not None
    raise first


def _wordings(messages: Messages) -> Iterator[Messages]:
    for each in _of_calls(messages):
        yield from _of_systems(each)
    # templates that want turns to alternate refuse any other chat
    for each in _of_calls(messages):
        yield from map(_alternating, _of_systems(each))


def _of_systems(messages: Messages) -> Iterator[Messages]:
    yield messages
    yield _joined(messages)
    yield _in_questions(messages, keep_first=True)
    yield _in_questions(messages, keep_first=False)


def _alternating(messages: Messages) -> Messages:
    """Return questions that follow one another as one, and answers too, but for one at the end: that may
    be continued."""
    found: Messages = []
    for at, message in enumerate(messages):
        before = found[-1] if found else None
        same = before is not None and before["role"] == message["role"]
        answers = at + 1 < len(messages) and before is not None and _only_says(before, message)
        if same and (message["role"] == USER or (message["role"] == ASSISTANT and answers)):
            assert before is not None
            found[-1] = _with_text(before, before["content"], message["content"])
        else:
            found.append(message)
    return found


def _only_says(*messages: dict[str, Any]) -> bool:
    return all(message.keys() <= {"role", "content"} for message in messages)


def _joined(messages: Messages) -> Messages:
    """System messages that stand together as one."""
    joined: Messages = []
    for message in messages:
        if message["role"] == SYSTEM and joined and joined[-1]["role"] == SYSTEM:
            joined[-1] = _with_text(joined[-1], joined[-1]["content"], message["content"])
        else:
            joined.append(message)
    return joined


def _in_questions(messages: Messages, *, keep_first: bool) -> Messages:
    """System messages as text of the question they stand beside; `keep_first`: not those at the start."""
    found: Messages = []
    waiting = ""
    for message in _joined(messages):
        if message["role"] == SYSTEM and (found or not keep_first):
            waiting = message["content"]
            continue
        if waiting and message["role"] == USER:
            message = _with_text(message, waiting, message["content"])
        elif waiting:
            _say(found, waiting)
        waiting = ""
        found.append(message)
    if waiting:
        _say(found, waiting)
    return found


def _say(messages: Messages, text: str) -> None:
    """`text` at the end of the question that stands last, or as one."""
    if messages and messages[-1]["role"] == USER:
        messages[-1] = _with_text(messages[-1], messages[-1]["content"], text)
    else:
        messages.append({"role": USER, "content": text})


def _says(message: dict[str, Any]) -> bool:
    return bool((message["content"] or "").strip())


def _with_text(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    return {**message, "content": "\n".join(text for text in texts if text)}


# ------------------------------------------------------------------------ calls


def _of_calls(messages: Messages) -> Iterator[Messages]:
    """`messages`, then with their calls as other templates have them, and at last as text."""
    yield messages
    if not any(each.get("tool_calls") or each["role"] == "tool" for each in messages):
        return
    # where null is no trouble in small, it may be one beside this chat's tools
    yield [{**each, "content": each["content"] or ""} for each in messages]
    separate = _apart(messages)
    in_calls = [messages, separate, _one_each(messages), _one_each(separate)]
    yield from in_calls[1:]
    yield from map(_with_short_ids, in_calls)
    yield _as_text(messages)


def _apart(messages: Messages) -> Messages:
    """Text beside calls as a message before them: some templates write only the calls."""
    found: Messages = []
    for message in messages:
        if message.get("tool_calls") and (message["content"] or "").strip():
            found.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": None}
        found.append(message)
    return found


def _one_each(messages: Messages) -> Messages:
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


def _with_short_ids(messages: Messages) -> Messages:
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


def _as_text(messages: Messages) -> Messages:
    """Calls and results as text of answers and questions."""
    found: Messages = []
    last: dict[str, Any] | None = None  # what ends with a result
    for message in messages:
        before = found[-1] if found else None
        result = message["role"] == "tool"
        if calls := message.get("tool_calls"):
            text = with_calls(message["content"], calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = text
        elif result:
            message = {"role": "user", "content": result_text(message["content"])}
        if before and before["role"] == message["role"] == "user" and (result or before is last):
            # templates want the roles to alternate
            message = {**before, "content": f"{before['content']}\n{message['content']}"}
            found.pop()
        found.append(message)
        last = message if result else None
    return found


# ------------------------------------------------------------------------ the skeleton


def _mark(index: int, part: str = "text") -> str:
    # letters and digits that no template holds, and none the beginning of another
    return f"zq{index}{part}qz"


def _skeleton(messages: Messages) -> Messages:
    return [_marked(message, index) for index, message in enumerate(messages)]


def _marked(message: dict[str, Any], index: int) -> dict[str, Any]:
    marked = dict(message)
    if _says(message):
        marked["content"] = _mark(index)
    if called := message.get("tool_calls"):
        marked["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "name": _mark(index, f"call{at}name"),
                    "arguments": {"key": _mark(index, f"call{at}value")},
                },
            }
            for at, call in enumerate(called)
        ]
    return marked


def _loss(messages: Messages, text: str) -> InvalidRequest | None:
    """What of the skeleton is not in `text`, or out of its order."""
    at = 0
    for index, message in enumerate(messages):
        role = message["role"]
        if _says(message):
            at = text.find(_mark(index), at)
            if at < 0:
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
