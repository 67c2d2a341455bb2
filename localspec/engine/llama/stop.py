"""A flag that ends a pass while it runs."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as C

# llama.cpp asks after each step of a pass, hundreds of times, on the thread that computes. Python's
# answer would cost a decoding pass its twentieth part, and wait for whoever holds the interpreter. The
# length of a text costs nothing: 0, which is no, until the text has a first character.
_ask = ctypes.cast(ctypes.CDLL(None).strlen, C.ggml_abort_callback)
_never = C.ggml_abort_callback()  # a null pointer


class Stop:
    """Any thread may set it; the pass that heeds it ends within one of its steps, a matrix product.

    On a CPU, that is: what is given to a GPU is done to its end.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def __bool__(self) -> bool:
        return self._text.raw[0] != 0

    def set(self, on: bool = True) -> None:
        self._text[0] = b"\1" if on else b"\0"

    def heeded_by(self, handle: Any) -> None:
        """The passes of this llama_context end where it is set, from now on."""
        C.llama_set_abort_callback(handle, _ask, self._text)


def heed_nothing(handle: Any) -> None:
    """The passes of this llama_context go on to their end, from now on."""
    C.llama_set_abort_callback(handle, _never, None)
