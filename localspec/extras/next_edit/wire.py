"""What an editor sends for the next edit of a file, and what it gets.

A window is whole lines around the cursor. Lines are counted from 1 in files and from 0 in a window.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct, field

from localspec.protocol.answers import Extra, Usage
from localspec.protocol.frames import Timings
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.requests import Count, LocalspecOptions

FormName = Literal["zeta1", "zeta2", "sweep", "chat", "text"]
_Path = Annotated[str, Meta(max_length=4096)]
_Text = Annotated[str, Meta(max_length=1 << 20)]
_Line = Annotated[int, Meta(ge=1, le=1 << 31)]
_NUMBER = re.compile(r"(?<=[-+])\d+")


class RecentEdit(Request):
    """A change that was made before: a unified diff, or the lines before and after from `line` on."""

    path: _Path
    diff: OrDefault[_Text] = ""
    old: OrDefault[_Text] = ""
    new: OrDefault[_Text] = ""
    line: OrDefault[_Line] = 1

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        rows = [row for row in self.diff.split("\n") if row[:3] not in ("---", "+++")]
        if self.diff:
            self.old, self.new = (
                "".join(f"{row[1:]}\n" for row in rows if row[:1] in kinds)
                for kinds in ((" ", "-"), (" ", "+"))
            )
        else:
            before, after = self.old.splitlines(), self.new.splitlines()
            rows = [*difflib.unified_diff(before, after, lineterm="")][2:]
            # Its hunks are numbered from 1.
            rows = [_NUMBER.sub(self._move, row) if row[0] == "@" else row for row in rows]
        self.diff = "".join(f"{row}\n" for row in rows if row)

    def _move(self, number: re.Match[str]) -> str:
        return str(int(number[0]) + self.line - 1)


class NextEditDiagnostic(Struct):
    line: _Line
    message: _Text
    severity: str = "error"


class NextEditFile(Struct):
    path: _Path
    text: _Text


class NextEditRequest(Request):
    """A file around the cursor, of which the window is to be written as it should be next.

    - `above`, `below`: lines around the window. `before`, `after`: the window, cut at the cursor.
    - `edits`: what was changed last, the oldest first. `files`: pieces of other files.
    - `first_line`: the window's, in the file.
    - `form`: of the prompt; without it, the one that the model was trained on.
    - `max_ms`: after this time nothing is proposed.
    - `user`: who asks. A newer request for the same `path` ends an older one.
    """

    refusal_table: ClassVar[str] = "text"

    before: str
    after: str
    path: OrDefault[_Path] = "untitled"
    above: OrDefault[_Text] = ""
    below: OrDefault[_Text] = ""
    model: OrDefault[str] = ""
    language: OrDefault[Annotated[str, Meta(max_length=64)]] = ""
    edits: OrDefault[Annotated[list[RecentEdit], Meta(max_length=32)]] = field(default_factory=list)
    diagnostics: OrDefault[Annotated[list[NextEditDiagnostic], Meta(max_length=256)]] = field(
        default_factory=list
    )
    files: OrDefault[Annotated[list[NextEditFile], Meta(max_length=64)]] = field(
        default_factory=list
    )
    first_line: OrDefault[_Line] = 1
    form: FormName | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    max_ms: Count | None = None
    user: OrDefault[str] = ""
    localspec: LocalspecOptions | None = None

    @property
    def window(self) -> str:
        """The lines to rewrite, each with its end."""
        text = self.before + self.after
        return text if text.endswith("\n") else f"{text}\n"

    @property
    def tail(self) -> str:
        """The window behind the cursor, with the end of the last line."""
        return self.window[len(self.before) :]


class ChangedLines(Struct):
    """Lines `start` to `end` (exclusive) of the window, and what they become."""

    start: int
    end: int
    old: list[str]
    new: list[str]


class NextEdit(Struct):
    """The next edit. "unchanged": the rest of the window was taken as it was; "length": it was cut."""

    model: str
    form: FormName
    window: str
    edits: list[ChangedLines]
    finish_reason: Literal["stop", "unchanged", "length"]
    usage: Usage
    timings: Timings
    localspec: Extra
    object: Literal["next_edit"] = "next_edit"


REQUESTS = (NextEditRequest,)
ANSWERS = (NextEdit,)
