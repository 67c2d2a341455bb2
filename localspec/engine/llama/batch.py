"""The rows of a pass, and the errors of a pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError

# llama.cpp calls the callback after each step of a pass, hundreds of times, on the computing thread. A
# callback in Python would make decoding 5 % slower and would wait for the interpreter lock. `strlen` of a
# buffer costs nothing: it returns 0 ("go on") until the first byte of the buffer is set.
_abort_if_set = ctypes.cast(ctypes.CDLL(None).strlen, C.ggml_abort_callback)
_never_abort = C.ggml_abort_callback()  # A null pointer.


class Stop:
    """A flag that any thread may set to stop a pass within one step, a matrix product.

    This works on a CPU. Work that was submitted to a GPU is always completed.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def __bool__(self) -> bool:
        return self._text.raw[0] != 0

    def set(self, on: bool = True) -> None:
        self._text[0] = b"\1" if on else b"\0"

    def attach(self, handle: Any) -> None:
        """Make the passes of a llama_context stop when the flag is set."""
        C.llama_set_abort_callback(handle, _abort_if_set, self._text)


def detach(handle: Any) -> None:
    """Make the passes of a llama_context run to their end."""
    C.llama_set_abort_callback(handle, _never_abort, None)


class DecodeError(LocalspecError):
    """The base of errors of llama_decode."""

    code = "decode_failed"


class NoKvSlot(DecodeError):
    """Raised for return code 1: the KV cache has no room for the batch. Nothing was changed."""


class Aborted(DecodeError):
    """Raised for return code 2: the pass was stopped.

    An attention cache holds nothing of the pass. A recurrent state is undefined.
    """


class BadBatch(DecodeError):
    """Raised for return code -1 and for invalid rows or sequences: the batch was rejected."""


class DecodeFatal(DecodeError):
    """Raised for a return code below -1: the context can no longer be used."""


Floats = npt.NDArray[np.float32]
N_COORDINATES = 4  # of a row without a token, with M-RoPE


class Batch:
    """The rows of one pass: (token, position, sequence, wants logits). It is reused for all passes.

    A row may have an embedding in place of a token. Then all rows of the pass have.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._token = (C.llama_token * capacity)()
        self._pos = (C.llama_pos * capacity)()
        self._n_seq = (ctypes.c_int32 * capacity)(*([1] * capacity))
        self._seq = (C.llama_seq_id * capacity)()
        self._logits = (ctypes.c_int8 * capacity)()
        pointer, size = ctypes.POINTER(C.llama_seq_id), ctypes.sizeof(self._seq)
        addresses = range(start := ctypes.addressof(self._seq), start + size, size // capacity)
        self._seq_rows = (pointer * capacity)(*(ctypes.cast(a, pointer) for a in addresses))
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
        self._embeddings: Floats | None = None  # allocated at first use
        self._embd: Any = None  # a pointer to them
        self._reads_embeddings = False
        self._coordinates: list[tuple[int, ...]] = []  # of each row, with M-RoPE
        self.both_ways = False  # whether each row attends to all others

    def attach_floats(self, width: int) -> Floats:
        """Return an array (capacity, width) that llama.cpp reads from now on, beside or instead of tokens."""
        values: Floats = np.zeros((self.capacity, width), np.float32)
        self.struct.embd = (ctypes.c_float * values.size).from_buffer(values.data)
        return values

    @property
    def mean_position(self) -> float:
        """The mean position of the rows, of which there must be at least one."""
        return sum(self._pos[: self.rows]) / self.rows

    @property
    def all_have_logits(self) -> bool:
        return all(self._logits[: self.rows])

    def clear(self) -> None:
        self.rows = 0
        self._reads_embeddings = self.both_ways = False
        self._coordinates.clear()

    def finish(self) -> None:
        """Complete the rows for llama.cpp, before each pass."""
        self.struct.n_tokens = self.rows
        if self._embeddings is not None:
            self.struct.embd = self._embd if self._reads_embeddings else None  # type: ignore[assignment]
            self.struct.token = None if self._reads_embeddings else self._token  # type: ignore[assignment]
            # All first coordinates of the rows, then all second ones, and so on.
            values = [value for column in zip(*self._coordinates, strict=True) for value in column]
            positions: Any = (C.llama_pos * len(values))(*values) if values else self._pos
            self.struct.pos = positions

    def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """Append a row and return its index.

        Raises BadBatch if the batch is full.
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

    def add_embedding(
        self, values: Floats, position: int, sequence: int, coordinates: Sequence[int] = ()
    ) -> None:
        """Append a row without logits that has an embedding (n_embd,) in place of a token.

        coordinates: with M-RoPE, of which the first is the position.

        Raises BadBatch if the batch is full, or has rows with tokens.
        """
        if self.rows and not self._reads_embeddings:
            raise BadBatch("A batch holds either tokens or embeddings.")
        row = self.add(0, position, sequence, logits=False)
        if self._embeddings is None:
            self._embeddings = np.zeros((self.capacity, len(values)), np.float32)
            self._embd = self._embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._embeddings[row] = values
        self._reads_embeddings = True
        if coordinates:
            self._coordinates.append((*coordinates, *[0] * (N_COORDINATES - len(coordinates))))
