"""The store of prefixes that lost their slot: copies in memory of the states of target and draft.

A slot that is given to another text loses what it has read. Copying that state costs little beside reading
the text again, so copies are kept up to a limit in bytes. The first to go is the one that saves least reading
per byte, by how long ago its text was requested and how much of it no other copy holds. A state is restored
only for a request with the same tokens, so no text leaks from one request to another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from localspec.engine.cache.slot import MIN_TOKENS, Mark, count_usable
from localspec.engine.llama import State

# How often a text that lost its slot is requested again. A guess; a wrong one costs a copy.
REUSE_RATE = 0.25
# Requests after which it is half as likely that a text is requested again. With memory for an eighth to half
# of the texts of recorded agents, 2 has 4 % less read than always dropping the oldest.
HALF_LIFE_REQUESTS = 2.0
RESERVED_BYTES = 512 << 20  # memory that is left free for other processes
_INITIAL_MS_PER_MIB = 1.0  # assumed until copies have been timed
_COPY_OVERHEAD_MS = 1.0  # cost of a copy out and one back, apart from their bytes
# In a pass of one row over more cells than this (llama.cpp counts them in steps of 256, and the limit is
# 512), the threads share the cells instead of the heads of attention.
SPLIT_CELLS = 256


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prefix:
    """The state of a target after reading `tokens`, and of a draft after the first `n_draft` of them.

    least: the fewest tokens that it can be cut to; all of them if it cannot be cut.
    marks: places before `least` that it can go back to.
    exact: it was read by the exact lane, which alone may use it.
    conversation: the conversation that the text belongs to; None: none, and it is never saved to disk.
    editors: it is the text of an editor that has jumped elsewhere; it is dropped before any chat's.
    used_at: the number of the last request that used it, as the store counts them.
    source: "memory", or "disk" if it was read from a file.
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
    used_at: int = 0

    def usable(self, tokens: Sequence[int], align: int = 1) -> int:
        """Return to how many of these tokens it can be cut, a multiple of `align` unless at a mark."""
        shared = common_prefix(self.tokens, tokens) // align * align
        return count_usable(shared, self.least, [mark.tokens for mark in self.marks])

    @property
    def size(self) -> int:
        return self.copied + sum(mark.state.nbytes for mark in self.marks)

    @property
    def copied(self) -> int:
        """The number of bytes that restoring it copies."""
        return self.target.nbytes + (self.draft.nbytes if self.draft is not None else 0)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return with how many equal elements two sequences begin, in a time that grows with that number."""
    end, low, step = min(len(a), len(b)), 0, 32
    while (high := min(low + step, end)) > low and a[low:high] == b[low:high]:
        low, step = high, 2 * step
    while high - low > 1:  # a[:low] is equal, a[:high] is not
        mid = (low + high) // 2
        low, high = (mid, high) if a[low:mid] == b[low:mid] else (low, mid)
    return low


@dataclass(slots=True)
class CopyCost:
    """The cost of copying a state, compared with reading its text again or leaving it in its slot.

    All costs are in milliseconds. prefill_ms: of one token of a prompt. cell_ms: of one cell of an idle
    text per row of a pass, because the pass goes over all cells to skip them. split_ms: extra cost of such
    a cell in a pass of a single row. There each thread gets as many cells as the others. The cells of the
    running text then lie with one thread, which computes while the threads with idle cells skip.
    """

    prefill_ms: Callable[[], float]
    ms_per_mib: float = _INITIAL_MS_PER_MIB
    cell_ms: float = 0.0
    split_ms: float = 0.0

    def observe_copy(self, size: int, spent_ms: float) -> None:
        """Learn from the time that a copy of `size` bytes took."""
        if size >= 1 << 20:  # the time of a smaller copy is mostly that of the call
            # A copy that waited for other programs must not make all copies look too dear to try again.
            ms_per_mib = min(spent_ms / (size / (1 << 20)), 2 * self.ms_per_mib)
            self.ms_per_mib += 0.3 * (ms_per_mib - self.ms_per_mib)

    def restoring_pays(self, tokens: int, size: int) -> bool:
        """Whether restoring a state of `size` bytes is cheaper than reading `tokens` tokens."""
        return tokens >= MIN_TOKENS and tokens * self.prefill_ms() > self._copy_ms(size)

    def worth_keeping(self, tokens: int, size: int) -> bool:
        """Whether a copy now is worth the chance that `tokens` tokens need not be read again."""
        saved = tokens * self.prefill_ms() * REUSE_RATE
        return tokens >= MIN_TOKENS and saved > self._copy_ms(size)

    def idle_ms(self, cells: int, own_cells: int, rows: int, n_split: int) -> float:
        """Return what `cells` idle cells cost a text of `own_cells` cells over `rows` rows of passes.

        n_split: rows alone in their pass, where threads share the idle cells with the text's own.
        """
        return cells * rows * self.cell_ms + min(cells, own_cells) * n_split * self.split_ms

    def leaving_pays(self, spent_ms: float, size: Callable[[], int]) -> bool:
        """Whether idle cells have cost as much as a copy of `size` bytes out and one back.

        Nobody knows whether the text is requested again. So it stays until then, which costs at most twice
        as much as the better choice (Karlin et al. 1988, "Competitive snoopy caching").
        """
        excess_ms = spent_ms - _COPY_OVERHEAD_MS
        return excess_ms > 0 and excess_ms > 2 * self._copy_ms(size())

    def _copy_ms(self, size: int) -> float:
        return size / (1 << 20) * self.ms_per_mib


def free_memory() -> int | None:
    """Return the bytes that a process could allocate now; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def _ignore(_: Prefix) -> None:
    pass


