"""Read the tensors of a GGUF model, and write a copy of the file in which some of them are others."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.engine.llama.quantization import Bytes, choose_type, dequantize, quantize
from localspec.extras.tune.reading import Floats
from localspec.files import replace_atomically
from localspec.registry.header.gguf import DEFAULT_ALIGNMENT, FileSource, Tensor, read_header

OUTPUT, EMBEDDINGS = "output.weight", "token_embd.weight"
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
        """The names of all tensors."""
        return list(self._tensors)

    @property
    def output_name(self) -> str:
        """The tensor that is the output matrix: the token embeddings if the file has no other."""
        return OUTPUT if OUTPUT in self._tensors else EMBEDDINGS

    def read_value(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata."""
        return self._header.metadata.get(key, default)

    def read_tensor(self, name: str) -> Floats:
        """Return a tensor as float32, its slowest dimension first.

        Raises:
            LoadFailed: it has no weights.
        """
        tensor = self._tensors[name]
        values = dequantize(self._read_bytes(tensor), tensor.kind, tensor.elements)
        return values.reshape(tensor.shape[::-1])

    def _read_bytes(self, tensor: Tensor) -> Bytes:
        return self._bytes[tensor.offset : tensor.offset + tensor.size]

    def write_copy(self, path: Path, changed: Mapping[str, Floats]) -> None:
        """Write a copy with other values of some tensors, in the same quantization if possible.

        changed: may have an output matrix that the file has not, which gets the embeddings' quantization.
        """
        start = bytearray(self._bytes[: self._header.table_offset])
        table = bytearray()
        blocks: list[Bytes] = []
        end = 0  # of the tensors so far
        names = list(dict.fromkeys([*self._tensors, *changed]))
        for name in names:
            tensor = self._tensors.get(name) or self._tensors[EMBEDDINGS]
            data, kind = self._read_bytes(tensor), tensor.kind
            if name in changed:
                kind = choose_type(kind)
                data = quantize(changed[name], kind)
            table += _table_row(name, tensor.shape, kind, end)
            blocks.append(data)
            end += len(data) + -len(data) % self._alignment
        struct.pack_into("<Q", start, _COUNT_OFFSET, len(names))
        with replace_atomically(path, sync=False) as file:
            file.write(start + table)
            for block in blocks:
                file.write(bytes(-file.tell() % self._alignment))
                file.write(block.data)
            file.write(bytes(-file.tell() % self._alignment))


def _table_row(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """Return a row of the tensor table. offset: of its data from the beginning of all data."""
    encoded = name.encode()
    numbers = f"<Q{len(encoded)}sI{len(shape)}QIQ"
    return struct.pack(numbers, len(encoded), encoded, len(shape), *shape, kind, offset)
