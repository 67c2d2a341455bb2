"""Prefixes that lost their slot: what target and draft remember of a text, kept in memory.

A slot that is given to another text loses what it has read. Copying that state away costs little beside
reading the text again, so it is kept here up to a limit in bytes, the one used longest ago given up
first. A state goes back only to a request whose own tokens it stands for, so no text comes from another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localspec.engine.cache.borders import MIN_TOKENS
from localspec.engine.cache.slot import Mark, usable
from localspec.engine.llama import State

# How often a text that lost its slot is asked for again; a guess, and a wrong one costs a copy.
REUSE_RATE = 0.25
RESERVE = 512 << 20  # bytes of memory left to everybody else
_FIRST_MS_PER_MIB = 1.0  # until copies have been timed
_LEAVING_MS = 1.0  # of a copy out and one back, besides their bytes
# Beyond so many cells (llama.cpp counts them by 256, and asks for 512) threads share them in a pass of one
# row, and not the heads of attention.
SPLIT_CELLS = 256


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prefix:
    """What a target remembers after reading `tokens`, and a draft after the first `n_draft` of them.

    least: the fewest of them that it can be cut to; all of them where it cannot be cut at all.
    marks: places before that which it can be put back to.
    exact: read by the exact lane; only that one may go on from it. conversation: whose text it is;
    None: nobody's, and nothing of it goes to the disk.
    editors: an editor's, who has jumped elsewhere; it goes before any chat's.
    source: "memory", or "disk" where it comes from a file.
    """

    tokens: Sequence[int]
    target: State
    draft: State | None = None
    n_draft: int = 0
    least: int = 0
    exact: bool = False
    conversation: str | None = None
    source: str = "memory"
    marks: Sequence[Mark] = ()
    editors: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.copied + sum(mark.state.nbytes for mark in self.marks)

    @property
    def copied(self) -> int:
        """Bytes that putting it back copies."""
        return self.target.nbytes + (self.draft.nbytes if self.draft is not None else 0)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] equal, a[:high] not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class CopyCost:
    """What a copied state costs against reading its text again, or leaving it where it is. Milliseconds.

    prefill_ms: of one token of a prompt. cell_ms: of an idle text's cell in one row of a pass, which goes
    over all of them to skip them. split_ms: of one in a pass of a single row, whose threads have as many
    cells each: beside idle ones those of the text that is written lie with one thread, and it computes
    while the others skip.
    """

    prefill_ms: Callable[[], float]
    ms_per_mib: float = _FIRST_MS_PER_MIB
    cell_ms: float = 0.0
    split_ms: float = 0.0

    def copied(self, size: int, spent_ms: float) -> None:
        """Learn from a copy of so many bytes."""
        if size >= 1 << 20:  # less says more about the call than about the copy
            self.ms_per_mib += 0.3 * (spent_ms / (size / (1 << 20)) - self.ms_per_mib)

    def pays(self, tokens: int, size: int) -> bool:
        """Is putting a state of `size` bytes back cheaper than reading so many tokens?"""
        return tokens >= MIN_TOKENS and tokens * self.prefill_ms() > self._copy_ms(size)

    def worth_keeping(self, tokens: int, size: int) -> bool:
        """Is a copy now worth the chance that so many tokens need not be read again?"""
        saved = tokens * self.prefill_ms() * REUSE_RATE
        return tokens >= MIN_TOKENS and saved > self._copy_ms(size)

    def idle_ms(self, cells: int, own: int, rows: int, split: int) -> float:
        """What so many idle cells cost a text of `own` cells that has so many rows of passes, of which
        `split` are alone in theirs, whose threads share those cells with these.
        """
        return cells * rows * self.cell_ms + min(cells, own) * split * self.split_ms

    def leaving_pays(self, spent_ms: float, size: Callable[[], int]) -> bool:
        """Have idle cells cost, or will they, what a copy out and one back does?

        Whether the text is asked for again nobody knows. So it stays until then, and costs at most twice
        what the better choice would have (Karlin et al. 1988, "Competitive snoopy caching").
        size: bytes of the copy.
        """
        spent = spent_ms - _LEAVING_MS
        return spent > 0 and spent > 2 * self._copy_ms(size())

    def _copy_ms(self, size: int) -> float:
        return size / (1 << 20) * self.ms_per_mib


def free_memory() -> int | None:
    """Bytes a process could take now; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _nobody(_: Prefix) -> None:
    pass


