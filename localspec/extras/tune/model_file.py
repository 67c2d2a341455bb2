"""Read the tensors of a GGUF model, and write a copy of the file in which some of them are others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localspec.extras.tune.reading import Floats

OUTPUT, EMBEDDINGS = "output.weight", "token_embd.weight"
# Quantizations that the gguf package can write. A changed matrix in another one becomes Q8_0.
_WRITABLE = frozenset(
    getattr(gguf.GGMLQuantizationType, name)
    for name in ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
)


class ModelFile:
    """A GGUF file with a model."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.read_value("general.architecture"))

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
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def read_tensor(self, name: str) -> Floats:
        """Return a tensor as float32, its slowest dimension first."""
        tensor = self._tensors[name]
        values: Floats = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values

    def write_copy(self, path: Path, changed: Mapping[str, Floats], title: str) -> None:
        """Write a copy with other values of some tensors, in the same quantization if possible.

        changed: may have an output matrix that the file has not, which gets the embeddings' quantization.
        title: the name in the metadata of the copy.
        """
        writer = gguf.GGUFWriter(path, self.architecture)
        for field in self._reader.fields.values():
            if field.name.startswith("GGUF.") or field.name in (
                "general.architecture",
                "general.name",
            ):
                continue
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
        writer.add_name(title)
        for name in dict.fromkeys([*self._tensors, *changed]):
            tensor = self._tensors.get(name) or self._tensors[EMBEDDINGS]
            data, kind = tensor.data, tensor.tensor_type
            if name in changed:
                kind = kind if kind in _WRITABLE else gguf.GGMLQuantizationType.Q8_0
                data = gguf.quantize(changed[name], kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
