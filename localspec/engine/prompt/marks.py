"""Detect the markers that a model puts around its thoughts, if it uses none of the known ones.

The module renders a conversation whose answer has known thoughts and text. What the template writes after
the prompt is what the model writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Marks = tuple[str, str]  # The markers that open and close thoughts.
Render = Callable[[list[dict[str, Any]], bool], str]  # Takes messages and `add_generation_prompt`.

CHANNELS = "<|channel|>"  # A marker of gpt-oss, whose messages are parsed in another way.
_QUESTION, _THOUGHTS, _ANSWER = "zqquestion", "zqthoughts", "zqanswer"
# Templates read thoughts from one of these keys.
_KEYS = "reasoning_content", "reasoning", "thinking"
_MAX_MARK_CHARS = 80
# Characters before a question that count as its own markers. Instructions before them may name the markers of
# thoughts.
_QUESTION_MARK_CHARS = 40
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]]+\]")


class NotSeen(Exception):
    """Raised when a template renders thoughts, but their markers cannot be detected."""


def seen(render: Render) -> Marks | None:
    """Return the markers of thoughts, or None if the template leaves out an answer's thoughts.

    Raises:
        NotSeen: the markers cannot be detected.
        Exception: any exception of `render`.
    """
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(_KEYS, _THOUGHTS)}
    text = render([question, answer], False)
    if _THOUGHTS not in text:
        return None
    head, _, tail = text.partition(_THOUGHTS)
    closing, has_answer, end = tail.partition(_ANSWER)
    question_mark, _, turn = head.partition(_QUESTION)
    question_mark = question_mark.rstrip().rpartition("\n")[2][-_QUESTION_MARK_CHARS:]
    prompt = render([question], True).partition(_QUESTION)[2]
    closing, opening = closing.strip(), _opening(turn, question_mark, prompt).strip()
    if not has_answer or not closing or not opening:
        raise NotSeen
    if max(len(opening), len(closing)) > _MAX_MARK_CHARS:
        raise NotSeen
    # A marker that also ends an answer or stands around every message would be found in wrong places.
    if opening == closing or any(
        part in question_mark + end for part in pieces((opening, closing))
    ):
        raise NotSeen
    return opening, closing


def _opening(turn: str, question_mark: str, prompt: str) -> str:
    """Return the marker that opens thoughts.

    turn: the text between the question and the thoughts. prompt: the text after the question in a prompt from
    which the model continues.
    """
    turn, prompt = turn.rstrip(), prompt.rstrip()
    if turn.startswith(prompt) and turn != prompt:  # The model writes the marker itself.
        return turn[len(prompt) :]
    if prompt.startswith(turn) and prompt != turn:
        # The prompt ends with the marker, which the template omits in earlier turns.
        return prompt[len(turn) :]
    if prompt == turn:  # The prompt ends with the marker, as do earlier turns.
        return next((end for end in _ends(prompt) if end not in question_mark), "")
    raise NotSeen


def _ends(text: str) -> Iterator[str]:
    """Yield the ends of `text` that begin with a marker, shortest first."""
    for match in reversed(list(_MARKER.finditer(text))):
        yield text[match.start() :]


def pieces(marks: Marks) -> list[str]:
    """Return the markers and the parts of them that may be control tokens."""
    return [*marks, *(part for mark in marks for part in _MARKER.findall(mark))]
