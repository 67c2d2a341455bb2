"""Everything `localspec show` says about a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localspec.errors import DoesNotFit
from localspec.protocol.pairs import ContextView, DraftKind, FitView, ModelView, NeedView, PairView
from localspec.registry.header import fit, need
from localspec.registry.header.gguf import read_header
from localspec.registry.header.model import Model, check_shards, shard_names
from localspec.registry.header.model import describe as model_of
from localspec.registry.header.pairing import verdict
from localspec.registry.header.source import FileSource
from localspec.registry.header.traits import Traits, traits
from localspec.registry.store.records import Record, StoredModel
from localspec.registry.store.store import Store

_SHORT = 4096  # tokens: the shortest context that is worth a line


def describe(store: Store, record: Record, free: fit.Memory, load: need.Load) -> PairView:
    """A pair as its files say now, counted for `load` and `free` memory.

    Raises:
        BadGguf, StoreError
    """
    models = [(each, *_read(store, each, role)) for role, each in record.by_role]
    target, draft = models[0][1], models[1][1] if record.draft else None
    chosen, fit_notes = _fit(target, draft, free, load)
    size = min(load.context, target.context)
    size = size or (chosen.context if chosen else min(fit.USUAL_CONTEXT, target.context))
    counted = replace(load, context=size)

    def bytes_for(tokens: int) -> int:
        return fit.needed(target, draft, replace(load, context=tokens))

    judged = verdict(target, draft) if draft else None
    needed = (need.need_of_target, need.need_of_draft)
    ours, *theirs = (
        _model(store, *each, of(each[1], counted)) for each, of in zip(models, needed, strict=False)
    )
    needs = ((tokens, bytes_for(tokens)) for tokens in _contexts(target.context))
    return PairView(
        name=record.name,
        source=record.source,
        summary=record.summary,
        licence=record.licence,
        roles=record.purposes,
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
        kind=_kind(record, target),
        contexts=[ContextView(tokens, total, fit.fits(total, free)) for tokens, total in needs],
        problem="",
    )


def _kind(record: Record, target: Model) -> DraftKind:
    """By what the file says now: an older localspec may have written the record."""
    if record.draft or record.target.pooling:
        return record.kind
    return "mtp-embedded" if target.drafting_heads else "ngram"


def _contexts(longest: int) -> Iterator[int]:
    tokens = _SHORT
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def _fit(
    target: Model, draft: Model | None, free: fit.Memory, load: need.Load
) -> tuple[FitView | None, tuple[str, ...]]:
    try:
        chosen = fit.fit(target, draft, free, load)
    except DoesNotFit as error:
        return None, (error.message,)
    return fit_view(chosen), (chosen.beyond, *chosen.notes) if chosen.beyond else chosen.notes


def fit_view(chosen: fit.Fit) -> FitView:
    ours, theirs = (
        NeedView(each.weights, each.cache, each.compute)
        for each in (chosen.target, chosen.drafting)
    )
    return FitView(
        context=chosen.context,
        draft=chosen.draft,
        gpu_layers=chosen.gpu_layers,
        needed=chosen.needed,
        free=chosen.free,
        target=ours,
        drafting=theirs,
        prefixes=chosen.prefixes,
        on_gpu=chosen.on_gpu,
        others=dict(chosen.others),
    )


def _read(store: Store, stored: StoredModel, role: str) -> tuple[Model, Traits]:
    """What the headers of a model say, under the names its files had."""
    sources = [FileSource(store.part_path(part)) for part in stored.parts]
    for source, name in zip(sources, shard_names(Path(stored.file).name), strict=True):
        source.name = name
    headers = [read_header(source) for source in sources]
    check_shards(headers)
    model = model_of(headers, as_draft=role == "draft")
    return replace(model, pooling=stored.pooling), traits(headers)


def _model(
    store: Store, stored: StoredModel, model: Model, found: Traits, needed: need.Need
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
        weights=needed.weights,
        cache=needed.cache,
        compute=needed.compute,
        quantization=found.quantization,
        types=found.types,
        licence=found.licence,
        template=found.template,
        fim=found.fim,
        heads=found.heads,
        pooling=stored.pooling,
        width=model.width,
    )
