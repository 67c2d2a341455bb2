"""The rows of a pass, and how a pass can fail."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as C

from localspec.errors import LocalspecError


class DecodeError(LocalspecError):
    """llama_decode failed; the subclass says how."""

    code = "decode_failed"


class NoKvSlot(DecodeError):
    """Return code 1: no room in the KV cache for this batch. Nothing was changed."""


class Aborted(DecodeError):
    """Return code 2: the pass was stopped. A cache of attention holds nothing of it, a state anything."""


class BadBatch(DecodeError):
    """Return code -1: llama.cpp refused the batch."""


class DecodeFatal(DecodeError):
    """Return code below -1: the context can no longer be trusted."""


class Batch:
    """The rows of one pass: (token, position, sequence, wants logits). Reused, never reallocated."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._token = (C.llama_token * capacity)()
        self._pos = (C.llama_pos * capacity)()
        self._n_seq = (ctypes.c_int32 * capacity)(*([1] * capacity))
        self._seq = (C.llama_seq_id * capacity)()
        self._logits = (ctypes.c_int8 * capacity)()
        pointer = ctypes.POINTER(C.llama_seq_id)
        step = ctypes.sizeof(C.llama_seq_id)
        base = ctypes.addressof(self._seq)
        self._seq_rows = (pointer * capacity)(
            *(ctypes.cast(base + i * step, pointer) for i in range(capacity))
        )
        self.struct = C.llama_batch(
            n_tokens=0,
            token=self._token,
            embd=None,
            pos=self._pos,
            n_seq_id=self._n_seq,
            seq_id=self._seq_rows,
            logits=self._logits,
        )
        self.rows = 0

    @property
    def mean_position(self) -> float:
        """Of its rows, of which there are some."""
        return sum(self._pos[: self.rows]) / self.rows

    def clear(self) -> None:
        self.rows = 0

    def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """Append a row; returns its index.

        Raises:
            BadBatch: more rows than the capacity.
        """
        row = self.rows
        if row >= self.capacity:
            raise BadBatch(f"A batch holds {self.capacity} rows.")
        self._token[row] = token
        self._pos[row] = position
        self._seq[row] = sequence
        self._logits[row] = logits
        self.rows = row + 1
        return row
