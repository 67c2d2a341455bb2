"""The randomness of a draw with a seed: a number for each token at each place of an answer.

It is a pure function of seed, place and token id, so that what was drawn before, how many drafts a
pass held and in which order candidates come have no part in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): the step of its counter, and the factors of its mixing.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def delays(seed: int, place: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Exponential variates (n,) of mean 1, independent between seeds, places and token ids.

    Above 0 always. About 10 ns per id.
    """
    key = _mixed(_mixed(seed & _MASK) + (place + 1) * _STEP & _MASK)
    bits = ids.astype(np.uint64)
    bits *= np.uint64(_STEP)
    bits += np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FIRST)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    uniform = (bits >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53  # in (0, 1), both ends excluded
    return np.asarray(-np.log(uniform))


def _mixed(value: int) -> int:
    value = (value ^ value >> 30) * _FIRST & _MASK
    value = (value ^ value >> 27) * _SECOND & _MASK
    return value ^ value >> 31
