"""A flag that stops a running pass."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as C

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

    def heeded_by(self, handle: Any) -> None:
        """Make the passes of a llama_context stop when the flag is set."""
        C.llama_set_abort_callback(handle, _abort_if_set, self._text)


def heed_nothing(handle: Any) -> None:
    """Make the passes of a llama_context run to their end."""
    C.llama_set_abort_callback(handle, _never_abort, None)
