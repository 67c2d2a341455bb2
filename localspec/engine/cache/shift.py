"""Text that is found again at another place: its part of the cache is moved there, not read again.

A line that is edited above the cursor moves all that follows, and a piece of another file that is
replaced moves the others. llama.cpp can turn a cached key to another position (K-shift), but what the
text before it had added stays as it was: so what is moved, and all that is read after it, is near to
what a fresh reading would give and not the same. Nobody gets that who has not asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context

MOST_MOVES = 64  # of one text, until it is read anew: what moves leave out adds up
# Tokens of an editor's prompt that are always read, at its end: what stands after the cursor and the
# line before it. Moved along with each key, they go on to say what they said before the key.
READ_ANEW = 288


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` tokens at position `old` of a slot's text, and at `new` of a prompt."""

    old: int
    new: int
    length: int

    @property
    def end(self) -> int:
        return self.new + self.length


def find_chunks(
    cached: Sequence[int], prompt: Sequence[int], start: int, least: int, anew: int = 1
) -> list[Chunk]:
    """What of `prompt` stands in `cached` too, both after `start`, in the same order.

    Each chunk has `least` tokens or more, and the last `anew` tokens of the prompt are in none.
    """
    end = len(prompt) - anew
    old, new = (np.array(text, np.int32).tobytes() for text in (cached, prompt))
    places: dict[bytes, list[int]] = {}
    for at in range(start, len(cached) - least + 1):
        places.setdefault(old[4 * at : 4 * (at + least)], []).append(at)
    found: list[Chunk] = []
    here, there = start, start
    while here + least <= end:
        among = places.get(new[4 * here : 4 * (here + least)], ())
        at = next((place for place in among if place >= there), -1)
        if at < 0:
            here += 1
            continue
        length = least
        while at + length < len(cached) and here + length < end:
            if cached[at + length] != prompt[here + length]:
                break
            length += 1
        found.append(Chunk(at, here, length))
        here, there = here + length, at + length
    return found


class Parking:
    """One more sequence of the target's memory: chunks wait there while the text before them is read.

    llama.cpp takes the tokens of a sequence in order only. One slot at a time uses it.
    """

    def __init__(self, context: Context, sequence: int | None) -> None:
        """sequence: None where there is none to spare, or where nothing can be moved."""
        self._context = context
        plain = sequence is not None and context.model.cuttable and not context.model.n_swa
        self._sequence = sequence if plain and context.can_shift else None
        self._waiting: list[Chunk] = []
        self._owner: Slot | None = None

    @property
    def free(self) -> bool:
        return self._sequence is not None and self._owner is None

    def park(self, slot: Slot, chunks: list[Chunk]) -> None:
        """Take them to where they will be; the slot is to be cut before the first of them."""
        assert self._sequence is not None
        for chunk in chunks:
            end = chunk.old + chunk.length
            self._context.copy(slot.id, self._sequence, end, start=chunk.old)
        # In an order in which none is moved onto one that has not been moved yet.
        right = [chunk for chunk in reversed(chunks) if chunk.new > chunk.old]
        left = [chunk for chunk in chunks if chunk.new < chunk.old]
        for chunk in (*right, *left):
            end = chunk.old + chunk.length
            self._context.shift(self._sequence, chunk.old, end, chunk.new - chunk.old)
        self._owner, self._waiting = slot, list(chunks)

    def next(self, slot: Slot) -> int | None:
        """The position at which the slot's next chunk begins."""
        return self._waiting[0].new if self._owner is slot else None

    def attach(self, slot: Slot) -> int:
        """Give the slot the chunks that begin where it has read to; returns how far it has read then."""
        n_past = slot.n_past
        while self._sequence is not None and self.next(slot) == n_past:
            chunk = self._waiting.pop(0)
            self._context.copy(self._sequence, slot.id, chunk.end, start=chunk.new)
            self._context.remove(self._sequence, chunk.new, chunk.end)
            n_past = chunk.end
            if not self._waiting:
                self._owner = None
        return n_past

    def drop(self, slot: Slot) -> None:
        """What still waits for the slot is of no use any more."""
        if self._owner is slot and self._sequence is not None:
            self._context.remove(self._sequence, 0)
            self._owner, self._waiting = None, []
