"""Where a prompt is worth going back to, in a memory that cannot be cut: where its messages begin.

What is changed so many tokens before the end has that many read again anyway: places at two to four
times the distance of the one behind them keep it below four times as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Shorter texts are read again within a pass or two of a prompt.
MIN_TOKENS = 64
# A next turn shares the prompt but for its last tokens: they open an answer, or thoughts that templates
# drop later ("<think>\n\n</think>\n\n" is four).
OPENING = 4


def borders(tokens: Sequence[int], is_control: Callable[[int], bool], start: int) -> list[int]:
    """The places after `start` before which a message ends: where control tokens stand together."""
    found: list[int] = []
    last = start - OPENING - 1
    for at in range(start, len(tokens)):
        if is_control(tokens[at]):
            if at - last > OPENING:
                found.append(at)
            last = at
    return found


def places(tokens: Sequence[int], is_control: Callable[[int], bool], start: int) -> list[int]:
    """After how many tokens of a prompt, of which `start` are read, its state is worth keeping."""
    end = len(tokens) - OPENING
    between = [at for at in borders(tokens, is_control, start) if at - start >= MIN_TOKENS]
    chosen = {end, *between[:1]}
    nearest = MIN_TOKENS
    while end - nearest - start >= MIN_TOKENS:
        within = [at for at in between if nearest <= end - at < 2 * nearest]
        place = max(within, default=end - nearest)
        chosen.add(place)
        nearest = 2 * (end - place)
    return sorted(at for at in chosen if at > start)


def least_missed(kept: Sequence[int]) -> int:
    """Which of some places to give up: not the last, nor the first, which is that of
    the instructions, unless it has to be.
    """
    end, before = kept[-1] + MIN_TOKENS, (0, *kept)
    among = range(1, len(kept) - 1) or range(1)  # of two the first, of one that one
    return min(among, key=lambda at: (end - before[at]) / (end - kept[at]))
