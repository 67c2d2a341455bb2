"""Read the tensors of a GGUF model, write a copy of the file with other tensors, or a new file."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from localspec.engine.llama.quantization import Bytes, choose_type, dequantize, quantize
from localspec.errors import LoadFailed
from localspec.extras.tune.reading import Floats, Integers
from localspec.files import replace_atomically
from localspec.model_traits import HEAD_SUFFIX, sidecar_kind
from localspec.registry.header.gguf import (
    DEFAULT_ALIGNMENT,
    FileSource,
    NumberArray,
    StringArray,
    Tensor,
    Value,
    read_header,
)

OUTPUT, EMBEDDINGS = "output.weight", "token_embd.weight"
_HEAD_OUTPUT = ".nextn.shared_head_head.weight"  # ends the name of the output matrix of MTP heads
VOCABULARY = "d2t"  # of an EAGLE-3 sidecar that has a small one: the token of each row
_VERSION = 3
_F32, _Q8_0, _I64 = 0, 8, 27  # ggml's numbers of tensor types
_COUNT_OFFSET = 8  # of the number of tensors, behind the magic and the version


class ModelFile:
    """A GGUF file with a model."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises BadGguf if there is none, or if it contradicts itself."""
        self._header = read_header(FileSource(path))
        self._bytes: Bytes = np.memmap(path, np.uint8, "r")
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        self.architecture = str(self.read_value("general.architecture"))
        self._alignment = int(self.read_value("general.alignment", DEFAULT_ALIGNMENT))

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def is_sidecar(self) -> bool:
        """Whether it drafts from states of a target."""
        return sidecar_kind(self.architecture, self._tensors) is not None

    @property
    def head_tensors(self) -> list[str]:
        """The tensors of MTP heads in a file with a trunk, and those that they share with it; or none."""
        n_layer = int(self.read_value(f"{self.architecture}.block_count", 0))
        n_heads = int(self.read_value(f"{self.architecture}.nextn_predict_layers", 0))
        trunk = {f"blk.{layer}" for layer in range(n_layer - n_heads)}
        has_heads = any(name.endswith(HEAD_SUFFIX) for name in self._tensors)
        if self.is_sidecar or not has_heads or EMBEDDINGS not in self._tensors:
            return []
        return [name for name in self._tensors if ".".join(name.split(".")[:2]) not in trunk]

    @property
    def output_name(self) -> str:
        """The tensor that is the output matrix: the token embeddings if the file has no other.

        Raises:
            LoadFailed: it is a sidecar that uses its target's.
        """
        of_heads = [name for name in self._tensors if name.endswith(_HEAD_OUTPUT)]
        names = (*of_heads, OUTPUT) if self.is_sidecar else (OUTPUT,)
        for name in names:  # with several heads, the first one drafts
            if name in self._tensors:
                return name
        kind = sidecar_kind(self.architecture, self._tensors)
        if kind in (None, "mtp") and EMBEDDINGS in self._tensors:
            return EMBEDDINGS
        raise LoadFailed("This sidecar has no output matrix of its own that could be trained.")

    def read_output_tokens(self) -> Integers:
        """Return the token (rows,) that each row of the output matrix stands for."""
        if VOCABULARY in self._tensors:
            return self._read_bytes(self._tensors[VOCABULARY]).view(np.int64)
        return np.arange(self._tensors[self.output_name].shape[1])

    @property
    def n_vocab(self) -> int:
        """The tokens that the embeddings have a row for."""
        return self._tensors[EMBEDDINGS].shape[1]

    @property
    def n_ctx_train(self) -> int:
        """The tokens of the context that it was trained for, 0 if the file does not say."""
        return int(self.read_value(f"{self.architecture}.context_length", 0))

    def read_value(self, key: str, default: Any = None) -> Any:
        return self._header.metadata.get(key, default)

    def read_tensor(self, name: str) -> Floats:
        """Return a tensor as float32, its slowest dimension first.

        Raises:
            LoadFailed: it has no weights.
        """
        tensor = self._tensors[name]
        values = dequantize(self._read_bytes(tensor), tensor.kind, tensor.elements)
        return values.reshape(tensor.shape[::-1])

    def check_matrices(self) -> None:
        """Check that rows of the embeddings and of the output matrix can be read. Raises LoadFailed."""
        if EMBEDDINGS not in self._tensors or int(self.read_value("split.count", 1)) > 1:
            raise LoadFailed(
                "No new draft can be made for a target in several files; join them with llama.cpp's "
                "llama-gguf-split --merge."
            )
        for name in (EMBEDDINGS, self.output_name):
            self.read_rows(name, np.zeros(1, np.int64))

    def read_rows(self, name: str, rows: Integers) -> Floats:
        """Return some rows (n, width) of a matrix as float32. Raises as `read_tensor`."""
        tensor, width = self._tensors[name], self._tensors[name].shape[0]
        data = self._read_bytes(tensor).reshape(tensor.shape[1], -1)[rows]
        return dequantize(data.ravel(), tensor.kind, len(rows) * width).reshape(-1, width)

    @property
    def tokenizer(self) -> dict[str, Value]:
        """The metadata of the vocabulary."""
        metadata = self._header.metadata
        return {key: metadata[key] for key in metadata if key.startswith("tokenizer.ggml.")}

    def _read_bytes(self, tensor: Tensor) -> Bytes:
        return self._bytes[tensor.offset : tensor.offset + tensor.size]

    def write_copy(self, path: Path, changed: Mapping[str, Floats]) -> None:
        """Write a copy with other values of some tensors, in the same quantization if possible.

        changed: may have an output matrix that the file has not, which gets the embeddings' quantization.
        """
        self.write_part(path, list(dict.fromkeys([*self._tensors, *changed])), changed)

    def write_part(
        self, path: Path, names: Sequence[str], changed: Mapping[str, Floats] = MappingProxyType({})
    ) -> None:
        """Write a copy with these tensors alone, of which some have other values, as in `write_copy`."""
        start = bytearray(self._bytes[: self._header.table_offset])
        rows = []
        for name in names:
            tensor = self._tensors.get(name) or self._tensors[EMBEDDINGS]
            data, kind = self._read_bytes(tensor), tensor.kind
            if name in changed:
                kind = choose_type(kind)
                data = quantize(changed[name], kind)
            rows.append(_Row(name, tensor.shape, kind, data))
        struct.pack_into("<Q", start, _COUNT_OFFSET, len(names))
        _write(path, start, rows, self._alignment)


