"""Check the tensors of a model: complete, of types that llama.cpp supports, and not visibly damaged."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from localspec.errors import UnsafeModel
from localspec.registry.header.gguf import (
    TENSOR_TYPES,
    FileSource,
    Source,
    StringArray,
    Tensor,
    read_header,
)

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# Each layer of these common dense architectures must have the tensors below. For other architectures
# llama.cpp itself reports a missing tensor without ending the process.
_DENSE_ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "mistral3"}
)
# Sidecars that may use the embedding of their target.
_BORROWERS = frozenset({"eagle3", "dflash"})
_REQUIRED_IN_LAYER = ("attn_norm.weight", "attn_output.weight", "ffn_norm.weight")
_ONE_REQUIRED_IN_LAYER = (
    ("attn_q.weight", "attn_qkv.weight"),
    ("attn_k.weight", "attn_qkv.weight"),
    ("attn_v.weight", "attn_qkv.weight"),
    ("ffn_down.weight", "ffn_down_exps.weight"),
    ("ffn_up.weight", "ffn_up_exps.weight"),
)
# Lists of token or expert ids, which are of an integer type.
_ID_LISTS = re.compile(r"d2t|t2d|blk\.\d+\.ffn_gate_tid2eid\.weight")
# llama.cpp's kernels support only F32 for what is added or multiplied element by element, and end the process
# on other types. That is all except matrices, which are called ….weight and are no norms or convolutions.
_MATRIX = re.compile(r"(?!.*(?:norm[^.]*|conv1d[^.]*|shortconv\.conv)\.weight$).*\.weight")
# No kernel multiplies by integers, or by the types that are used for activations.
_UNSUPPORTED_MATRIX_TYPES = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
_VOCABULARY_TENSORS = ("token_embd.weight", "output.weight")
_MAX_TAIL_BYTES = 4096  # checked for zeros at the end of a file


def check_tensors(
    name: str,
    architecture: str,
    layers: int,
    required_layers: Sequence[int],
    tensors: Mapping[str, Tensor],
) -> None:
    """Check that every layer is present, that there are no others, and that each has the known tensors.

    layers: how many the file declares. required_layers: those that it must contain, because MTP heads and
    the layers below them may be in two files.

    Raises:
        UnsafeModel: the message names the tensor.
    """
    if not tensors:
        raise UnsafeModel(f"{name} contains a vocabulary but no weights.")
    if "token_embd.weight" not in tensors and architecture not in _BORROWERS:
        raise UnsafeModel(f"{name} lacks the tensor 'token_embd.weight'.")
    present = {int(match[1]) for match in map(_BLOCK.match, tensors) if match}
    _check_types(name, tensors.values())
    missing = sorted(set(required_layers) - present)
    if len(missing) == len(required_layers):
        raise UnsafeModel(f"{name} contains none of the {layers} layers it declares.")
    if missing:
        raise UnsafeModel(f"{name} declares {layers} layers but lacks layer {missing[0]}.")
    if present and max(present) >= layers:
        raise UnsafeModel(f"{name} declares {layers} layers but contains layer {max(present)}.")
    if architecture not in _DENSE_ARCHITECTURES:
        return
    required = ["output_norm.weight"]
    required += [f"blk.{layer}.{part}" for layer in required_layers for part in _REQUIRED_IN_LAYER]
    for part in required:
        if part not in tensors:
            raise UnsafeModel(f"{name} lacks the tensor '{part}'.")
    for layer in required_layers:
        for choice in _ONE_REQUIRED_IN_LAYER:
            if not any(f"blk.{layer}.{part}" in tensors for part in choice):
                raise UnsafeModel(f"{name} lacks the tensor 'blk.{layer}.{choice[0]}'.")


def _check_types(name: str, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        kind = TENSOR_TYPES[tensor.kind][0]
        if _ID_LISTS.fullmatch(tensor.name):
            continue
        is_matrix = len(tensor.shape) > 1 and _MATRIX.fullmatch(tensor.name)
        if not is_matrix and kind != "F32":
            raise UnsafeModel(
                f"{name}: the tensor '{tensor.name}' is of type {kind} and must be F32."
            )
        if kind in _UNSUPPORTED_MATRIX_TYPES:
            raise UnsafeModel(
                f"{name}: the tensor '{tensor.name}' is of type {kind}, which is not a type for "
                "weights."
            )


def check_weights(path: Path) -> None:
    """Check that the weights of a local file do not end in zeros, and that norms and token ids are possible.

    A broken download or copy leaves zeros at the end, and NaN in a norm makes every answer nonsense.
    llama.cpp loads both without an error. This reads only a few MB, whatever the size of the file.

    Raises:
        UnsafeModel: the message names the tensor.
    """
    source = FileSource(path)
    header = read_header(source)
    if not header.tensors:
        return
    last_tensor = max(header.tensors, key=lambda tensor: tensor.offset)
    # The last rows of a vocabulary may be padding with zeros, but never half of them.
    tail_bytes = min(last_tensor.size, _MAX_TAIL_BYTES)
    if last_tensor.name in _VOCABULARY_TENSORS:
        tail_bytes = last_tensor.size // 2
    tail = last_tensor.offset + last_tensor.size - tail_bytes
    if not last_tensor.name.endswith(".bias") and _is_zero(source, tail, tail_bytes):
        raise UnsafeModel(
            f"{header.name} ends in zeros (tensor '{last_tensor.name}'); it is damaged, download it again."
        )
    for tensor in header.tensors:
        if tensor.name == "d2t":
            ids = array("q", source.read(tensor.offset, tensor.size))
            tokens = header.metadata.get("tokenizer.ggml.tokens")
            count = tokens.count if isinstance(tokens, StringArray) else 0
            if ids and not 0 <= min(ids) <= max(ids) < count:
                raise UnsafeModel(
                    f"{header.name}: the tensor 'd2t' names tokens that do not exist."
                )
        if tensor.kind == 0 and len(tensor.shape) == 1:
            values = array("f", source.read(tensor.offset, tensor.size))
            if not math.isfinite(sum(values)):
                raise UnsafeModel(
                    f"{header.name}: the tensor '{tensor.name}' contains values that are not finite "
                    "numbers; the file is damaged, download it again."
                )


def _is_zero(source: Source, offset: int, size: int) -> bool:
    """Return whether `size` bytes from `offset` are all zero, reading only up to the first that is not."""
    while size > 0:
        chunk = source.read(offset, min(size, 1 << 20))
        if not chunk or chunk.count(0) != len(chunk):
            return False
        offset, size = offset + len(chunk), size - len(chunk)
    return True
