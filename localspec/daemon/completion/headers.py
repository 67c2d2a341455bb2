"""Lines that agents put before their instructions, with something else in them at each request.

All that stands behind what has changed is read again, and that would be the whole prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from localspec.protocol.frames import Message

_INSTRUCTIONS = ("system", "developer")
# Numbers for a bill, and a checksum of the request: nothing that a model has a use for.
_BILL = re.compile(r"\s*x-[a-z0-9-]*billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)
# A line that says what day or time it is, and nothing else.
_CLOCK = re.compile(
    r"\s*(?:the )?(?:(?:current|local|system) (?:date|time)|today(?:'s date| is))\b"
    r"(?=[^\n]*\d)(?![^\n]*[.!?][ \t]+[a-z])[^\n]{0,100}(?:\n|\Z)",
    re.IGNORECASE,
)


def stable(messages: Sequence[Message]) -> list[Message]:
    """The messages without what changes before their instructions: a bill's header is left out, and
    what day or time it is comes behind them.
    """
    kept: list[Message] = []
    for at, message in enumerate(messages):
        if message.role not in _INSTRUCTIONS:
            return [*kept, *messages[at:]]
        text = _settled(message.content or "")
        if text == (message.content or ""):
            kept.append(message)
        elif text:
            kept.append(msgspec.structs.replace(message, content=text))
    return kept or list(messages)


def _settled(text: str) -> str:
    clocks: list[str] = []
    while found := _BILL.match(text) or _CLOCK.match(text):
        if found.re is _CLOCK:
            clocks.append(found[0].strip())
        text = text[found.end() :]
    return "\n\n".join([text.rstrip(), *clocks]).lstrip() if clocks else text