def write_model(
    path: Path,
    metadata: Mapping[str, Value | Sequence[int]],
    weights: Mapping[str, Floats],
    ids: Integers,
) -> None:
    """Write a new file.

    metadata: integers become uint32, sequences of them int32. weights: matrices become Q8_0, vectors F32.
    ids: the tensor `VOCABULARY`.
    """
    start = bytearray(struct.pack("<4sIQQ", b"GGUF", _VERSION, len(weights) + 1, len(metadata)))
    for key, value in metadata.items():
        start += _encode_string(key) + _encode_value(value)
    rows = [_Row(VOCABULARY, ids.shape, _I64, ids.astype(np.int64).view(np.uint8))]
    for name, values in weights.items():
        kind = _Q8_0 if values.ndim > 1 else _F32
        rows.append(_Row(name, values.shape[::-1], kind, quantize(values, kind)))
    _write(path, start, rows, DEFAULT_ALIGNMENT)


class _Row(NamedTuple):
    """A tensor to be written: its shape with the fastest dimension first, its type, and its data."""

    name: str
    shape: Sequence[int]
    kind: int
    data: Bytes


def _write(path: Path, start: bytes | bytearray, rows: Sequence[_Row], alignment: int) -> None:
    """Write a file whose header without the tensor table is `start`."""
    table, end = bytearray(), 0
    for row in rows:
        numbers = (len(row.shape), *row.shape, row.kind, end)
        table += _encode_string(row.name) + struct.pack(f"<I{len(row.shape)}QIQ", *numbers)
        end += len(row.data) + -len(row.data) % alignment
    with replace_atomically(path, sync=False) as file:
        file.write(start + table)
        for row in rows:
            file.write(bytes(-file.tell() % alignment))
            file.write(row.data.data)
        file.write(bytes(-file.tell() % alignment))


def _encode_string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _encode_value(value: Value | Sequence[int]) -> bytes:
    """Return a value with its type before it, as GGUF says."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _encode_string(value)
    if isinstance(value, StringArray):
        return struct.pack("<IIQ", 9, 8, value.count) + value.raw
    if isinstance(value, NumberArray):
        return struct.pack("<IIQ", 9, value.kind, value.count) + value.raw
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
