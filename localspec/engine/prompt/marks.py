"""How a model marks its thoughts, where it is in none of the known ways: seen in what its template makes of
an answer whose thoughts and text are known.

What the model writes is what stands behind the prompt of such an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Marks = tuple[str, str]  # what opens thoughts and what closes them
Render = Callable[[list[dict[str, Any]], bool], str]  # messages, and whether an answer is to follow

CHANNELS = "<|channel|>"  # of gpt-oss, whose messages are read in another way
_QUESTION, _THOUGHTS, _ANSWER = "zqquestion", "zqthoughts", "zqanswer"
_KEYS = "reasoning_content", "reasoning", "thinking"  # templates read thoughts from one of these
_LONGEST = 80  # characters of a mark
_AROUND = 40  # of what marks a question; before that, instructions may name the marks of thoughts
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]]+\]")


class NotSeen(Exception):
    """The template has a place for thoughts, and what marks them there is not understood."""


def seen(render: Render) -> Marks | None:
    """The marks; None where the template leaves out an answer's thoughts.

    Raises:
        NotSeen: they are marked in a way that cannot be read.
        Whatever `render` does.
    """
    question = {"role": "user", "content": _QUESTION}
    said = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(_KEYS, _THOUGHTS)}
    whole = render([question, said], False)
    if _THOUGHTS not in whole:
        return None
    before, _, behind = whole.partition(_THOUGHTS)
    closing, found, rest = behind.partition(_ANSWER)
    asked, _, turn = before.partition(_QUESTION)
    asked = asked.rstrip().rpartition("\n")[2][-_AROUND:]
    prompt = render([question], True).partition(_QUESTION)[2]
    closing, opening = closing.strip(), _opening(turn, asked, prompt).strip()
    if not found or not closing or not opening or max(len(opening), len(closing)) > _LONGEST:
        raise NotSeen
    # What also ends an answer, or stands around every message, would be taken for what it is not.
    if opening == closing or any(each in asked + rest for each in pieces((opening, closing))):
        raise NotSeen
    return opening, closing


def _opening(before: str, asked: str, prompt: str) -> str:
    """What opens thoughts that stand behind `before`, where the model goes on from `prompt`."""
    written, given = before.rstrip(), prompt.rstrip()
    if written.startswith(given) and written != given:  # the model opens them itself
        return written[len(given) :]
    if (
        given.startswith(written) and given != written
    ):  # the prompt does, and a later one leaves it out
        return given[len(written) :]
    if given == written:  # the prompt does
        return next((each for each in _ends(given) if each not in asked), "")
    raise NotSeen


def _ends(text: str) -> Iterator[str]:
    """Its ends that begin with a marker, the shortest first."""
    for found in reversed(list(_MARKER.finditer(text))):
        yield text[found.start() :]


def pieces(marks: Marks) -> list[str]:
    """Whatever in them may be a control token."""
    return [*marks, *(each for mark in marks for each in _MARKER.findall(mark))]
