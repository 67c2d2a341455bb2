"""Which pass width gives the same logits wherever a token stands in it: the self-test of exact mode."""

from __future__ import annotations

import numpy as np

from localspec.engine.llama import Batch, Context, Logits
from localspec.engine.speculation.cost import CostTable

CANDIDATES = range(4, 9)
_SPAN = 3  # passes' worth of tokens compared


def choose_width(context: Context, batch: Batch, costs: CostTable) -> int | None:
    """The cheapest width of 4…8 that passes on this machine with this model; None if none does."""
    for width in sorted(CANDIDATES, key=costs.ms):
        if passes(context, batch, width):
            return width
    return None


def passes(context: Context, batch: Batch, width: int) -> bool:
    """Is each token's row bit-identical whether its pass advanced one token or `width` tokens?

    The same text is read twice, always `width` rows at a time: once keeping only the first row of each
    pass (as plain decoding does, the rest is padding), once keeping all of them (all drafts accepted).
    """
    step = max(context.n_vocab // 97, 1)
    tokens = [(7 + at * step) % context.n_vocab for at in range(_SPAN * width)]
    slowly = _read(context, batch, tokens, width, 1)
    at_once = _read(context, batch, tokens, width, width)
    mixed = _read(context, batch, tokens, width, 2)
    return all(
        np.array_equal(a, b) and np.array_equal(a, c)
        for a, b, c in zip(slowly, at_once, mixed, strict=True)
    )


def _read(
    context: Context, batch: Batch, tokens: list[int], width: int, advance: int
) -> list[Logits]:
    context.remove(0, 0)
    rows: list[Logits] = []
    for start in range(0, len(tokens), advance):
        batch.clear()
        for at in range(width):
            inside = start + at < len(tokens) and at < advance
            batch.add(tokens[start + at] if inside else tokens[start], start + at, 0, True)
        context.decode(batch)
        for at in range(min(advance, len(tokens) - start)):
            rows.append(context.logits(at).copy())
        context.remove(0, start + advance)
    context.remove(0, 0)
    return rows
