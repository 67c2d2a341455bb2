"""One slot: a sequence of llama.cpp's, and what each model has read of its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from localspec.engine.llama import State


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """What a target keeps besides its cache of attention, after so many tokens of a text."""

    tokens: int
    state: State


def usable(shared: int, least: int, marks: Iterable[Mark]) -> int:
    """How many of `shared` tokens can be gone on from: all, back to the last mark, or none."""
    if shared >= least:
        return shared
    return max((mark.tokens for mark in marks if mark.tokens <= shared), default=0)


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence id in the target's memory, and one in the draft's.

    tokens[:n_past] are in the target's KV, tokens[:n_past_draft] in the draft's. During a round the
    memories hold more (drafts not verified yet); after it they are rolled back to these counts.
    `Slots` alone writes both counts.
    """

    id: int
    draft_id: int
    tokens: list[int] = field(default_factory=list)
    n_past: int = 0
    n_past_draft: int = 0
    marks: list[Mark] = field(default_factory=list)  # places to go back to, where it cannot be cut
    turns: list[int] = field(default_factory=list)  # where answers began and ended
    draft_mark: tuple[int, State] | None = None  # a draft's recurrent state after so many tokens
    last_pass: int = 0  # where the target's last pass over this slot began
    busy: bool = False
    last_used: int = 0
    conversation: str | None = None  # whose text it is, where that is to be saved
    source: Literal["", "slot", "memory", "disk"] = ""  # of what the present request reused

    @property
    def cached(self) -> list[int]:
        return self.tokens[: self.n_past]

    def begin_pass(self) -> int:
        """A pass of the target over this slot begins; returns the position of its first row."""
        self.last_pass = self.n_past
        return self.n_past

    @property
    def unread(self) -> list[int]:
        """What the target has not read yet."""
        return self.tokens[self.n_past :]

    @property
    def last_mark(self) -> int:
        """After how many tokens it is; 0: there is none."""
        return self.marks[-1].tokens if self.marks else 0

    def draft_has_read(self, count: int) -> None:
        """The draft's memory holds so many tokens now, drafts of its own among them."""
        self.n_past_draft = count
