"""Collect everything that `localspec show` displays about a pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localspec.errors import DoesNotFit
from localspec.protocol.pairs import ContextView, DraftKind, FitView, ModelView, NeedView, PairView
from localspec.registry.header import fit, need
from localspec.registry.header.gguf import read_header
from localspec.registry.header.model import Model, check_shards, describe_model, shard_names
from localspec.registry.header.pairing import verdict
from localspec.registry.header.source import FileSource
from localspec.registry.header.traits import Traits, read_traits
from localspec.registry.store.records import Record, StoredModel
from localspec.registry.store.store import Store

_MIN_LISTED_CONTEXT = 4096  # tokens


def describe(store: Store, record: Record, free: fit.Memory, load: need.Load) -> PairView:
    """Return a pair as its files state now, with the memory needs for `load` and `free` memory.

    Raises:
        BadGguf, StoreError
    """
    models = [(stored, *_read_model(store, stored, role)) for role, stored in record.by_role]
    target, draft = models[0][1], models[1][1] if record.draft else None
    chosen, fit_notes = _fit_pair(target, draft, free, load)
    size = min(load.context, target.context)
    size = size or (chosen.context if chosen else min(fit.USUAL_CONTEXT, target.context))
    chosen_load = replace(load, context=size)

    def bytes_for(tokens: int) -> int:
        return fit.needed(target, draft, replace(load, context=tokens))

    judgement = verdict(target, draft) if draft else None
    need_functions = (need.need_of_target, need.need_of_draft)
    target_view, *draft_views = (
        _model_view(store, *item, need_of(item[1], chosen_load))
        for item, need_of in zip(models, need_functions, strict=False)
    )
    needs = ((tokens, bytes_for(tokens)) for tokens in _listed_contexts(target.context))
    return PairView(
        name=record.name,
        source=record.source,
        summary=record.summary,
        licence=record.licence,
        roles=record.purposes,
        created=record.created,
        size=record.size,
        target=target_view,
        draft=draft_views[0] if draft_views else None,
        matched=judgement.matched if judgement else None,
        reason=judgement.reason if judgement else "",
        notes=record.notes,
        context=size,
        needed=bytes_for(size),
        fit=chosen,
        fit_notes=fit_notes,
        loaded=False,
        kind=_draft_kind(record, target),
        contexts=[ContextView(tokens, total, fit.fits(total, free)) for tokens, total in needs],
        problem="",
    )


def _draft_kind(record: Record, target: Model) -> DraftKind:
    """Return what drafts, according to the file as it is now.

    The record may have been written by an older localspec.
    """
    if record.draft or record.target.pooling:
        return record.kind
    return "mtp-embedded" if target.drafting_heads else "ngram"


def _listed_contexts(longest: int) -> Iterator[int]:
    tokens = _MIN_LISTED_CONTEXT
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def _fit_pair(
    target: Model, draft: Model | None, free: fit.Memory, load: need.Load
) -> tuple[FitView | None, tuple[str, ...]]:
    try:
        fitted = fit.fit(target, draft, free, load)
    except DoesNotFit as error:
        return None, (error.message,)
    return fit_view(fitted), (fitted.beyond, *fitted.notes) if fitted.beyond else fitted.notes


def fit_view(fitted: fit.Fit) -> FitView:
    """Convert a fit to its form in the API."""
    target_need, drafting_need = (
        NeedView(memory_need.weights, memory_need.cache, memory_need.compute)
        for memory_need in (fitted.target, fitted.drafting)
    )
    return FitView(
        context=fitted.context,
        draft=fitted.draft,
        gpu_layers=fitted.gpu_layers,
        needed=fitted.needed,
        free=fitted.free,
        target=target_need,
        drafting=drafting_need,
        prefixes=fitted.prefixes,
        on_gpu=fitted.on_gpu,
        others=dict(fitted.others),
    )


def _read_model(store: Store, stored: StoredModel, role: str) -> tuple[Model, Traits]:
    """Read the headers of a stored model, under the original names of its files."""
    sources = [FileSource(store.part_path(part)) for part in stored.parts]
    for source, name in zip(sources, shard_names(Path(stored.file).name), strict=True):
        source.name = name
    headers = [read_header(source) for source in sources]
    check_shards(headers)
    model = describe_model(headers, as_draft=role == "draft")
    return replace(model, pooling=stored.pooling), read_traits(headers)


def _model_view(
    store: Store, stored: StoredModel, model: Model, model_traits: Traits, needed: need.Need
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
        has_template=model_traits.template is not None,
        weights=needed.weights,
        cache=needed.cache,
        compute=needed.compute,
        quantization=model_traits.quantization,
        types=model_traits.types,
        licence=model_traits.licence,
        template=model_traits.template,
        fim=model_traits.fim,
        heads=model_traits.heads,
        pooling=stored.pooling,
        width=model.width,
    )
