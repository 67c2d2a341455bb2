"""The models on this disk and the pairs that can be made of them, as they go over the socket. Blocks."""

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
    """Every model in the places we know and in `folders`, with the pairs worth making.

    `environment` goes before the daemon's own; of it the names in MODEL_PLACES count.

    Raises:
        InvalidRequest: one of `folders` is not there.
    """
    from localspec.registry.disk import matches
    from localspec.registry.disk.discovery import Search

    for folder in folders:
        if not Path(folder).exists():
            raise InvalidRequest(f"There is no folder {folder}.", param="folders")
    seldom_told = seldom(report)

    def told(what: object) -> None:
        seldom_told(Disk(looking=str(what)))

    places = {name: environment[name] for name in MODEL_PLACES if name in environment}
    search = Search(
        registry.store, [Path(each) for each in folders], {**os.environ, **places}, told
    )
    models = matches.judge_all(search.models, told)
    paired = {str(each.path) for each in search.models if each.pair}
    pairs = matches.propose(models, paired, taken_names(registry), called())
    return Disk(models=models, pairs=pairs, problems=search.problems)


def taken_names(registry: Registry) -> set[str]:
    """What a new pair of the person's own is not to be called."""
    catalogue = registry.catalogue
    here = {record.name for record in registry.store.listing().records}
    return {*here, *catalogue.pairs, *catalogue.aliases}


def called() -> Callable[[str, Path], str]:
    """What `add` takes for a model: its name in Ollama where that leads there, else its path."""
    from localspec.registry.disk import ollama

    known: dict[str, Path | None] = {}
    for home in ollama.homes():
        for each in ollama.tagged(home):
            if each.file:
                known.setdefault(each.name, each.file)
    return lambda name, path: name if known.get(name) == path else str(path)
