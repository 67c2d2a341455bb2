"""A tuned draft: what `localspec tune` made of a pair's own draft, and what the file beside it says."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec import Struct

NEW_DRAFT = "a new draft"  # `method` of one that was not made from the pair's own
RECORD_FILE = "record.json"
# Begins the name of a folder beside the drafts in which one is being made. Its maker holds a lock of it.
WORK_PREFIX = "training-"


def tuned_folder(root: Path, target: str, base: str) -> Path:
    """Return the folder of the tuned draft of a pair, whether there is one or not.

    root: the folder of all tuned drafts. target, base: paths of the target, and of the pair's own draft, ""
    if it has none.
    """
    return root / hashlib.sha256(f"{target}\n{base}".encode()).hexdigest()[:16]


class Gain(Struct):
    """A figure of the draft that a tuned one was made from, and of the tuned one, on the same texts."""

    before: float
    after: float


class TunedDraft(Struct):
    """The record of a tuned draft.

    - `file`: name of the tuned draft's file, beside the record.
    - `target`, `base`: paths of the pair's target, and of the pair's own draft; "": it has none.
    - `base_size`, `base_changed`: bytes, and time of change in ns, of that draft, or without one of the
      target. The tuned one is not used with another file.
    - `created`: Unix time.
    - `method`: what was trained: "output rows", "all weights" or "a new draft".
    - `conversations`: ids of the conversations whose answers it learned from.
    - `tokens`: answer tokens that it learned from.
    - `tokens_per_pass`: by kind of work, on answers that it did not learn from.
    - `tokens_per_second`: the same answers, decoded with each draft on this machine.
    """

    file: str
    target: str
    base: str
    base_size: int
    base_changed: int
    created: float
    method: str
    conversations: list[str]
    tokens: int
    tokens_per_pass: dict[str, Gain]
    tokens_per_second: dict[str, Gain]