@dataclass(slots=True)
class PrefixStore:
    """The store. `limit` is in bytes; `dropped` is called with each prefix that is evicted."""

    limit: int
    copy_cost: CopyCost
    dropped: Callable[[Prefix], None] = _ignore
    free: Callable[[], int | None] = free_memory
    now: int = 0  # number of the last request
    _entries: list[Prefix] = field(default_factory=list)  # least recently used first

    def __iter__(self) -> Iterator[Prefix]:
        """Iterate over the prefixes, most recently used first."""
        return reversed(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        return sum(prefix.size for prefix in self._entries)

    def put(self, prefix: Prefix) -> bool:
        """Add a prefix as the most recently used.

        Returns False if it is larger than the limit or the free memory allows, or saves less than the others.
        """
        free = self.free()
        if prefix.size > self.limit or (free is not None and prefix.size + RESERVED_BYTES > free):
            self.dropped(prefix)
            return False
        self._entries.append(prefix)
        while self.size > self.limit:
            evicted = min(self._entries, key=self._expected_saving)
            self._entries = [entry for entry in self._entries if entry is not evicted]
            self.dropped(evicted)
        return any(entry is prefix for entry in self._entries)

    def _expected_saving(self, prefix: Prefix) -> tuple[bool, float]:
        """Return how many tokens a byte of it is expected to save. An editor's counts less than any."""
        others = [other for other in self._entries if other is not prefix]
        lengths = [o.usable(prefix.tokens) for o in others if o.exact == prefix.exact]
        covered = max(lengths, default=0)
        probability = 0.5 ** ((self.now - prefix.used_at) / HALF_LIFE_REQUESTS)
        # Of two equal copies none is worthless, or both could be dropped.
        n_saved = max(len(prefix.tokens) - covered, 1)
        return not prefix.editors, probability * n_saved / max(prefix.size, 1)

    def set_limit(self, limit: int) -> int:
        """Set the limit to `limit` bytes, or to the size of what is held if that is more. Return it."""
        self.limit = max(self.size, limit)
        return self.limit

    def has_room(self, size: int, editors: bool) -> bool:
        """Whether `size` bytes can be added without dropping a chat's prefix for an editor's."""
        chat_bytes = sum(entry.size for entry in self._entries if not entry.editors)
        return not editors or size + chat_bytes <= self.limit

    def supersede(self, prefix: Prefix) -> None:
        """Drop the prefixes that `prefix` can replace, because it can be cut to them."""
        self._entries = [
            entry
            for entry in self._entries
            if entry.exact != prefix.exact
            or entry.least < prefix.least
            or common_prefix(entry.tokens, prefix.tokens) < len(entry.tokens)
        ]

    def touch_if_covered(self, tokens: Sequence[int], exact: bool) -> bool:
        """Whether all of `tokens` is held already. If so, that prefix counts as used now."""
        prefix, length = self.find(tokens, exact=exact)
        if prefix is None or length < len(tokens):
            return False
        self._mark_used(prefix)
        return True

    def find(
        self, tokens: Sequence[int], *, exact: bool, align: int = 1, extra: Sequence[Prefix] = ()
    ) -> tuple[Prefix | None, int]:
        """Return the prefix that can be cut to most of `tokens`, and to how many.

        align: the number is a multiple of it. extra: prefixes outside the store to consider.
        """
        best: tuple[Prefix | None, int] = None, 0
        for prefix in [*self, *extra]:
            if prefix.exact == exact and (length := prefix.usable(tokens, align)) > best[1]:
                best = prefix, length
        return best

    def note_restored(self, prefix: Prefix, length: int) -> None:
        """Note that a slot holds the first `length` tokens. The prefix stays if it is much longer."""
        if len(prefix.tokens) - length >= MIN_TOKENS:
            self._mark_used(prefix)
        else:
            self._entries = [entry for entry in self._entries if entry is not prefix]

    def clear(self) -> None:
        self._entries = []

    def forget(self, conversation: str | None) -> None:
        """Drop the prefixes of a conversation, or of all if it is None, without calling `dropped`."""
        self._entries = [
            entry
            for entry in self._entries
            if entry.conversation is None
            or (conversation is not None and entry.conversation != conversation)
        ]

    def _mark_used(self, prefix: Prefix) -> None:
        remaining = [entry for entry in self._entries if entry is not prefix]
        if len(remaining) < len(self._entries):  # else it is one of `extra`
            self._entries = [*remaining, replace(prefix, used_at=self.now)]
