"""Which places of a prompt are worth going back to, in a memory that cannot be cut: where messages begin.

A prompt that changes some tokens before its end has at least those read again. With places at two to four
times the distance of the next one, counted from the end, less than four times as many are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Shorter texts are read again within one or two passes.
MIN_TOKENS = 64
# The next turn of a chat shares the prompt except for its last tokens. They open an answer, or hold empty
# thoughts that templates drop later ("<think>\n\n</think>\n\n" is four tokens).
OPENING_TOKENS = 4


def borders(tokens: Sequence[int], is_control: Callable[[int], bool], start: int) -> list[int]:
    """Return the positions after `start` before which a message ends: groups of control tokens."""
    positions: list[int] = []
    last_control = start - OPENING_TOKENS - 1
    for position in range(start, len(tokens)):
        if is_control(tokens[position]):
            if position - last_control > OPENING_TOKENS:
                positions.append(position)
            last_control = position
    return positions


def places(tokens: Sequence[int], is_control: Callable[[int], bool], start: int) -> list[int]:
    """Return the positions of a prompt at which its state is worth saving; `start` tokens are read."""
    end = len(tokens) - OPENING_TOKENS
    candidates = [
        position
        for position in borders(tokens, is_control, start)
        if position - start >= MIN_TOKENS
    ]
    chosen = {end, *candidates[:1]}
    distance = MIN_TOKENS
    while end - distance - start >= MIN_TOKENS:
        in_range = [
            position for position in candidates if distance <= end - position < 2 * distance
        ]
        place = max(in_range, default=end - distance)
        chosen.add(place)
        distance = 2 * (end - place)
    return sorted(position for position in chosen if position > start)


def least_missed(positions: Sequence[int]) -> int:
    """Return the index of the position to give up.

    Never the last, and the first, which ends the instructions, only if nothing else is left.
    """
    end, previous = positions[-1] + MIN_TOKENS, (0, *positions)
    removable = range(1, len(positions) - 1) or range(1)  # of two or one, the first
    return min(removable, key=lambda index: (end - previous[index]) / (end - positions[index]))
