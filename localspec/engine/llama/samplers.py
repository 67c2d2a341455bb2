"""llama.cpp's own samplers: the rule by which a completion ends."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.engine.llama.vocab import Vocab

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_Entries = ctypes.POINTER(C.llama_token_data)


class NativeSampler:
    """A sampler of llama.cpp."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        weakref.finalize(self, C.llama_sampler_free, handle)

    def apply(self, ids: npt.NDArray[np.integer], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the candidates that remain of some, an array of `id`, `logit` and `p`."""
        entries = np.zeros(len(ids), _ENTRY)
        entries["id"], entries["logit"] = ids, logits
        array = C.llama_token_data_array(entries.ctypes.data_as(_Entries), len(ids), -1, False)
        C.llama_sampler_apply(self._handle, array)
        return entries[: array.size]


def infill_rule(vocab: Vocab) -> NativeSampler:
    """Return the sampler "infill", which takes quadratic time."""
    return NativeSampler(C.llama_sampler_init_infill(vocab.handle))
