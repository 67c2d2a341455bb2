"""The form for any other model: a question to one that chats, or a text to go on with.

The window comes last, so that as much of the prompt as possible stays the same while somebody types.
"""

from __future__ import annotations

from localspec.extras.next_edit.form import Form, Prompt, around, few_files, last_edits
from localspec.extras.next_edit.wire import NextEditRequest

_CONTEXT_CHARS = 3000
_MAX_PROBLEMS = 8
_REQUESTS = {
    "chat": "Write these {0} lines again with the next edit, which continues the changes, and nothing else. "
    "Lines that need no change stay as they are.",
    "text": "This is how these {0} lines are after the next edit, which continues the changes:\n\n",
}


class Plain(Form):
    end = "```"

    def __init__(self, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.name = "chat" if is_chat else "text"

    def render(self, asked: NextEditRequest) -> Prompt:
        above, below = around(asked, _CONTEXT_CHARS)
        kind, number = asked.language, asked.first_line + asked.before.count("\n")
        problems = sorted(asked.diagnostics, key=lambda each: abs(each.line - number))
        rows = [f"line {each.line}: {each.severity}: {each.message}\n" for each in problems]
        parts = [
            *((f"This is a part of {path}", text, "") for path, text in few_files(asked)),
            (f"This is above the lines of {asked.path}", above, kind),
            ("This is below them", below, kind),
            *(
                (f"This was changed in {path}", diff, "diff")
                for path, diff, *_ in last_edits(asked)
            ),
            ("These problems were found", "".join(rows[:_MAX_PROBLEMS]), ""),
            (f"These are the lines, with the cursor in line {number}", asked.window, kind),
        ]
        fence = "```"
        while any(fence in text for _, text, _ in parts):
            fence += "`"
        blocks = [
            f"{what}:\n\n{fence}{kind}\n{text}{fence}\n\n" for what, text, kind in parts if text
        ]
        request = _REQUESTS[self.name].format(asked.window.count("\n"))
        return Prompt("".join(blocks) + request, f"{fence}{kind}\n", [fence])
