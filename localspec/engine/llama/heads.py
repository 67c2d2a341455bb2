"""Read and write hidden states for MTP heads, through llama.cpp's staging interface.

Builds of llama.cpp without this interface work except for MTP heads.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from typing import Any

import llama_cpp._ggml as ggml
import numpy as np
import numpy.typing as npt

from localspec.engine.llama.batch import Batch
from localspec.engine.llama.model import Model
from localspec.purpose import is_sidecar, no_heads

_ext: Any = None
_missing = ""
try:
    _ext = importlib.import_module("llama_cpp.llama_cpp_ext")
except (ImportError, AttributeError) as error:  # This build's library lacks a function.
    _missing = str(error)

States = npt.NDArray[np.float32]  # Hidden states of shape (rows, width).


def why_no_heads(model: Model) -> str:
    """Return why a model's heads or a sidecar cannot draft, as a clause; "" if they can."""
    if _ext is None:
        return f"this build of llama.cpp has no interface for MTP heads ({_missing})"
    if is_sidecar(model.architecture):
        return ""
    if reason := no_heads(model.architecture, model.n_heads):
        return reason
    return (
        "" if _has_heads(model.path) else "the MTP heads that the target's file names are not in it"
    )


class _GgufParams(ctypes.Structure):
    """The struct gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _has_heads(path: str) -> bool:
    """Return whether a model's files contain heads. llama.cpp ends the process if it runs missing ones."""
    shards, files = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path), [path]
    if shards:
        files = [f"{shards[1]}-{i:05}-of-{shards[2]}.gguf" for i in range(1, int(shards[2]) + 1)]
    return any(
        name.endswith(b".nextn.eh_proj.weight")
        for file in files
        for name in _read_tensor_names(file)
    )


def _read_tensor_names(file: str) -> list[bytes]:
    """Return the names of the tensors in a GGUF file, or none if it cannot be read."""
    lib = ggml.libggml
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = (ctypes.c_char_p, _GgufParams)
    lib.gguf_get_n_tensors.restype = ctypes.c_int64
    lib.gguf_get_n_tensors.argtypes = (ctypes.c_void_p,)
    lib.gguf_get_tensor_name.restype = ctypes.c_char_p
    lib.gguf_get_tensor_name.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    lib.gguf_free.argtypes = (ctypes.c_void_p,)
    header = lib.gguf_init_from_file(os.fsencode(file), _GgufParams(True, None))
    if not header:
        return []
    try:
        count = lib.gguf_get_n_tensors(header)
        return [lib.gguf_get_tensor_name(header, index) for index in range(count)]
    finally:
        lib.gguf_free(header)


# Architectures whose heads emit hidden states only for rows with logits. llama.cpp ends the process if asked
# for the states of other rows. For any other architecture, it would take the states from the first rows.
_STATES_OF_LOGITS_ROWS = frozenset({"gemma4-assistant", "step35"})


def emit_states(handle: Any, model: Model, heads: bool) -> None:
    """Make the passes of a llama_context emit hidden states for every row.

    heads: whether it is a context of heads, some of which emit them only for rows with logits.
    """
    _ext.llama_set_embeddings_nextn(
        handle, True, heads and model.architecture in _STATES_OF_LOGITS_ROWS
    )


def states(handle: Any, row: int, count: int, width: int) -> States | None:
    """Return a view (count, width) of the states of the last pass from `row` on, or None without states."""
    pointer = _ext.llama_get_embeddings_nextn_ith(handle, row)
    if not pointer:
        return None
    address = ctypes.addressof(pointer.contents)
    view: States = np.ctypeslib.as_array((ctypes.c_float * (count * width)).from_address(address))
    return view.reshape(count, width)


class StateBatch(Batch):
    """A batch for heads, with the hidden state of the previous token for each row in `states`."""

    def __init__(self, capacity: int, width: int) -> None:
        super().__init__(capacity)
        self.states: States = np.zeros((capacity, width), np.float32)
        self.struct.embd = (ctypes.c_float * self.states.size).from_buffer(self.states.data)

    def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """Append a row as in Batch, with a state of zeros, which means an unknown state."""
        row = super().add(token, position, sequence, logits)
        self.states[row] = 0.0
        return row
