"""Find the projector of a target, by which it reads pictures, among the files beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.registry.file_names import is_projector, rank_projectors
from localspec.registry.header.model import ModelInfo
from localspec.registry.header.projector import check_projector, read_local_projector


def list_projectors(target: Path) -> list[Path]:
    """Return the files in the folder of a target whose names look like a projector's, the best first."""
    sizes = {
        path.name: path.stat().st_size
        for path in target.parent.glob("*.[gG][gG][uU][fF]")
        if is_projector(path.name) and path.is_file()
    }
    return [target.with_name(name) for name in rank_projectors(sizes, target.name)]


def find_projector(candidates: Iterable[Path], model: ModelInfo) -> Path | None:
    """Return the first projector that fits a target, or None. model: the target's header."""
    if model.pooling:
        return None
    for path in candidates:
        try:
            check_projector(model, read_local_projector(path))
        except LocalspecError:
            continue
        return path
    return None
