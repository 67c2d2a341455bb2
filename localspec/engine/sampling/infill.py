"""Where a completion in the middle of a text should end: llama.cpp's "infill" sampler.

A model asked to fill a hole writes on when it should stop, since ends of text are rare in its data. The
rule (`llama_sampler_infill`) lets it stop early: as soon as ending is not much less likely than the
candidates are each on average, or no piece of text is likely.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from localspec.engine.sampling.distribution import Distribution

LIKELY = 0.2  # least probability of a token of text
_MERGED = 256  # most candidates that are compared with one another; editors ask for 40


def infill_sampler(
    candidates: Distribution,
    is_end: Callable[[int], bool],
    end: int,
    piece: Callable[[int], bytes],
) -> Distribution:
    """The candidates that are left, of which some may end the text, each as likely as it was among them: what
    others begin with counts for whether one is left, and not for which one is drawn, as there.

    end: the token that ends it where no text is likely. piece: a token's bytes; those of tokens that
    show nothing are empty.
    """
    order = np.argsort(-candidates.probs, kind="stable")
    ids, before = candidates.ids[order], candidates.probs[order]
    probs = before.copy()
    ends = np.array([is_end(int(token)) for token in ids])
    ending = float(probs[ends].sum())
    if 3 * ending * len(ids) > float(probs[~ends].sum()):
        return _kept(ids, probs, ends)
    _merge_prefixes([piece(int(token)) for token in ids[:_MERGED]], probs)
    likely = (probs >= LIKELY) & ~ends
    if not likely.any():
        return Distribution(np.array([end]), np.ones(1))
    least = probs[likely | ends].sum() / (int(likely.sum()) + 1)
    # One that went into another has no probability left, an end of text neither.
    return _kept(ids, before, (probs > 0) & (ends | (likely & (probs >= least))))


def _merge_prefixes(pieces: list[bytes], probs: npt.NDArray[np.float64]) -> None:
    """Give the probability of tokens of which one begins another to the likelier of the two, in place."""
    for a, shorter in enumerate(pieces):
        if not shorter:
            continue
        for b, longer in enumerate(pieces):
            if probs[a] == 0.0:
                break
            if a == b or probs[b] == 0.0 or not longer.startswith(shorter):
                continue
            kept, gone = (a, b) if probs[a] >= probs[b] else (b, a)
            probs[kept] += probs[gone]
            probs[gone] = 0.0


def _kept(
    ids: npt.NDArray[np.int64], probs: npt.NDArray[np.float64], keep: npt.NDArray[np.bool_]
) -> Distribution:
    left = probs[keep]
    return Distribution(ids[keep], left / left.sum())
