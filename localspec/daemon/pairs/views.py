"""What the registry knows, as it goes over the socket. Blocks; for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.config import Config
from localspec.daemon.pairs import disk, upstreams
from localspec.daemon.pairs.measure import Interrupted, Trials
from localspec.daemon.pairs.names import (
    BUILTIN,
    builtin,
    files_of,
    full_name,
    names_files,
    unseen,
)
from localspec.daemon.pairs.registry import Registry
from localspec.daemon.worker import placement
from localspec.errors import Conflict, InvalidRequest, ModelNotFound
from localspec.protocol.disk import Drafts
from localspec.protocol.pairs import Original, PairEntry, PairList, PairView

if TYPE_CHECKING:
    from localspec.registry.catalogue import Catalogue, Pair, Preset, Weights
    from localspec.registry.disk.gain import Trial
    from localspec.registry.store.records import Record

BUILTIN_SUMMARY = "small built-in demo pair; knows only Python's standard library"


def listing(registry: Registry, everything: bool) -> PairList:
    """The pairs that are here, and with `everything` those of the catalogue."""
    from localspec.registry.header import fit
    from localspec.registry.store import integrity

    store = registry.store
    listed = store.listing()
    free = registry.memory()
    entries = _builtin_entries(registry)
    for record in listed.records:
        found = entry(record, registry.in_use)
        found.problem = integrity.glance(store, record)
        found.originals = _originals(registry.catalogue, record)
        if _has_own_template(registry, record.name):
            found.roles = record.roles
        entries.append(found)
    entries = [*filter(lambda each: each.name not in registry.catalogue.upstreams, entries)]
    entries += [upstreams.entry(*each) for each in registry.catalogue.upstreams.items()]
    here = {each.name for each in entries}
    for name, pair in registry.catalogue.pairs.items():
        if name in here:
            known = next(each for each in entries if each.name == name)
            known.aliases, known.memory, known.reported = pair.aliases, pair.memory, pair.reported
            known.year, known.context = pair.year, pair.context
        elif everything:
            entries.append(_catalogue_entry(name, pair))
        if everything:
            (known,) = (each for each in entries if each.name == name)
            known.fits = fit.fits(pair.estimated_bytes(), free)
    problems = [*listed.problems, *([registry.problem] if registry.problem else [])]
    return PairList(entries, problems, free.ram, free.vram)


def entry(record: Record, in_use: Callable[[str], bool]) -> PairEntry:
    return PairEntry(
        record.name,
        record.source,
        here=True,
        loaded=in_use(record.name),
        summary=record.summary,
        roles=record.purposes,
        licence=record.licence,
        size=record.size,
        target=record.target.file,
        draft=record.draft.file if record.draft else None,
        kind=record.kind,
        notes=record.notes,
    )


def _builtin_entries(registry: Registry) -> list[PairEntry]:
    """The pair inside the package; nothing where it was packaged without."""
    try:
        files = builtin()
    except ModelNotFound:
        return []
    size = sum(Path(each).stat().st_size for each in (files.target, files.draft) if each)
    found = PairEntry(
        BUILTIN,
        "builtin",
        here=True,
        loaded=registry.in_use(BUILTIN),
        summary=BUILTIN_SUMMARY,
        size=size,
        target=Path(files.target).name,
        draft=Path(files.draft).name if files.draft else None,
        fits="yes",
    )
    return [found]


def _catalogue_entry(name: str, pair: Pair) -> PairEntry:
    drafts = pair.draft or pair.heads
    sizes = [each.size_gib for each in (pair.target, drafts) if each]
    return PairEntry(
        name,
        "catalogue",
        here=False,
        summary=pair.summary,
        roles=pair.roles,
        licence=pair.licence,
        size=int(sum(sizes) * (1 << 30)) if all(sizes) else None,
        target=f"{pair.target.repo}/{pair.target.file}",
        draft=f"{drafts.repo}/{drafts.file}" if drafts else None,
        aliases=pair.aliases,
        memory=pair.memory,
        hybrid=pair.hybrid,
        reported=pair.reported,
        kind=pair.kind,
        year=pair.year,
        context=pair.context,
        originals=_named(pair.files),
    )


def _originals(catalogue: Catalogue, record: Record) -> tuple[Original, ...]:
    """By the repositories that its files came from, whichever pair the catalogue has them in."""
    pairs = catalogue.pairs.values()
    models = {each.repo: each for pair in pairs for each in (pair.draft, pair.target) if each}
    heads = {pair.heads.repo: pair.heads for pair in pairs if pair.heads}
    found = [models.get(record.target.repo)]
    if record.draft:
        found.append((heads if record.kind == "mtp-sidecar" else models).get(record.draft.repo))
    return _named(tuple(each for each in found if each)) if all(found) else ()


def _named(files: tuple[Weights, ...]) -> tuple[Original, ...]:
    """Theirs, where each is named."""
    if not all(each.weights for each in files):
        return ()
    return tuple(Original(each.weights, each.vocabulary) for each in files)


def details(
    registry: Registry, name: str, context: int, config: Config, *, by_tcp: bool = False
) -> PairView:
    """Everything about a pair that is here, counted for `context` tokens; `by_tcp`: who asks came by that.

    Raises:
        ModelNotFound, BadGguf, StoreError
    """
    from localspec import machine
    from localspec.registry.store import integrity, local
    from localspec.registry.store.details import describe

    if not name:  # a request's `model` may be empty, not a question about one pair
        raise registry.unknown(name)
    name = registry.called(full_name(name, config))
    if afar := registry.upstream(name):
        assert afar.upstream is not None
        return upstreams.view(afar.name, afar.upstream, by_tcp=by_tcp)
    if name == BUILTIN:
        files = builtin()
        draft = Path(files.draft) if files.draft else None
        record = local.describe_files(name, Path(files.target), draft)
    elif names_files(name):
        with unseen():
            files = files_of(name, registry)
            draft = Path(files.draft) if files.draft else None
            record = local.describe_files(name, Path(files.target), draft)
    else:
        record = registry.pulled(name)
    settings = placement.settings(config, registry.paths)
    load = replace(
        placement.load_of(settings, machine.installed_backend()), context=context or config.context
    )
    view = describe(registry.store, record, registry.memory(), load)
    if view.name == BUILTIN:
        view.source, view.summary = "builtin", BUILTIN_SUMMARY
    view.loaded = registry.in_use(record.name)
    view.problem = integrity.glance(registry.store, record)
    if _has_own_template(registry, record.name):
        view.roles = record.roles
    if preset := registry.catalogue.presets.get(record.name):
        view.notes += tuple(_said(preset))
    return view


def _has_own_template(registry: Registry, name: str) -> bool:
    """Return whether models.toml names a chat template for the pair, which replaces its file's."""
    preset = registry.catalogue.presets.get(name)
    return preset is not None and bool(preset.chat_template)


def _said(preset: Preset) -> Iterator[str]:
    """What goes before the target's own file."""
    if preset.chat_template:
        yield "Its chat template is the one that models.toml names."
    if preset.sampling:
        values = ", ".join(f"{key} {value:g}" for key, value in preset.sampling.items())
        yield f"Its sampling defaults are those of models.toml: {values}."
    if preset.rpc:
        yield f"Layers of its target are on other machines: {', '.join(preset.rpc)}."
    if preset.keep:
        yield "Once loaded it stays in memory (`keep` in models.toml)."


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
    call = disk.called()
    names = {each.path: each.name for each in models}  # a stored file is named by its hash

    def measure(ours: Path, draft: Path) -> Trial:
        assert trials is not None
        report(Drafts(target, measuring=names.get(draft, draft.name)))
        return trials(ours, draft)

    try:
        ranked = rank_drafts(Path(target), models, measure if trials else None, call)
    except Interrupted:
        raise Conflict("The engine was needed for a request; measure when it is idle.") from None
    finally:
        if trials:
            trials.end()
    ranked.target, ranked.file = target, call(found.name, found.path)
    ranked.pair = free_name(found.name, disk.taken_names(registry))
    return ranked
