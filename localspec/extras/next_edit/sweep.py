"""Sweep's models (sweep-next-edit), on Qwen2.5-Coder: the window before the last change, now, and next."""

from __future__ import annotations

from localspec.extras.next_edit.form import Form, Prompt, end_line, few_files, last_edits
from localspec.extras.next_edit.wire import NextEditRequest

_FILE = "<|file_sep|>"
_MAX_CHANGES = 3


class Sweep(Form):
    name = "sweep"
    models = r"sweep[-_ ]?next[-_ ]?edit"
    tokens = (_FILE,)
    sentinels = (_FILE, "<|endoftext|>", "</s>")
    end = _FILE

    def render(self, asked: NextEditRequest) -> Prompt:
        window, original = asked.window, asked.window
        edits = last_edits(asked)
        for path, _, old, new in reversed(edits):
            if path == asked.path:  # the window as it was before the last change in it
                original = window.replace(new, old) if window.count(new) == 1 else window
                break
        blocks = few_files(asked)
        for path, _, old, new in edits[-_MAX_CHANGES:]:
            change = f"original:\n{end_line(old)}updated:\n{end_line(new)}"
            blocks.append((f"{path}.diff", change))
        blocks += [(f"original/{asked.path}", original), (f"current/{asked.path}", window)]
        text = "".join(f"{_FILE}{path}\n{block}" for path, block in blocks)
        return Prompt(f"{text}{_FILE}updated/{asked.path}\n", stops=self.sentinels)
