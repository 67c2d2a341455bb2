"""Read the tensors of a GGUF model, and write a copy of the file in which some of them are others."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.engine.llama.quantization import Bytes, choose_type, dequantize, quantize
from localspec.errors import LoadFailed
from localspec.extras.tune.reading import Floats, Integers
from localspec.files import replace_atomically
from localspec.model_traits import sidecar_kind
from localspec.registry.header.gguf import DEFAULT_ALIGNMENT, FileSource, Tensor, read_header

OUTPUT, EMBEDDINGS = "output.weight", "token_embd.weight"
_HEAD_OUTPUT = ".nextn.shared_head_head.weight"  # ends the name of the output matrix of MTP heads
_OFFSETS = "d2t"  # by row of an EAGLE-3 sidecar with a small vocabulary: its token less its number
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
    def is_sidecar(self) -> bool:
        """Whether it drafts from states of a target."""
        return sidecar_kind(self.architecture, self._tensors) is not None

    @property
    def output_name(self) -> str:
        """The tensor that is the output matrix: the token embeddings if the file has no other.

        Raises:
            LoadFailed: it is a sidecar that uses its target's.
        """
        if not self.is_sidecar:
            return OUTPUT if OUTPUT in self._tensors else EMBEDDINGS
        of_heads = [name for name in self._tensors if name.endswith(_HEAD_OUTPUT)]
        for name in (*of_heads, OUTPUT):  # with several heads, the first one drafts
            if name in self._tensors:
                return name
        raise LoadFailed("This sidecar has no output matrix of its own that could be trained.")

    def read_output_tokens(self) -> Integers:
        """Return the token (rows,) that each row of the output matrix stands for."""
        tokens = np.arange(self._tensors[self.output_name].shape[1])
        if _OFFSETS in self._tensors:
            tokens += self._read_bytes(self._tensors[_OFFSETS]).view(np.int64)
        return tokens

    @property
    def n_ctx_train(self) -> int:
        """The tokens of the context that it was trained for, 0 if the file does not say."""
        return int(self.read_value(f"{self.architecture}.context_length", 0))

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
