"""Move lines that agents put before their instructions and that change with every request.

Everything behind a changed line has to be prefilled again, and here that would be the whole prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from localspec.protocol.frames import Message

_INSTRUCTION_ROLES = ("system", "developer")
# Figures for a bill and a checksum of the request, which are of no use to a model.
_BILLING_HEADER = re.compile(r"\s*x-[a-z0-9-]*billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)
# A line that contains the current date or time and nothing else.
_DATE_LINE = re.compile(
    r"\s*(?:the )?(?:(?:current|local|system) (?:date|time)|today(?:'s date| is))\b"
    r"(?=[^\n]*\d)(?![^\n]*[.!?][ \t]+[a-z])[^\n]{0,100}(?:\n|\Z)",
    re.IGNORECASE,
)


def stable(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a stable beginning: without billing headers, and with dates moved to the end.

    Only the instructions at the beginning of the conversation are changed.
    """
    instructions: list[Message] = []
    for index, message in enumerate(messages):
        if message.role not in _INSTRUCTION_ROLES:
            return [*instructions, *messages[index:]]
        text = _move_dates(message.content or "")
        if text == (message.content or ""):
            instructions.append(message)
        elif text:
            instructions.append(msgspec.structs.replace(message, content=text))
    return instructions or list(messages)


def _move_dates(text: str) -> str:
    dates: list[str] = []
    while match := _BILLING_HEADER.match(text) or _DATE_LINE.match(text):
        if match.re is _DATE_LINE:
            dates.append(match[0].strip())
        text = text[match.end() :]
    return "\n\n".join([text.rstrip(), *dates]).lstrip() if dates else text
