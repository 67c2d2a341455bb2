"""The tensors of a model: all there, of types that llama.cpp computes with, and not visibly damaged."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from localspec.errors import UnsafeModel
from localspec.registry.header.gguf import TENSOR_TYPES, Tensor, read_header
from localspec.registry.header.source import FileSource, Source

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# What each layer of the common dense architectures must hold; others are left to llama.cpp, which
# reports a missing tensor without dying.
_DENSE = frozenset({"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "mistral3"})
_LAYER_PARTS = ("attn_norm.weight", "attn_output.weight", "ffn_norm.weight")
_LAYER_CHOICES = (
    ("attn_q.weight", "attn_qkv.weight"),
    ("attn_k.weight", "attn_qkv.weight"),
    ("attn_v.weight", "attn_qkv.weight"),
    ("ffn_down.weight", "ffn_down_exps.weight"),
    ("ffn_up.weight", "ffn_up_exps.weight"),
)
# llama.cpp's kernels add and multiply by these as float32 alone, and end the process otherwise.
_ADDED = re.compile(r".*(norm[^.]*\.weight|\.bias)")
# Matrices that a token is multiplied with; no kernel does so with whole numbers, or with the types
# that hold the other factor.
_MULTIPLIED = re.compile(r"(token_embd|output|blk\.\d+\.(attn|ffn)_[a-z_]+)\.weight")
_NO_FACTORS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
_VOCABULARY_ROWS = ("token_embd.weight", "output.weight")
_TAIL = 4096


def check_tensors(
    name: str, architecture: str, layers: int, extra: int, tensors: Mapping[str, Tensor]
) -> None:
    """Every layer there, none too many, and each with its parts where they are known.

    `extra` of the layers predict further tokens (MTP) and may be elsewhere.

    Raises:
        UnsafeModel: naming the tensor.
    """
    if not tensors:
        raise UnsafeModel(f"{name} contains a vocabulary but no weights.")
    if "token_embd.weight" not in tensors:
        raise UnsafeModel(f"{name} lacks the tensor 'token_embd.weight'.")
    present = {int(found[1]) for found in map(_BLOCK.match, tensors) if found}
    _check_types(name, tensors.values())
    missing = sorted(set(range(layers - extra)) - present)
    if len(missing) == layers - extra:
        raise UnsafeModel(f"{name} contains none of the {layers} layers it declares.")
    if missing:
        raise UnsafeModel(f"{name} declares {layers} layers but lacks layer {missing[0]}.")
    if present and max(present) >= layers:
        raise UnsafeModel(f"{name} declares {layers} layers but contains layer {max(present)}.")
    if architecture not in _DENSE:
        return
    needed = ["output_norm.weight"]
    needed += [f"blk.{layer}.{part}" for layer in range(layers - extra) for part in _LAYER_PARTS]
    for part in needed:
        if part not in tensors:
            raise UnsafeModel(f"{name} lacks the tensor '{part}'.")
    for layer in range(layers - extra):
        for choice in _LAYER_CHOICES:
            if not any(f"blk.{layer}.{part}" in tensors for part in choice):
                raise UnsafeModel(f"{name} lacks the tensor 'blk.{layer}.{choice[0]}'.")


def _check_types(name: str, tensors: Iterable[Tensor]) -> None:
    """The tensors are of types that llama.cpp has kernels for."""
    for tensor in tensors:
        kind = TENSOR_TYPES[tensor.kind][0]
        if len(tensor.shape) == 1 and kind != "F32" and _ADDED.fullmatch(tensor.name):
            raise UnsafeModel(
                f"{name}: the tensor '{tensor.name}' is of type {kind} and must be F32."
            )
        if kind in _NO_FACTORS and _MULTIPLIED.fullmatch(tensor.name):
            raise UnsafeModel(
                f"{name}: the tensor '{tensor.name}' is of type {kind}, which is not a type for "
                "weights."
            )


def check_weights(path: Path) -> None:
    """A quick look at the weights of a local file: is the end zero, are the norms finite?

    Zeros at the end are what a broken download or copy leaves; NaN in a norm makes every answer
    nonsense; llama.cpp loads both without a word. Reads a few MB, whatever the size of the file.

    Raises:
        UnsafeModel: naming the tensor.
    """
    source = FileSource(path)
    header = read_header(source)
    if not header.tensors:
        return
    last = max(header.tensors, key=lambda tensor: tensor.offset)
    # The last rows of a vocabulary may be padding, and zero; half of it never is.
    span = last.size // 2 if last.name in _VOCABULARY_ROWS else min(last.size, _TAIL)
    is_bias = last.name.endswith(".bias")
    if not is_bias and _is_zero(source, last.offset + last.size - span, span):
        raise UnsafeModel(
            f"{header.name} ends in zeros (tensor '{last.name}'); it is damaged, download it again."
        )
    for tensor in header.tensors:
        if tensor.kind == 0 and len(tensor.shape) == 1:
            values = array("f", source.read(tensor.offset, tensor.size))
            if not math.isfinite(sum(values)):
                raise UnsafeModel(
                    f"{header.name}: the tensor '{tensor.name}' contains values that are not finite "
                    "numbers; the file is damaged, download it again."
                )


def _is_zero(source: Source, offset: int, size: int) -> bool:
    """Whether `size` bytes from `offset` are all zero; stops at the first that is not."""
    while size > 0:
        piece = source.read(offset, min(size, 1 << 20))
        if not piece or piece.count(0) != len(piece):
            return False
        offset, size = offset + len(piece), size - len(piece)
    return True
