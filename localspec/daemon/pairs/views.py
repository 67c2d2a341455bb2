"""Pairs, lists of pairs and drafts as the API shows them. Blocks, so call it in a thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from localspec import extras
from localspec.config import Config
from localspec.daemon.http.sse import rate_limited
from localspec.daemon.pairs.names import hidden_file_errors, resolve_default
from localspec.daemon.pairs.tasks import DraftTrials, Interrupted
from localspec.daemon.worker.plan import engine_settings, memory_load
from localspec.errors import Conflict, InvalidRequest, LocalspecError, ModelNotFound
from localspec.paths import MODEL_FOLDER_VARIABLES
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import (
    Disk,
    Drafts,
    DraftView,
    Original,
    PairEntry,
    PairList,
    PairView,
)
from localspec.registry.catalogue import Catalogue, CataloguePair, HubFile, Preset
from localspec.registry.disk import discovery, drafts
from localspec.registry.disk.discovery import FoundModel
from localspec.registry.disk.drafts import Trial
from localspec.registry.header import fit
from localspec.registry.hub.outline import find_fitting, outline_forecast
from localspec.registry.registry import BUILTIN, Registry, builtin_files, is_file_name
from localspec.registry.store import integrity, local
from localspec.registry.store.store import Record
from localspec.registry.tuned import find_tuned_draft

BUILTIN_SUMMARY = "small built-in demo pair; knows only Python's standard library"


def search_disk(
    registry: Registry,
    folders: list[str],
    environment: Mapping[str, str],
    report: Callable[[Disk], None],
) -> Disk:
    """Return every model in the known places and in `folders`, with the pairs worth making.

    `environment`: variables of the client's shell. Of these, MODEL_FOLDER_VARIABLES override the daemon's.
    Raises InvalidRequest if one of `folders` does not exist.
    """
    _check_folders(folders)
    limited_report = rate_limited(report)

    def report_progress(place: object) -> None:
        limited_report(Disk(looking=str(place)))

    places = {name: environment[name] for name in MODEL_FOLDER_VARIABLES if name in environment}
    environment = {**os.environ, **places}
    search = discovery.DiskSearch(
        registry.store, [*map(Path, folders)], environment, report_progress
    )
    models = drafts.judge_all(search.models, report_progress)
    paired = {str(model.path) for model in search.models if model.pair}
    pairs = drafts.propose_pairs(models, paired, taken_names(registry), model_namer())
    return Disk(models=models, pairs=pairs, problems=search.problems)


def _check_folders(folders: list[str]) -> None:
    """Refuse folders that do not exist. A file of a model may take the place of a folder."""
    for folder in folders:
        if not Path(folder).exists():
            raise InvalidRequest(f"There is no folder {folder}.", param="folders")


def taken_names(registry: Registry) -> set[str]:
    """Return the names that a new pair of the person's own files must not have."""
    catalogue = registry.catalogue
    installed = {record.name for record in registry.store.listing().records}
    return {*installed, *catalogue.pairs, *catalogue.aliases}


def model_namer() -> Callable[[str, Path], str]:
    """Return a function that names a model as `add` accepts it.

    This is its name in Ollama if that name leads to the file, and else its path.
    """
    files: dict[str, Path | None] = {}
    for home in discovery.model_folders():
        for model in discovery.list_models(home):
            if model.file:
                files.setdefault(model.name, model.file)
    return lambda name, path: name if files.get(name) == path else str(path)


