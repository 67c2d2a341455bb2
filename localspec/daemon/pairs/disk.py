"""The models on this disk, and the pairs that can be made of them, as the API shows them. Blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from localspec.daemon.http.sse import seldom
from localspec.daemon.pairs.registry import Registry
from localspec.errors import InvalidRequest
from localspec.paths import MODEL_PLACES
from localspec.protocol.disk import Disk


def look(
    registry: Registry,
    folders: list[str],
    environment: Mapping[str, str],
    report: Callable[[Disk], None],
) -> Disk:
    """Return every model in the known places and in `folders`, with the pairs worth making.

    `environment` overrides the daemon's own variables, as far as they are in MODEL_PLACES.

    Raises:
        InvalidRequest: One of `folders` does not exist.
    """
    from localspec.registry.disk import matches
    from localspec.registry.disk.discovery import Search

    for folder in folders:
        if not Path(folder).exists():
            raise InvalidRequest(f"There is no folder {folder}.", param="folders")
    limited_report = seldom(report)

    def report_progress(place: object) -> None:
        limited_report(Disk(looking=str(place)))

    places = {name: environment[name] for name in MODEL_PLACES if name in environment}
    search = Search(
        registry.store,
        [Path(folder) for folder in folders],
        {**os.environ, **places},
        report_progress,
    )
    models = matches.judge_all(search.models, report_progress)
    paired = {str(model.path) for model in search.models if model.pair}
    pairs = matches.propose(models, paired, taken_names(registry), called())
    return Disk(models=models, pairs=pairs, problems=search.problems)


def taken_names(registry: Registry) -> set[str]:
    """Return the names that a new pair of the person's own files must not have."""
    catalogue = registry.catalogue
    installed = {record.name for record in registry.store.listing().records}
    return {*installed, *catalogue.pairs, *catalogue.aliases}


def called() -> Callable[[str, Path], str]:
    """Return a function that names a model as `add` accepts it.

    This is its name in Ollama if that name leads to the file, and else its path.
    """
    from localspec.registry.disk import ollama

    files: dict[str, Path | None] = {}
    for home in ollama.homes():
        for model in ollama.tagged(home):
            if model.file:
                files.setdefault(model.name, model.file)
    return lambda name, path: name if files.get(name) == path else str(path)
