"""Moving cached text that is found again at another place, instead of reading it again.

A line that is edited above the cursor moves all that follows, and a piece of another file that is replaced
moves the others. llama.cpp can turn a cached key to another position (K-shift), but the influence of the
text that stood before it stays. So what is moved, and all that is read after it, only comes near to what a
fresh reading would give. It is therefore done only for requests that ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context

# How often a text may be moved before it is read again, because the errors add up.
MAX_MOVES = 64
# Tokens at the end of an editor's prompt that are always read: the text after the cursor and the line before
# it. If they were moved with each key, they would still say what they said before the key.
REREAD_TOKENS = 288


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` tokens at position `old` of a slot's text, and at position `new` of a prompt."""

    old: int
    new: int
    length: int

    @property
    def end(self) -> int:
        return self.new + self.length


def find_chunks(
    cached: Sequence[int], prompt: Sequence[int], start: int, min_length: int, n_reread: int = 1
) -> list[Chunk]:
    """Return the parts of `prompt` that `cached` contains too, both after `start` and in the same order.

    Each chunk has at least `min_length` tokens, and none contains one of the last `n_reread` of the prompt.
    """
    end = len(prompt) - n_reread
    old, new = (np.array(text, np.int32).tobytes() for text in (cached, prompt))
    positions: dict[bytes, list[int]] = {}
    for position in range(start, len(cached) - min_length + 1):
        positions.setdefault(old[4 * position : 4 * (position + min_length)], []).append(position)
    chunks: list[Chunk] = []
    prompt_position, cache_position = start, start
    while prompt_position + min_length <= end:
        matches = positions.get(new[4 * prompt_position : 4 * (prompt_position + min_length)], ())
        position = next((match for match in matches if match >= cache_position), -1)
        if position < 0:
            prompt_position += 1
            continue
        length = min_length
        while position + length < len(cached) and prompt_position + length < end:
            if cached[position + length] != prompt[prompt_position + length]:
                break
            length += 1
        chunks.append(Chunk(position, prompt_position, length))
        prompt_position, cache_position = prompt_position + length, position + length
    return chunks


class Parking:
    """A spare sequence of the target's memory, where chunks wait while the text before them is read.

    llama.cpp takes the tokens of a sequence in order only. One slot at a time uses it.
    """

    def __init__(self, context: Context, sequence: int | None) -> None:
        """sequence: None if there is none to spare, or if nothing can be moved."""
        self._context = context
        is_movable = sequence is not None and context.model.cuttable and not context.model.n_swa
        self._sequence = sequence if is_movable and context.can_shift else None
        self._waiting: list[Chunk] = []
        self._owner: Slot | None = None

    @property
    def free(self) -> bool:
        return self._sequence is not None and self._owner is None

    def park(self, slot: Slot, chunks: list[Chunk]) -> None:
        """Move the chunks to where they will be. The slot must then be cut before the first of them."""
        assert self._sequence is not None
        for chunk in chunks:
            end = chunk.old + chunk.length
            self._context.copy(slot.id, self._sequence, end, start=chunk.old)
        # In this order no chunk is moved onto one that was not moved yet.
        moving_right = [chunk for chunk in reversed(chunks) if chunk.new > chunk.old]
        moving_left = [chunk for chunk in chunks if chunk.new < chunk.old]
        for chunk in (*moving_right, *moving_left):
            end = chunk.old + chunk.length
            self._context.shift(self._sequence, chunk.old, end, chunk.new - chunk.old)
        self._owner, self._waiting = slot, list(chunks)

    def next(self, slot: Slot) -> int | None:
        """Return the position at which the slot's next chunk begins; None if there is none."""
        return self._waiting[0].new if self._owner is slot else None

    def attach(self, slot: Slot) -> int:
        """Attach the chunks that begin where the slot has read to; return how far it has read then."""
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
        """Drop the chunks that still wait for the slot."""
        if self._owner is slot and self._sequence is not None:
            self._context.remove(self._sequence, 0)
            self._owner, self._waiting = None, []
