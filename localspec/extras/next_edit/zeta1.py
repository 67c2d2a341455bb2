"""Zed's first model, Zeta: an instruction, diffs, and a region of the file between markers."""

from __future__ import annotations

from localspec.extras.next_edit.form import Form, Prompt, around, last_edits
from localspec.extras.next_edit.wire import NextEditRequest

_CURSOR, _FILE = "<|user_cursor_is_here|>", "<|start_of_file|>"
_START, _END = "<|editable_region_start|>", "<|editable_region_end|>"
_INSTRUCTION = (
    "### Instruction:\nYou are a code completion assistant and your task is to analyze user edits and then "
    "rewrite an excerpt that the user provides, suggesting the appropriate edits within the excerpt, taking "
    "into account the cursor location.\n\n### User Edits:\n\n"
)
_CONTEXT_CHARS = 600  # it was trained with 150 tokens on both sides


class Zeta1(Form):
    name = "zeta1"
    models = r"(?<![a-z])zeta(?![a-z])(?![-_ ]?2)"
    sentinels = (_END, _START, _FILE)
    marks = (_CURSOR,)
    end = _END

    def render(self, asked: NextEditRequest) -> Prompt:
        above, below = around(asked, _CONTEXT_CHARS)
        edits = "\n\n".join(
            f"User edited {path}:\n```diff\n{diff}\n```" for path, diff, *_ in last_edits(asked)
        )
        beginning = "" if asked.first_line - 1 > above.count("\n") else f"{_FILE}\n"
        region = f"{_START}\n{asked.before}{_CURSOR}{asked.tail}{_END}\n"
        excerpt = f"```{asked.path}\n{beginning}{above}{region}{below}```"
        text = f"{_INSTRUCTION}{edits}\n\n### User Excerpt:\n\n{excerpt}\n\n### Response:\n"
        return Prompt(text, f"{_START}\n", [_END])
