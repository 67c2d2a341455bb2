"""The values of tensors in GGUF files, converted by ggml's own functions."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.engine.llama.ggml import declare
from localspec.errors import LoadFailed

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_N_TYPES = 43  # of ggml.h; ggml ends the process if it is asked about another
_F32, _Q8_0 = 0, 8
# Types that ggml writes without knowing what a tensor is used for. Others become Q8_0.
_WRITABLE = frozenset(
    b"""f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_K q3_K q4_K q5_K q6_K iq4_nl iq4_xs""".split()
)


class _TypeTraits(ctypes.Structure):
    """The beginning of ggml's struct `ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("interleaved_block_size", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def dequantize(data: Bytes, kind: int, count: int) -> Floats:
    """Return the `count` values of a tensor's bytes, whose type has the number `kind` in ggml.

    Raises LoadFailed if the type is not one of weights. Raises ValueError if `count` values need another
    number of bytes.
    """
    traits = _traits(kind)
    name = traits.type_name.decode()
    if count % traits.block_size or len(data) != count // traits.block_size * traits.type_size:
        raise ValueError(f"{count} values of type {name} need another number of bytes")
    data = np.ascontiguousarray(data)
    if kind == _F32:
        return data.view(np.float32).copy()
    if not traits.to_float:
        raise LoadFailed(f"A tensor of type {name} has no weights that could be trained.")
    values = np.empty(count, np.float32)
    traits.to_float(data.ctypes.data, values.ctypes.data, count)
    return values


def choose_type(kind: int) -> int:
    """Return the type in which changed values of a tensor of type `kind` are written: the same, or Q8_0."""
    return kind if _traits(kind).type_name in _WRITABLE else _Q8_0


def quantize(values: Floats, kind: int) -> Bytes:
    """Return the bytes of values (…, width) in a type that `choose_type` has returned.

    Raises ValueError if rows of this width cannot be written in this type.
    """
    traits, width = _traits(kind), values.shape[-1]
    if traits.type_name not in _WRITABLE or width % traits.block_size:
        raise ValueError(f"rows of {width} values cannot be {traits.type_name.decode()}")
    values = np.ascontiguousarray(values, np.float32)
    data = np.zeros(values.size // traits.block_size * traits.type_size, np.uint8)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    parameters = (ctypes.c_int, pointer, pointer, size, size, size, pointer)
    convert = declare("ggml_quantize_chunk", ctypes.c_size_t, *parameters)
    rows = values.size // width
    n_written = convert(kind, values.ctypes.data, data.ctypes.data, 0, rows, width, None)
    assert n_written == len(data)
    return data


def _traits(kind: int) -> Any:
    """Return what ggml knows of a type. Raises LoadFailed if it does not know it."""
    if 0 <= kind < _N_TYPES:
        traits = declare("ggml_get_type_traits", ctypes.POINTER(_TypeTraits), ctypes.c_int)(kind)[0]
        if traits.type_name and traits.block_size:
            return traits
    raise LoadFailed(f"The tensor type {kind} is not known to this llama.cpp.")
