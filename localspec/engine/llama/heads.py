"""What MTP heads need of llama.cpp beyond its public interface: a target's hidden states, in and out.

These are names of its staging interface, without which nothing but heads is lost.
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
except (ImportError, AttributeError) as error:  # a name is not in this build's library
    _missing = str(error)

States = npt.NDArray[np.float32]  # (rows, width), a hidden state each


def why_no_heads(model: Model) -> str:
    """Why a model's heads, or a sidecar, cannot draft here, as a clause; empty where they can."""
    if _ext is None:
        return f"this build of llama.cpp has no interface for MTP heads ({_missing})"
    if is_sidecar(model.architecture):
        return ""
    if reason := no_heads(model.architecture, model.n_heads):
        return reason
    return "" if _are_in(model.path) else "the MTP heads that the target's file names are not in it"


class _GgufParams(ctypes.Structure):
    """gguf_init_params (gguf.h)."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _are_in(path: str) -> bool:
    """Are there heads in a model's files? llama.cpp ends the process where it runs heads that are not."""
    shards, files = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path), [path]
    if shards:
        files = [f"{shards[1]}-{at:05}-of-{shards[2]}.gguf" for at in range(1, int(shards[2]) + 1)]
    return any(name.endswith(b".nextn.eh_proj.weight") for file in files for name in _tensors(file))


def _tensors(file: str) -> list[bytes]:
    """The names of a file's tensors, by its header; none where it cannot be read."""
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
        return [lib.gguf_get_tensor_name(header, at) for at in range(count)]
    finally:
        lib.gguf_free(header)


# Heads that make hidden states of rows that want logits, and of no others: llama.cpp ends the process
# where it looks for those. Of any others it takes such states from the first rows of a pass.
_FEW_STATES = frozenset({"gemma4-assistant", "step35"})


def emit_states(handle: Any, model: Model, heads: bool) -> None:
    """The passes of this llama_context give hidden states, too: of every row, or, of some `heads`, of those
    that want logits.
    """
    _ext.llama_set_embeddings_nextn(handle, True, heads and model.architecture in _FEW_STATES)


def states(handle: Any, row: int, count: int, width: int) -> States | None:
    """A view of the states (count, width) from `row` of the last pass on; None: there are none."""
    pointer = _ext.llama_get_embeddings_nextn_ith(handle, row)
    if not pointer:
        return None
    address = ctypes.addressof(pointer.contents)
    view: States = np.ctypeslib.as_array((ctypes.c_float * (count * width)).from_address(address))
    return view.reshape(count, width)


class StateBatch(Batch):
    """Rows with the hidden state of the token before each: what heads read. `states` holds them."""

    def __init__(self, capacity: int, width: int) -> None:
        super().__init__(capacity)
        self.states: States = np.zeros((capacity, width), np.float32)
        self.struct.embd = (ctypes.c_float * self.states.size).from_buffer(self.states.data)

    def add(self, token: int, position: int, sequence: int, logits: bool) -> int:
        """As Batch's; the state is all zeros, which stands for one that nobody knows."""
        row = super().add(token, position, sequence, logits)
        self.states[row] = 0.0
        return row