@dataclass(slots=True)
class Prefixes:
    """The store. `limit` in bytes; `dropped` hears of each prefix that is given up."""

    limit: int
    copy_cost: CopyCost
    dropped: Callable[[Prefix], None] = _nobody
    free: Callable[[], int | None] = free_memory
    _kept: list[Prefix] = field(default_factory=list)  # used longest ago first

    def __iter__(self) -> Iterator[Prefix]:
        """The one used last first."""
        return reversed(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(prefix.size for prefix in self._kept)

    def put(self, prefix: Prefix) -> bool:
        """Keep it as the one used last. False: it is larger than the limit or the free memory allows."""
        free = self.free()
        if prefix.size > self.limit or (free is not None and prefix.size + RESERVE > free):
            self.dropped(prefix)
            return False
        self._kept.append(prefix)
        while self.size > self.limit:
            first = next((each for each in self._kept if each.editors), self._kept[0])
            self._kept = [each for each in self._kept if each is not first]
            self.dropped(first)
        return True

    def spare(self, most: int) -> int:
        """Have room for `most` bytes, or for what is kept; how many that is."""
        self.limit = max(self.size, most)
        return self.limit

    def has_room(self, size: int, editors: bool) -> bool:
        """Can so many bytes be kept without any chat's being given up for an editor's?"""
        chats = sum(each.size for each in self._kept if not each.editors)
        return not editors or size + chats <= self.limit

    def supersede(self, prefix: Prefix) -> None:
        """Drop what holds nothing that `prefix` could not be cut to."""
        self._kept = [
            each
            for each in self._kept
            if each.exact != prefix.exact
            or each.least < prefix.least
            or common_prefix(each.tokens, prefix.tokens) < len(each.tokens)
        ]

    def covers(self, tokens: Sequence[int], exact: bool) -> bool:
        """Is all of `tokens` kept already? Then it counts as used now."""
        found, length = self.find(tokens, exact=exact)
        if found is None or length < len(tokens):
            return False
        self._used(found)
        return True

    def find(
        self, tokens: Sequence[int], *, exact: bool, align: int = 1, also: Sequence[Prefix] = ()
    ) -> tuple[Prefix | None, int]:
        """The prefix that can be cut to most of `tokens`, and how many; `also`: those kept elsewhere.

        align: how many is a multiple of it.
        """
        best: Prefix | None = None
        longest = 0
        for each in [*self, *also]:
            if each.exact == exact:
                shared = common_prefix(each.tokens, tokens) // align * align
                length = usable(shared, each.least, [mark.tokens for mark in each.marks])
                if length > longest:
                    best, longest = each, length
        return best, longest

    def taken(self, prefix: Prefix, length: int) -> None:
        """A slot holds its first `length` tokens now; what is beyond that is kept if it is much."""
        if len(prefix.tokens) - length >= MIN_TOKENS:
            self._used(prefix)
        else:
            self._kept = [each for each in self._kept if each is not prefix]

    def clear(self) -> None:
        self._kept = []

    def forget(self, conversation: str | None) -> None:
        """Drop what belongs to a conversation, with None to any, and tell nobody."""
        self._kept = [
            each
            for each in self._kept
            if each.conversation is None
            or (conversation is not None and each.conversation != conversation)
        ]

    def _used(self, prefix: Prefix) -> None:
        others = [each for each in self._kept if each is not prefix]
        if len(others) < len(self._kept):  # else it is one of `also`
            self._kept = [*others, prefix]
