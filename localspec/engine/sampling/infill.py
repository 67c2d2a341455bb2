"""Decide where a fill-in-the-middle completion should end: llama.cpp's "infill" sampler.

A model that fills a hole in a text often continues when it should stop, because end-of-text tokens are rare
in its training data. The rule (`llama_sampler_infill`) lets it stop early: when an end is not much less
likely than the average candidate, or when no text token is likely.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from localspec.engine.sampling.distribution import Distribution

LIKELY = 0.2  # Minimum probability of a text token to count as likely, as in llama.cpp.
# Only this many candidates are compared with each other, because the comparison is quadratic. Editors
# request 40.
_MAX_COMPARED_CANDIDATES = 256


def infill_sampler(
    candidates: Distribution,
    is_end: Callable[[int], bool],
    end: int,
    piece: Callable[[int], bytes],
) -> Distribution:
    """Return the candidates that may come next; those that end the text may be among them.

    A token's probability is merged with that of candidates that begin with it, or that it begins with. As
    in llama.cpp, the merged value decides which candidates remain, and the original one which is drawn.

    end: the token that ends the text if no text token is likely. piece: returns a token's bytes, which are
    empty if it shows no text.
    """
    order = np.argsort(-candidates.probs, kind="stable")
    ids, original_probs = candidates.ids[order], candidates.probs[order]
    probs = original_probs.copy()
    ends = np.array([is_end(int(token)) for token in ids])
    end_prob = float(probs[ends].sum())
    # llama.cpp's rule: all ends together are at least a third as likely as the average text candidate.
    if 3 * end_prob * len(ids) > float(probs[~ends].sum()):
        return _select(ids, probs, ends)
    _merge_prefixes([piece(int(token)) for token in ids[:_MAX_COMPARED_CANDIDATES]], probs)
    likely = (probs >= LIKELY) & ~ends
    if not likely.any():
        return Distribution(np.array([end]), np.ones(1))
    min_prob = probs[likely | ends].sum() / (int(likely.sum()) + 1)
    # A token merged into another has probability 0 now, also if it ends the text.
    return _select(ids, original_probs, (probs > 0) & (ends | (likely & (probs >= min_prob))))


def _merge_prefixes(pieces: list[bytes], probs: npt.NDArray[np.float64]) -> None:
    """Merge tokens of which one is a prefix of the other into the likelier of the two, in place."""
    for a, shorter in enumerate(pieces):
        if not shorter:
            continue
        for b, longer in enumerate(pieces):
            if probs[a] == 0.0:
                break
            if a == b or probs[b] == 0.0 or not longer.startswith(shorter):
                continue
            likelier, merged = (a, b) if probs[a] >= probs[b] else (b, a)
            probs[likelier] += probs[merged]
            probs[merged] = 0.0


def _select(
    ids: npt.NDArray[np.int64], probs: npt.NDArray[np.float64], keep: npt.NDArray[np.bool_]
) -> Distribution:
    """Return the distribution of the candidates in `keep`, a boolean array (n,)."""
    selected = probs[keep]
    return Distribution(ids[keep], selected / selected.sum())
