"""Pictures among the tokens of a text.

A picture takes places in a text as tokens do. What stands there are negative numbers, which are made from the
picture's content. So equal pictures are equal tokens, and a cached text is found again by its tokens alone.
Nothing else may take a negative number for a token: llama.cpp reads the picture's rows there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def picture_tokens(identity: bytes, count: int) -> list[int]:
    """Return the negative numbers for the `count` places of a picture, whose content `identity` hashes."""
    digests = hashlib.shake_256(identity).digest(4 * count)
    return [-1 - (number >> 1) for number in np.frombuffer(digests, "<u4").tolist()]


def is_picture(token: int) -> bool:
    """Return whether a picture is at this place of a text."""
    return token < 0


def split_pictures(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield the parts of a text in order: each is all text, or all pictures."""
    for _, part in itertools.groupby(tokens, is_picture):
        yield list(part)


def begin_of_picture(tokens: Sequence[int], length: int) -> int:
    """Return `length`, or fewer so that the first tokens end before the picture that they would cut."""
    while 0 < length < len(tokens) and tokens[length] < 0 and tokens[length - 1] < 0:
        length -= 1
    return length


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """The rows of a picture that a target reads: `rows` (n, n_embd) in the places of a text from `start` on.

    n_places: places that it takes. positions: with M-RoPE, for each row its time, line and column (n, 3),
    from the start; None: each row has a place of its own. both_ways: each row attends to all others.
    """

    start: int
    rows: npt.NDArray[np.float32]
    n_places: int
    positions: npt.NDArray[np.int32] | None = None
    both_ways: bool = False

    @property
    def end(self) -> int:
        return self.start + self.n_places

    @property
    def is_indivisible(self) -> bool:
        """Whether no text can go on behind a part of it."""
        return self.both_ways or self.positions is not None
