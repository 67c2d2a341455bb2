"""What the registry knows, as it goes over the socket. Blocks; for threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from localspec.config import Config
from localspec.daemon.pairs import disk
from localspec.daemon.pairs import names as pairs
from localspec.daemon.pairs.measure import Interrupted, Trials
from localspec.daemon.pairs.registry import Registry
from localspec.errors import Conflict, DoesNotFit, InvalidRequest, ModelNotFound
from localspec.protocol.pairs import (
    ContextView,
    DraftGain,
    Drafts,
    DraftView,
    FitView,
    ModelView,
    PairEntry,
    PairList,
    PairView,
    TemplateView,
)

if TYPE_CHECKING:
    from localspec.registry.catalogue import Pair
    from localspec.registry.disk.discovery import Found
    from localspec.registry.disk.drafts import Candidate
    from localspec.registry.disk.gain import Trial
    from localspec.registry.header.fit import Memory
    from localspec.registry.header.model import Model
    from localspec.registry.header.traits import Template
    from localspec.registry.store.details import Details, ModelDetails
    from localspec.registry.store.records import Record, StoredModel

BUILTIN_SUMMARY = "the small pair that comes with localspec"


def listing(registry: Registry, everything: bool) -> PairList:
    """The pairs that are here, and with `everything` those of the catalogue."""
    listed = registry.store.listing()
    free = registry.memory()
    entries = _builtin_entries(registry)
    store = registry.store
    for record in listed.records:
        found = entry(record, registry.in_use)
        found.problem = store.glance(record)
        entries.append(found)
    here = {each.name for each in entries}
    for name, pair in registry.catalogue.pairs.items():
        if name in here:
            known = next(each for each in entries if each.name == name)
            known.aliases, known.memory, known.reported = pair.aliases, pair.memory, pair.reported
            known.kind, known.year, known.context = pair.kind, pair.year, pair.context
        elif everything:
            entries.append(_catalogue_entry(name, pair))
        if everything:
            (known,) = (each for each in entries if each.name == name)
            known.fits = _fits(pair.estimated_bytes(), free)
    problems = [*listed.problems, *([registry.problem] if registry.problem else [])]
    return PairList(entries, problems, free.ram, free.vram)


def entry(record: Record, in_use: Callable[[str], bool]) -> PairEntry:
    return PairEntry(
        record.name,
        record.source,
        here=True,
        loaded=in_use(record.name),
        summary=record.summary,
        roles=record.roles,
        licence=record.licence,
        size=record.size,
        target=record.target.file,
        draft=record.draft.file if record.draft else None,
        kind="model" if record.draft else "ngram",
        notes=record.notes,
    )


def _builtin_entries(registry: Registry) -> list[PairEntry]:
    """The pair inside the package; nothing where it was packaged without."""
    try:
        files = pairs.builtin()
    except ModelNotFound:
        return []
    size = sum(Path(each).stat().st_size for each in (files.target, files.draft) if each)
    found = PairEntry(
        pairs.BUILTIN,
        "builtin",
        here=True,
        loaded=registry.in_use(pairs.BUILTIN),
        summary=BUILTIN_SUMMARY,
        size=size,
        target=Path(files.target).name,
        draft=Path(files.draft).name if files.draft else None,
        fits="yes",
    )
    return [found]


def _catalogue_entry(name: str, pair: Pair) -> PairEntry:
    sizes = [each.size_gib for each in (pair.target, pair.draft) if each]
    return PairEntry(
        name,
        "catalogue",
        here=False,
        summary=pair.summary,
        roles=pair.roles,
        licence=pair.licence,
        size=int(sum(sizes) * (1 << 30)) if all(sizes) else None,
        target=f"{pair.target.repo}/{pair.target.file}",
        draft=f"{pair.draft.repo}/{pair.draft.file}" if pair.draft else None,
        aliases=pair.aliases,
        memory=pair.memory,
        hybrid=pair.hybrid,
        reported=pair.reported,
        kind=pair.kind,
        year=pair.year,
        context=pair.context,
    )


def _fits(needed: int, free: Memory) -> Literal["yes", "partly", "no"]:
    if needed <= (free.vram or free.ram):
        return "yes"
    return "partly" if needed <= free.vram + free.ram else "no"


def details(registry: Registry, name: str, context: int, config: Config) -> PairView:
    """Everything about a pair that is here, counted for `context` tokens.

    Raises:
        ModelNotFound, BadGguf, StoreError
    """
    from localspec.registry.store import local
    from localspec.registry.store.details import describe, stored_model

    if not name:  # a request's `model` may be empty, not a question about one pair
        raise registry.unknown(name)
    name = pairs.full_name(name, config)
    if name == pairs.BUILTIN:
        files = pairs.builtin()
        draft = Path(files.draft) if files.draft else None
        record = local.describe_files(name, Path(files.target), draft)
    elif pairs.names_files(name):
        with pairs.unseen():
            files = pairs.from_files(name)
            draft = Path(files.draft) if files.draft else None
            record = local.describe_files(name, Path(files.target), draft)
    else:
        record = registry.pulled(name)
    found = describe(registry.store, record, context, kv_type=config.kv_type)
    target = stored_model(registry.store, record.target)
    theirs = stored_model(registry.store, record.draft) if record.draft else None
    free = registry.memory()
    chosen, notes = _fit(target, theirs, free, context, config)
    view = _details(found, chosen, notes, registry.in_use(record.name))
    view.contexts = [ContextView(*each, _fits(each[1], free)) for each in found.by_context]
    view.problem = registry.store.glance(record)
    known = registry.catalogue.pairs.get(record.name)
    if known and record.source == "hub":
        view.kind = known.kind
    return view


def _fit(
    target: Model, draft: Model | None, free: Memory, context: int, config: Config
) -> tuple[FitView | None, tuple[str, ...]]:
    from localspec.registry.header import fit

    try:
        chosen = fit.fit(target, draft, free, context=context, kv_type=config.kv_type)
    except DoesNotFit as error:
        return None, (error.message,)
    view = FitView(chosen.context, chosen.draft, chosen.gpu_layers, chosen.needed, chosen.free)
    return view, chosen.notes


def _details(
    found: Details, chosen: FitView | None, fit_notes: tuple[str, ...], loaded: bool
) -> PairView:
    record = found.record
    builtin = record.name == pairs.BUILTIN
    return PairView(
        name=record.name,
        source="builtin" if builtin else record.source,
        summary=BUILTIN_SUMMARY if builtin else record.summary,
        licence=record.licence,
        roles=record.roles,
        created=record.created,
        size=record.size,
        target=_model(record.target, found.target),
        draft=_model(record.draft, found.draft) if record.draft and found.draft else None,
        matched=found.verdict.matched if found.verdict else None,
        reason=found.verdict.reason if found.verdict else "",
        notes=record.notes,
        context=found.context,
        needed=found.needed,
        fit=chosen,
        fit_notes=fit_notes,
        loaded=loaded,
        kind="model" if found.draft else "mtp-embedded" if found.target.traits.heads else "ngram",
        contexts=[],
        problem="",
    )


def _model(stored: StoredModel, found: ModelDetails) -> ModelView:
    traits, template = found.traits, found.traits.template
    return ModelView(
        file=stored.file,
        path=str(found.path),
        repo=stored.repo,
        revision=stored.revision,
        sha256=stored.parts[0].sha256,
        architecture=found.architecture,
        parameters=found.parameters,
        layers=found.layers,
        context=found.context,
        vocabulary=found.vocabulary,
        size=found.size,
        rollback=found.rollback,
        has_template=traits.template is not None,
        weights=found.need.weights,
        cache=found.need.cache,
        compute=found.need.compute,
        quantization=traits.quantization,
        types=traits.types,
        licence=traits.licence,
        template=_template(template) if template else None,
        fim=traits.fim,
        heads=traits.heads,
    )


def _template(template: Template) -> TemplateView:
    return TemplateView(
        sha256=hashlib.sha256(template.text.encode()).hexdigest(),
        length=len(template.text),
        tools=template.tools,
        system=template.system,
        text=template.text,
    )


def drafts(
    registry: Registry,
    target: str,
    folders: list[str],
    trials: Trials | None,
    report: Callable[[Drafts], None],
) -> Drafts:
    """Every model on this disk as a draft for `target`; with `trials` those that match measured.

    Raises:
        InvalidRequest: a folder. BadGguf: the target. Conflict: the engine is needed elsewhere.
    """
    from localspec.registry.disk.discovery import Found, find_models
    from localspec.registry.disk.drafts import rank_drafts
    from localspec.registry.disk.matches import free_name

    for folder in folders:
        if not Path(folder).is_dir():
            raise InvalidRequest(f"There is no folder {folder}.", param="folders")
    models = find_models(registry.store, map(Path, folders))
    own = Path(target).resolve()
    found = next((each for each in models if each.path.resolve() == own), None)
    found = found or Found(Path(target), own.name, "")
    pair, call = free_name(found.name, disk.taken_names(registry)), disk.called()
    if trials is None:
        ranked = rank_drafts(Path(target), models)
        views = [_draft(each, call) for each in ranked]
        return Drafts(target, drafts=views, file=call(found), pair=pair)
    measured = trials
    names = {each.path: each.name for each in models}  # a stored file is named by its hash

    def measure(ours: Path, draft: Path) -> Trial:
        report(Drafts(target, measuring=names.get(draft, draft.name)))
        return measured(ours, draft)

    try:
        ranked = rank_drafts(Path(target), models, measure)
    except Interrupted:
        raise Conflict("The engine was needed for a request; measure when it is idle.") from None
    finally:
        measured.end()
    plain = next((each.gain.plain for each in ranked if each.gain), None)
    views = [_draft(each, call) for each in ranked]
    return Drafts(target, plain=plain, drafts=views, file=call(found), pair=pair)


def _draft(each: Candidate, call: Callable[[Found], str]) -> DraftView:
    return DraftView(
        name=each.found.name,
        path=str(each.found.path),
        origin=each.found.origin,
        size=each.size,
        ratio=each.ratio,
        matched=each.matched,
        reason=each.reason,
        notes=each.notes,
        gain=msgspec.convert(each.gain, DraftGain, from_attributes=True) if each.gain else None,
        tied=each.tied,
        file=call(each.found),
    )
