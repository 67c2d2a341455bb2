"""Everything `localspec show` says about a pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from localspec.errors import DoesNotFit
from localspec.protocol.pairs import ContextView, FitView, ModelView, PairView
from localspec.registry.header import fit
from localspec.registry.header.gguf import read_header
from localspec.registry.header.model import Model, check_shards, shard_names
from localspec.registry.header.model import describe as model_of
from localspec.registry.header.pairing import verdict
from localspec.registry.header.source import FileSource
from localspec.registry.header.traits import Traits, traits
from localspec.registry.store.records import Record, StoredModel
from localspec.registry.store.store import Store

_SHORT = 4096  # tokens: the shortest context that is worth a line


def describe(
    store: Store, record: Record, free: fit.Memory, context: int = 0, *, kv_type: str = "f16"
) -> PairView:
    """A pair as its files say now, counted for `context` tokens, 0: the usual, and `free` memory.

    Raises:
        BadGguf, StoreError
    """
    models = [(each, *_read(store, each)) for each in record.models]
    target, draft = models[0][1], models[1][1] if record.draft else None
    longest = fit.longest_context(target, draft)
    size = min(context or fit.USUAL_CONTEXT, longest)

    def bytes_for(tokens: int) -> int:
        needs = (fit.need(each, tokens, kv_type=kv_type) for _, each, _ in models)
        return fit.RUNTIME + sum(need.total for need in needs)

    judged = verdict(target, draft) if draft else None
    ours, *theirs = (
        _model(store, *each, fit.need(each[1], size, kv_type=kv_type)) for each in models
    )
    chosen, fit_notes = _fit(target, draft, free, context, kv_type)
    needs = ((tokens, bytes_for(tokens)) for tokens in _contexts(longest))
    return PairView(
        name=record.name,
        source=record.source,
        summary=record.summary,
        licence=record.licence,
        roles=record.roles,
        created=record.created,
        size=record.size,
        target=ours,
        draft=theirs[0] if theirs else None,
        matched=judged.matched if judged else None,
        reason=judged.reason if judged else "",
        notes=record.notes,
        context=size,
        needed=bytes_for(size),
        fit=chosen,
        fit_notes=fit_notes,
        loaded=False,
        kind="model" if draft else "mtp-embedded" if ours.heads else "ngram",
        contexts=[ContextView(tokens, need, fit.fits(need, free)) for tokens, need in needs],
        problem="",
    )


def _contexts(longest: int) -> Iterator[int]:
    tokens = _SHORT
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def _fit(
    target: Model, draft: Model | None, free: fit.Memory, context: int, kv_type: str
) -> tuple[FitView | None, tuple[str, ...]]:
    try:
        chosen = fit.fit(target, draft, free, context=context, kv_type=kv_type)
    except DoesNotFit as error:
        return None, (error.message,)
    view = FitView(chosen.context, chosen.draft, chosen.gpu_layers, chosen.needed, chosen.free)
    return view, (chosen.beyond, *chosen.notes) if chosen.beyond else chosen.notes


def _read(store: Store, stored: StoredModel) -> tuple[Model, Traits]:
    """What the headers of a model say, under the names its files had."""
    sources = [FileSource(store.part_path(part)) for part in stored.parts]
    for source, name in zip(sources, shard_names(Path(stored.file).name), strict=True):
        source.name = name
    headers = [read_header(source) for source in sources]
    check_shards(headers)
    return model_of(headers), traits(headers)


def _model(
    store: Store, stored: StoredModel, model: Model, found: Traits, need: fit.Need
) -> ModelView:
    return ModelView(
        file=stored.file,
        path=str(store.part_path(stored.parts[0])),
        repo=stored.repo,
        revision=stored.revision,
        sha256=stored.parts[0].sha256,
        architecture=model.architecture,
        parameters=model.parameters,
        layers=model.layers,
        context=model.context,
        vocabulary=model.vocabulary,
        size=model.file_size,
        rollback=model.rollback,
        has_template=found.template is not None,
        weights=need.weights,
        cache=need.cache,
        compute=need.compute,
        quantization=found.quantization,
        types=found.types,
        licence=found.licence,
        template=found.template,
        fim=found.fim,
        heads=found.heads,
    )
