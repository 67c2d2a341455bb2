"""The model files of a pair, as the store has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from localspec.paths import default_paths
from localspec.registry.header.model import shard_names
from localspec.registry.store import integrity
from localspec.registry.store.store import Record, Store, StoredModel


def add_pair(name: str, folder: Path) -> dict[str, object]:
    """Put a pair's files into `folder`, and tell what `localspec add` must be given there.

    Raises:
        LocalspecError: there is no such pair, or a file of it is damaged.
    """
    store = Store(default_paths().store)
    record: Record = integrity.ensure_ready(store, name)
    entry: dict[str, object] = {"name": name, "roles": list(record.roles)}
    for role, model in (("target", record.target), ("draft", record.draft)):
        if model is not None:
            entry[role] = f"models/{name}/{role}/{_place(store, model, folder / name / role)}"
    return entry


def _place(store: Store, model: StoredModel, folder: Path) -> str:
    """Link (or copy) each part under the name llama.cpp knows it by; the first one's name."""
    names = shard_names(Path(model.file).name)
    folder.mkdir(parents=True)
    for part, name in zip(model.parts, names, strict=True):
        source = store.part_path(part).resolve()
        try:
            os.link(source, folder / name)
        except OSError:
            shutil.copyfile(source, folder / name)
    return names[0]