def list_pairs(registry: Registry, everything: bool, config: Config) -> PairList:
    """Return the installed pairs, and with `everything` those of the catalogue too, with forecasts."""
    store = registry.store
    stored = store.listing()
    free = registry.free_memory()
    load = _load_options(registry, config, free)
    entries = []
    with contextlib.suppress(ModelNotFound):  # it may be missing in the package
        files = builtin_files()
        paths = [Path(path) for path in (files.target, files.draft) if path]
        entries.append(
            PairEntry(
                BUILTIN,
                "builtin",
                here=True,
                loaded=registry.in_use(BUILTIN),
                summary=BUILTIN_SUMMARY,
                size=sum(path.stat().st_size for path in paths),
                target=paths[0].name,
                draft=paths[1].name if files.draft else None,
                fits="yes",
            )
        )
    for record in stored.records:
        shown = pair_entry(record, registry.in_use)
        shown.problem = integrity.find_quick_problem(store, record)
        shown.originals = _originals(registry.catalogue, record)
        if _has_own_template(registry, record.name):
            shown.roles = record.roles
        if everything and not shown.problem:
            with contextlib.suppress(LocalspecError):  # `problem` or `show` says what is wrong
                shown.forecast = local.forecast_pair(store, record, free, load)
        entries.append(shown)
    entries = [entry for entry in entries if entry.name not in registry.catalogue.upstreams]
    if registry.catalogue.upstreams and (upstreams := extras.load("upstream", "pairs")):
        entries += [
            upstreams.upstream_entry(*item) for item in registry.catalogue.upstreams.items()
        ]
    _add_catalogue(registry.catalogue, entries, everything, free, load)
    problems = [*stored.problems, *([registry.problem] if registry.problem else [])]
    return PairList(entries, problems, free.ram, free.vram)


def _add_catalogue(
    catalogue: Catalogue,
    entries: list[PairEntry],
    everything: bool,
    free: fit.FreeMemory,
    load: fit.LoadOptions,
) -> None:
    """Add what the catalogue says to the entries, and with `everything` its other pairs."""
    entry_by_name = {entry.name: entry for entry in entries}
    for name, pair in catalogue.pairs.items():
        known = entry_by_name.get(name)
        if known is not None:
            known.aliases, known.memory, known.reported = pair.aliases, pair.memory, pair.reported
            known.year, known.context = pair.year, pair.context
        elif everything:
            known = _catalogue_entry(name, pair)
            entries.append(known)
        if everything and known is not None:
            known.fits = fit.judge_fit(pair.estimated_bytes(), free)
            if known.fits == "no":
                known.advice = find_fitting(pair, free)
            elif not known.here:
                known.forecast = outline_forecast(pair, free, load)


def pair_entry(record: Record, in_use: Callable[[str], bool]) -> PairEntry:
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


def _catalogue_entry(name: str, pair: CataloguePair) -> PairEntry:
    drafts = pair.draft or pair.sidecar
    sizes = [weights.size_gib for weights in (pair.target, drafts) if weights]
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
        kind=pair.draft_kind,
        year=pair.year,
        context=pair.context,
        originals=_to_originals(pair.files),
    )


def _originals(catalogue: Catalogue, record: Record) -> tuple[Original, ...]:
    """Return the original models of a pair, which any pair of the catalogue may have the files of."""
    pairs = catalogue.pairs.values()
    models = {
        weights.repo: weights for pair in pairs for weights in (pair.draft, pair.target) if weights
    }
    sidecars = {pair.sidecar.repo: pair.sidecar for pair in pairs if pair.sidecar}
    files = [models.get(record.target.repo)]
    if record.draft:
        files.append((models if record.kind == "model" else sidecars).get(record.draft.repo))
    return _to_originals(tuple(weights for weights in files if weights)) if all(files) else ()


def _to_originals(files: tuple[HubFile, ...]) -> tuple[Original, ...]:
    """Return the original models of files, or nothing if one of them has none."""
    if not all(file.weights for file in files):
        return ()
    return tuple(Original(file.weights, file.vocabulary) for file in files)


