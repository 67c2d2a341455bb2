"""Read the header of a projector, a file by which its target reads pictures (`mmproj-….gguf`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localspec.errors import BadGguf, NotMatched
from localspec.registry.header.gguf import FileSource, Header, Source, read_header
from localspec.registry.header.model import ModelInfo

ARCHITECTURE = "clip"
# Its process with the target's vocabulary and the rows that the worker keeps, and what encoding needs besides
# the weights, as a share of them.
_PROCESS_BYTES, _COMPUTE_SHARE = 328 << 20, 0.3
_PROJECTION_PREFIX = "mm."  # of the names of the tensors that lead to the target
_MAX_DIMENSIONS = 2  # of a tensor that computes what the target reads


@dataclass(frozen=True, slots=True)
class ProjectorInfo:
    """The numbers of a projector. kind: its type in llama.cpp. widths: numbers that a row may have."""

    name: str
    kind: str
    widths: frozenset[int]
    file_size: int

    @property
    def needed_bytes(self) -> int:
        """The memory that it needs, in a process of its own."""
        return projector_bytes(self.file_size)


def projector_bytes(file_size: int) -> int:
    """Return the memory that a projector with a file of this size needs, in a process of its own."""
    return int(file_size * (1 + _COMPUTE_SHARE)) + _PROCESS_BYTES


def read_projector(source: Source) -> ProjectorInfo:
    """Read and check the header of a projector.

    Raises:
        BadGguf: it is no projector, or one that reads no pictures.
    """
    header = read_header(source)
    metadata = header.metadata
    if metadata.get("general.architecture") != ARCHITECTURE:
        raise BadGguf(f"{header.name} is no projector (mmproj), by which a model reads pictures.")
    kinds = [metadata.get(f"clip.{part}projector_type") for part in ("vision.", "")]
    kind = next((kind for kind in kinds if isinstance(kind, str) and kind), "")
    if not metadata.get("clip.has_vision_encoder") or not kind:
        raise BadGguf(f"{header.name} is a projector that reads no pictures.")
    return ProjectorInfo(header.name, kind[:40], _read_widths(header), source.size)


def read_local_projector(path: Path) -> ProjectorInfo:
    """Read and check the projector at `path`. Raises BadGguf."""
    return read_projector(FileSource(path))


def _read_widths(header: Header) -> frozenset[int]:
    """Return the numbers that a row may have.

    Not all converters state them truly, so the sides of the last matrices count as well. llama.cpp is exact
    when it loads the file.
    """
    stated = header.metadata.get("clip.vision.projection_dim")
    sides = {
        side
        for tensor in header.tensors
        if tensor.name.startswith(_PROJECTION_PREFIX) and len(tensor.shape) <= _MAX_DIMENSIONS
        for side in tensor.shape
    }
    return frozenset(sides | ({stated} if isinstance(stated, int) else set()))


def check_projector(target: ModelInfo, projector: ProjectorInfo) -> None:
    """Check that a target can read what a projector computes. Raises NotMatched if it cannot."""
    if target.width not in projector.widths:
        raise NotMatched(
            f"{projector.name} is the projector of another model: it computes no rows of {target.width} "
            f"numbers, which {target.name} reads."
        )
