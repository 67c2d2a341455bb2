"""Zed's second model, Zeta 2, on Seed-Coder: the suffix first, and the window as one side of a conflict.

Zeta 2.1 has another form, with numbered regions, which is not served.
"""

from __future__ import annotations

from localspec.extras.next_edit.form import (
    Form,
    Prompt,
    around,
    end_line,
    few_files,
    last_edits,
)
from localspec.extras.next_edit.wire import NextEditRequest

_SUFFIX, _PREFIX, _MIDDLE, _FILE = (
    "<[fim-suffix]>",
    "<[fim-prefix]>",
    "<[fim-middle]>",
    "<filename>",
)
_OPENING, _SEPARATOR, _END = "<<<<<<< CURRENT\n", "=======\n", ">>>>>>> UPDATED\n"
_CURSOR, _NO_EDITS = "<|user_cursor|>", "NO_EDITS"
_CONTEXT_CHARS = 3000


class Zeta2(Form):
    name = "zeta2"
    models = r"(?<![a-z])zeta[-_ ]?2(?!\.\d|\d)"
    tokens = (_SUFFIX, _PREFIX, _MIDDLE)
    sentinels = (*(_END[:-1], _OPENING[:-1], _SUFFIX, _PREFIX, _MIDDLE, _FILE),)
    marks = (_CURSOR,)
    end = _END

    def render(self, asked: NextEditRequest) -> Prompt:
        above, below = around(asked, _CONTEXT_CHARS)
        files = "".join(f"{_FILE}{path}\n{text}" for path, text in few_files(asked))
        edits = "".join(
            f"--- a/{path}\n+++ b/{path}\n{diff}" for path, diff, *_ in last_edits(asked)
        )
        history = f"{_FILE}edit_history\n{edits}\n" if edits else ""
        conflict = f"{_OPENING}{asked.before}{_CURSOR}{asked.tail}{_SEPARATOR}"
        prefix = f"{files}\n" * bool(files) + history + f"{_FILE}{asked.path}\n{above}{conflict}"
        return Prompt(f"{_SUFFIX}{end_line(below)}{_PREFIX}{prefix}{_MIDDLE}", stops=[_END[:-1]])

    def parse(self, answer: str) -> str:
        return "" if answer.startswith(_NO_EDITS) else super().parse(answer)
