"""Everything `localspec show` says about a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.registry.header import fit
from localspec.registry.header.architectures import Rollback
from localspec.registry.header.gguf import FileSource, read_header
from localspec.registry.header.model import Model, read_model, shard_names
from localspec.registry.header.pairing import Verdict, verdict
from localspec.registry.header.traits import Traits, traits
from localspec.registry.store.records import Record, StoredModel
from localspec.registry.store.store import Store

_SHORT = 4096  # tokens: the shortest context that is worth a line


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """One model of a pair. Sizes in bytes, `context` in tokens as trained."""

    path: Path
    architecture: str
    parameters: int
    layers: int
    context: int
    vocabulary: int
    size: int
    rollback: Rollback
    traits: Traits
    need: fit.Need


@dataclass(frozen=True, slots=True)
class Details:
    """A pair as its files say now. `context` is the one `needed` bytes are counted for."""

    record: Record
    target: ModelDetails
    draft: ModelDetails | None
    verdict: Verdict | None
    context: int
    needed: int
    by_context: tuple[tuple[int, int], ...]  # tokens, bytes: doubling up to what the models know


def describe(store: Store, record: Record, context: int = 0, *, kv_type: str = "f16") -> Details:
    """Read a pair's headers and count what it needs; `context` 0 takes the usual one."""
    target = stored_model(store, record.target)
    draft = stored_model(store, record.draft) if record.draft else None
    longest = fit.longest_context(target, draft)
    size = min(context or fit.USUAL_CONTEXT, longest)

    def bytes_for(tokens: int) -> int:
        models = (target, draft) if draft else (target,)
        return fit.RUNTIME + sum(fit.need(m, tokens, kv_type=kv_type).total for m in models)

    ours = _details(store, record.target, target, size, kv_type)
    theirs = _details(store, record.draft, draft, size, kv_type) if record.draft and draft else None
    judged = verdict(target, draft) if draft else None
    by_context = tuple((tokens, bytes_for(tokens)) for tokens in _contexts(longest))
    return Details(record, ours, theirs, judged, size, bytes_for(size), by_context)


def _contexts(longest: int) -> Iterator[int]:
    tokens = _SHORT
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def stored_model(store: Store, model: StoredModel) -> Model:
    """The headers of a model of the store, under the names its files had."""
    sources = [FileSource(store.part_path(part)) for part in model.parts]
    for source, name in zip(sources, shard_names(Path(model.file).name), strict=True):
        source.name = name
    return read_model(sources)


def stored_traits(store: Store, model: StoredModel) -> Traits:
    return traits([read_header(FileSource(store.part_path(part))) for part in model.parts])


def _details(
    store: Store, stored: StoredModel, model: Model, context: int, kv_type: str
) -> ModelDetails:
    return ModelDetails(
        path=store.part_path(stored.parts[0]),
        architecture=model.architecture,
        parameters=model.parameters,
        layers=model.layers,
        context=model.context,
        vocabulary=model.vocabulary,
        size=model.file_size,
        rollback=model.rollback,
        traits=stored_traits(store, stored),
        need=fit.need(model, context, kv_type=kv_type),
    )
