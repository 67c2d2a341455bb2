"""llama.cpp's own samplers: penalties on repetition, and the rule by which a completion ends."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.engine.llama.vocab import Vocab
from localspec.errors import InvalidRequest

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_Entries = ctypes.POINTER(C.llama_token_data)


class NativeSampler:
    """A sampler of llama.cpp, with what it knows of a text."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        weakref.finalize(self, C.llama_sampler_free, handle)

    def clone(self) -> NativeSampler:
        """Return another one that knows the same."""
        return NativeSampler(C.llama_sampler_clone(self._handle))

    def accept(self, tokens: Iterable[int]) -> None:
        """Note more tokens of the text."""
        for token in tokens:
            C.llama_sampler_accept(self._handle, token)

    def apply(self, ids: npt.NDArray[np.integer], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the candidates that remain of some, an array of `id`, `logit` and `p`."""
        entries = np.zeros(len(ids), _ENTRY)
        entries["id"], entries["logit"] = ids, logits
        array = C.llama_token_data_array(entries.ctypes.data_as(_Entries), len(ids), -1, False)
        C.llama_sampler_apply(self._handle, array)
        return entries[: array.size]


def repeat_penalty(
    n_vocab: int, last_n: int, repeat: float, frequency: float, presence: float
) -> NativeSampler:
    """Return the repeat, frequency and presence penalties over the last `last_n` tokens."""
    return NativeSampler(
        C.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence)
    )


def dry_penalty(
    vocab: Vocab | None,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
    breakers: Sequence[str],
) -> NativeSampler:
    """Return DRY over the last `last_n` tokens. Without a vocabulary there are no breakers.

    llama.cpp looks for each breaker in every token, which takes about 0.05 µs.

    Raises InvalidRequest if a breaker is not valid Unicode.
    """
    handle, texts, count = None, None, 0
    if vocab is not None and breakers:
        try:
            encoded = [text.encode() for text in breakers]
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"A sequence breaker is not valid Unicode: {error.reason}.",
                param="dry_sequence_breakers",
            ) from error
        count = len(encoded)
        handle, texts = vocab.handle, (ctypes.c_char_p * count)(*encoded)
    options = multiplier, base, allowed_length, last_n
    return NativeSampler(C.llama_sampler_init_dry(handle, *options, texts, count))


def infill_rule(vocab: Vocab) -> NativeSampler:
    """Return the sampler "infill", which takes quadratic time."""
    return NativeSampler(C.llama_sampler_init_infill(vocab.handle))
