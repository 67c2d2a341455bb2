"""What the forms of prompts for next edits share. Each other form has a file of its own.

A form is what a model was trained on, which its name says. Its markers frame the window, and none of them is
ever part of an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from localspec.extras.next_edit.wire import FormName, NextEditRequest

_MIN_CUT_MARKER = 2  # characters of a marker's beginning at an answer's end that are no text
MAX_EDITS = 6
MAX_EDIT_CHARS = MAX_FILE_CHARS = 6000


class Prompt(NamedTuple):
    """A prompt, the beginning of the answer that belongs to it, and what ends the answer."""

    text: str
    opening: str = ""
    stops: Sequence[str] = ()


class Form:
    """A form of prompts. `marks` show the cursor; `sentinels` are all other markers.

    models: matches the names of its models. tokens: sentinels that their vocabularies have as one token.
    end: what a model writes behind the window.
    """

    name: FormName
    models: ClassVar[str] = "(?!)"
    tokens: ClassVar[Sequence[str]] = ()
    sentinels: ClassVar[Sequence[str]] = ()
    marks: ClassVar[Sequence[str]] = ()
    end: ClassVar[str] = ""
    is_chat: bool = False

    def render(self, asked: NextEditRequest) -> Prompt:
        """Return the prompt for a request, none of whose texts has a marker of this form."""
        raise NotImplementedError

    def parse(self, answer: str) -> str:
        """Return the lines that an answer consists of, without any marker; "" for no change."""
        shorter = None
        while answer != shorter:  # without a marker the text around it may be another one
            shorter = answer
            for mark in self.marks:
                answer = answer.replace(mark, "")
            for sentinel in self.sentinels:
                answer = answer.partition(sentinel)[0]
        for marker in (*self.marks, *self.sentinels):
            for size in range(len(marker) - 1, _MIN_CUT_MARKER - 1, -1):
                answer = answer.removesuffix(marker[:size])
        return answer if answer.endswith("\n") or not answer else f"{answer}\n"

    def find_marker(self, asked: NextEditRequest) -> str | None:
        """Return a marker of this form that a text of the request has."""
        texts = [asked.above, asked.window, asked.below, asked.path]
        texts += [part for edit in asked.edits for part in (edit.path, edit.old, edit.new)]
        texts += [part for file in asked.files for part in (file.path, file.text)]
        markers = (*self.marks, *self.sentinels)
        return next((marker for marker in markers if any(marker in text for text in texts)), None)


def last_edits(asked: NextEditRequest) -> list[tuple[str, str, str, str]]:
    """Return path, diff, old and new text of the last edits, the oldest first."""
    chosen = list[tuple[str, str, str, str]]()
    size = 0
    for edit in asked.edits[: -MAX_EDITS - 1 : -1]:
        size += len(edit.diff)
        if size > MAX_EDIT_CHARS:
            break
        if edit.diff:
            chosen.insert(0, (edit.path, edit.diff, edit.old, edit.new))
    return chosen


def few_files(asked: NextEditRequest) -> list[tuple[str, str]]:
    """Return path and text of the pieces of other files that there is room for."""
    chosen, size = list[tuple[str, str]](), 0
    for file in asked.files:
        size += len(file.text)
        if size <= MAX_FILE_CHARS:
            chosen.append((file.path, end_line(file.text)))
    return chosen


def around(asked: NextEditRequest, max_chars: int) -> tuple[str, str]:
    """Return whole lines above and below the window, of so many characters each at most."""
    above, below = asked.above[-max_chars:], asked.below[:max_chars]
    if len(asked.above) > max_chars:
        above = above.partition("\n")[2]
    if len(asked.below) > max_chars:
        below = below[: below.rfind("\n") + 1]
    return above, below


def end_line(text: str) -> str:
    """Return a text whose last line has an end."""
    return text if text.endswith("\n") else f"{text}\n"
