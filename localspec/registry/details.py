"""Everything `localspec show` says about a pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localspec.registry import fit
from localspec.registry.architectures import Rollback
from localspec.registry.gguf import FileSource
from localspec.registry.model import Model, read_model, shard_names
from localspec.registry.pairing import verdict
from localspec.registry.records import Record, StoredModel
from localspec.registry.store import Store
from localspec.registry.tokenizer import Verdict


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
    has_template: bool
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


def show(store: Store, name: str, context: int = 0, *, kv_type: str = "f16") -> Details:
    """The details of a pair of the store.

    Raises:
        ModelNotFound, BadGguf
    """
    return describe(store, store.get(name), context, kv_type=kv_type)


def describe(store: Store, record: Record, context: int = 0, *, kv_type: str = "f16") -> Details:
    """Read a pair's headers and count what it needs; `context` 0 takes the usual one."""
    target = stored_model(store, record.target)
    draft = stored_model(store, record.draft) if record.draft else None
    longest = fit.longest_context(target, draft)
    size = min(context or fit.USUAL_CONTEXT, longest)
    ours = _details(store, record.target, target, size, kv_type)
    theirs = _details(store, record.draft, draft, size, kv_type) if record.draft and draft else None
    needed = ours.need.total + (theirs.need.total if theirs else 0) + fit.RUNTIME
    judged = verdict(target, draft) if draft else None
    return Details(record, ours, theirs, judged, size, needed)


def stored_model(store: Store, model: StoredModel) -> Model:
    """The headers of a model of the store, under the names its files had."""
    sources = [FileSource(store.part_path(part)) for part in model.parts]
    for source, name in zip(sources, shard_names(Path(model.file).name), strict=True):
        source.name = name
    return read_model(sources)


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
        has_template=bool(model.template_hash),
        need=fit.need(model, context, kv_type=kv_type),
    )