def pair_details(
    registry: Registry, name: str, context: int, config: Config, *, by_tcp: bool = False
) -> PairView:
    """Return everything about an installed pair, computed for a context of `context` tokens.

    `by_tcp`: whether the request came over TCP. Raises ModelNotFound if there is no such pair, and BadGguf or
    StoreError if its files cannot be read.
    """
    if not name:  # a request for an answer may leave `model` empty, but this one must name a pair
        raise registry.unknown_pair_error(name)
    name = registry.resolve_alias(resolve_default(name, config))
    if upstream_pair := registry.upstream(name):
        assert upstream_pair.upstream is not None
        upstreams = extras.load("upstream", "pairs")
        assert upstreams is not None, "without this extra, the catalogue has no such pairs"
        server = upstream_pair.upstream
        view: PairView = upstreams.upstream_view(upstream_pair.name, server, by_tcp=by_tcp)
        return view
    if name == BUILTIN or is_file_name(name):
        with hidden_file_errors() if name != BUILTIN else contextlib.nullcontext():
            files = builtin_files() if name == BUILTIN else registry.files_of(name)
            draft = Path(files.draft) if files.draft else None
            record = local.recall_record(name, Path(files.target), draft)
    else:
        record = registry.installed(name)
    free = registry.free_memory()
    load = replace(_load_options(registry, config, free), context=context or config.context)
    view = local.describe_pair(registry.store, record, free, load)
    if view.name == BUILTIN:
        view.source, view.summary = "builtin", BUILTIN_SUMMARY
    if not is_file_name(view.name):  # a name of files means exactly these
        own = view.draft.path if view.draft else ""
        tuned = find_tuned_draft(registry.paths.tuned, view.target.path, own)
        view.tuned = tuned[1] if tuned else None
    view.loaded = registry.in_use(record.name)
    view.problem = integrity.find_quick_problem(registry.store, record)
    if _has_own_template(registry, record.name):
        view.roles = record.roles
    if preset := registry.catalogue.presets.get(record.name):
        view.notes += tuple(_preset_notes(preset))
        view.rpc = preset.rpc
    return view


def _load_options(registry: Registry, config: Config, free: fit.FreeMemory) -> fit.LoadOptions:
    """Return how a pair would be loaded. Only with NVIDIA's driver is it known what lies on a GPU."""
    from localspec import machine

    built = machine.installed_backend()
    load = memory_load(engine_settings(config, registry.paths), built)
    return replace(load, foreseeable=fit.can_foresee(built, free))


def _has_own_template(registry: Registry, name: str) -> bool:
    """Return whether models.toml names a chat template for the pair, which replaces its file's."""
    preset = registry.catalogue.presets.get(name)
    return preset is not None and bool(preset.chat_template)


def _preset_notes(preset: Preset) -> Iterator[str]:
    """Yield a note for each setting of models.toml that overrides the target's own file."""
    if preset.chat_template:
        yield "Its chat template is the one that models.toml names."
    if preset.sampling:
        values = ", ".join(f"{key} {value:g}" for key, value in preset.sampling.items())
        yield f"Its sampling defaults are those of models.toml: {values}."
    if preset.rpc:
        yield f"Layers of its target are on other machines: {', '.join(preset.rpc)}."
    if preset.keep:
        yield "Once loaded it stays in memory (`keep` in models.toml)."


def rank_drafts_for(
    registry: Registry,
    pair: PairFiles,
    folders: list[str],
    config: Config,
    trials: DraftTrials | None,
    report: Callable[[Drafts], None],
) -> Drafts:
    """Return all that could draft for the target of a pair.

    That is what drafts in the pair, heads in the target's file and every model and sidecar on this disk.
    With `trials`, matching ones are measured.

    Raises:
        InvalidRequest: A folder does not exist.
        BadGguf: The target cannot be read.
        Conflict: The engine is needed for a request.
    """
    _check_folders(folders)
    target = pair.target
    models = discovery.find_models(registry.store, map(Path, folders))
    found = {model.path.resolve() for model in models}
    own = [Path(draft) for draft in (pair.draft, *pair.other_drafts) if draft]
    others = [draft for draft in own if draft.resolve() not in found]
    models += [FoundModel(draft, draft.name, f"pair {pair.name}") for draft in others]
    target_path = Path(target).resolve()
    model = next((model for model in models if model.path.resolve() == target_path), None)
    model = model or FoundModel(Path(target), target_path.name, "")
    to_name = model_namer()

    def measure(draft: DraftView) -> Trial:
        assert trials is not None
        report(Drafts(target, measuring=draft.name))
        return trials(Path(target), draft)

    try:
        ranked = drafts.rank_drafts(Path(target), models, measure if trials else None, to_name)
        free = registry.free_memory()
        drafts.add_forecasts(ranked, free, _load_options(registry, config, free))
    except Interrupted:
        raise Conflict("The engine was needed for a request; measure when it is idle.") from None
    finally:
        if trials:
            trials.end()
    ranked.target, ranked.file = target, to_name(model.name, model.path)
    ranked.pair = drafts.free_name(model.name, taken_names(registry))
    return ranked
