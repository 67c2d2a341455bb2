"""Recorded sessions of coding agents, and what happens in them.

Claude Code 2.1.197, Codex 0.171.0, opencode 1.18.33 and pi 0.73.1 did small jobs in a folder with two files,
while a server that follows a script played the model. `scripts/record_agents.py` made the recording of
their requests. Some events no agent shows in a short session; those are derived from a recorded one here.
"""

from __future__ import annotations

import copy
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

_RECORDING = Path(__file__).with_name("sessions.json.xz")


class Event(StrEnum):
    """What happened before a request."""

    START = "session begins"
    TURN = "turn"
    REMINDER = "reminder moves"
    INSTRUCTIONS = "instructions change"
    NEW_HELPER = "new helper"
    HELPER = "helper returns"
    COMPACTION = "compaction"
    EDIT = "first message edited"


@dataclass(frozen=True, slots=True)
class Request:
    """A request of an agent. path: of the endpoint; body: as the agent sent it."""

    agent: str
    event: Event
    path: str
    body: Mapping[str, Any]


# The recorded requests, by their number, that are no ordinary turns. A helper (an agent's own agent, with
# other instructions and tools) sends three requests.
_EVENTS: dict[str, dict[Event, Sequence[int]]] = {
    "claude": {
        Event.INSTRUCTIONS: [6],
        Event.REMINDER: [7, 28, 30, 32],
        Event.NEW_HELPER: [11, 12, 13, 15, 16, 17],
        Event.HELPER: [19, 20, 21, 23, 24, 25],
        Event.COMPACTION: [31],
    },
    "codex": {Event.COMPACTION: [13, 14]},
    "opencode": {
        Event.START: [1],  # the request before asks for a title
        Event.NEW_HELPER: [12, 13, 14, 16, 17, 18],
        Event.HELPER: [20, 21, 22, 24, 25, 26],
    },
    "pi": {Event.COMPACTION: [16, 17, 18]},
}
_HELPER_REQUESTS = 3


@cache
def recorded() -> Mapping[str, Sequence[Request]]:
    """Return the sessions by the agent's name."""
    content = json.loads(lzma.decompress(_RECORDING.read_bytes()))
    sessions = {}
    for agent, entries in content.items():
        events = {at: event for event, numbers in _EVENTS[agent].items() for at in numbers}
        events.setdefault(0, Event.START)
        sessions[agent] = [
            Request(agent, events.get(at, Event.TURN), entry["path"], entry["body"])
            for at, entry in enumerate(entries)
        ]
    return sessions


def moving_reminder(agent: str = "pi") -> list[Request]:
    """Return a session whose last message has a reminder, which is gone in the next request.

    Every request then changes the message that was last before.
    """
    session = []
    for at, request in enumerate(_turns(agent)):
        reminder = f"\n<system-reminder>Task {at} of {at * 7 + 3} is next.</system-reminder>"
        changed = _change_text(request, -1, "{}" + reminder)
        session.append(replace(changed, agent="reminded") if at else changed)
    return [replace(r, event=Event.REMINDER if at else Event.START) for at, r in enumerate(session)]


def edited_first_message(agent: str = "pi") -> list[Request]:
    """Return the turns of a session, and then once more with another first message of the user."""
    turns = _turns(agent)
    edited = [
        replace(_change_text(r, _first_user(r), "Please. {}"), event=Event.EDIT) for r in turns
    ]
    return [*turns, *edited]


def returning_helpers(agent: str, times: int) -> list[Request]:
    """Return a session whose helpers come back so many times, each time with another task.

    The agent's own turns are between them.
    """
    session = list(recorded()[agent])
    new = [r for r in session if r.event is Event.NEW_HELPER]
    before = session[: session.index(new[0])]
    end = next((at for at, r in enumerate(session) if r.event is Event.COMPACTION), None)
    turns = [r for r in session[session.index(new[-1]) : end] if r.event is Event.TURN]
    result = [*before, *new]
    for time in range(times):
        task = "{} " + " ".join(f"case{time}part{part}" for part in range(24))
        for start in range(0, len(new), _HELPER_REQUESTS):
            for request in new[start : start + _HELPER_REQUESTS]:
                changed = _change_text(request, _first_user(request), task)
                result.append(replace(changed, event=Event.HELPER))
        result += turns[time : time + 1]
    return result


def in_turns(sessions: Sequence[Sequence[Request]]) -> list[Request]:
    """Return the requests of several sessions, one of each after the other."""
    longest = max(map(len, sessions))
    return [session[at] for at in range(longest) for session in sessions if at < len(session)]


def _turns(agent: str) -> list[Request]:
    """Return a session until something else than a turn happens."""
    session = recorded()[agent]
    end = next(at for at, r in enumerate(session) if r.event not in (Event.START, Event.TURN))
    return list(session[: min(end, 11)])


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = body["messages"] if "messages" in body else body["input"]
    return messages


def _first_user(request: Request) -> int:
    return next(at for at, m in enumerate(_messages(request.body)) if m.get("role") == "user")


def _change_text(request: Request, at: int, form: str) -> Request:
    """Return the request with the last text of one message put into `form`, in place of {}."""
    body = copy.deepcopy(dict(request.body))
    message = _messages(body)[at]
    if isinstance(message["content"], str):
        message["content"] = form.replace("{}", message["content"])
    else:
        part = message["content"][-1]
        part["text"] = form.replace("{}", part["text"])
    return replace(request, body=body)
