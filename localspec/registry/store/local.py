"""Pairs of the user's own files, checked as in a pull and used where they lie, and what pairs' files say."""

from __future__ import annotations

import contextlib
import functools
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from localspec.errors import BadGguf, Conflict, DoesNotFit, InvalidRequest, ModelNotFound
from localspec.protocol.pairs import (
    ContextView,
    FitView,
    ForecastView,
    ModelView,
    NeedView,
    PairView,
    ProjectorView,
)
from localspec.protocol.settings import Pooling
from localspec.registry.catalogue import check_pair_name
from localspec.registry.header import fit
from localspec.registry.header.gguf import FileSource, NumberArray, StringArray, read_header
from localspec.registry.header.model import (
    ModelInfo,
    Traits,
    check_shards,
    describe_model,
    read_local_model,
    read_traits,
    shard_names,
    shard_paths,
)
from localspec.registry.header.pairing import Verdict, check_pair, judge_pair
from localspec.registry.header.projector import (
    ARCHITECTURE,
    check_projector,
    projector_bytes,
    read_local_projector,
)
from localspec.registry.header.weights import check_weights
from localspec.registry.store import integrity
from localspec.registry.store.files import FileState, HashCache, file_state
from localspec.registry.store.store import (
    Record,
    Store,
    StoredModel,
    list_local_parts,
    roles_for_pooling,
    store_model,
)

_LISTED_CONTEXTS = [4096 << doublings for doublings in range(16)]  # tokens
_MAX_REMEMBERED_PAIRS = 256


def describe_pair(
    store: Store, record: Record, free: fit.FreeMemory, load: fit.LoadOptions
) -> PairView:
    """Return a pair as its files state now, with its memory needs. Raises BadGguf, StoreError."""
    files = tuple(_stored_files(store, role, stored) for role, stored in record.language_models)
    contents, judgement = _read_pair(files)
    target, draft = contents[0][0], contents[1][0] if record.draft else None
    projector = record.projector
    load = replace(load, projector=projector_bytes(projector.size) if projector else 0)
    chosen, fit_notes, expected = _fit_pair(target, draft, free, load)
    size = chosen.context if chosen else min(fit.USUAL_CONTEXT, target.context)
    size = min(load.context, target.context) or size
    chosen_load = replace(load, context=size, projector=0)
    needs = [fit.need_of_target(target, chosen_load)]
    needs += [fit.need_of_draft(draft, chosen_load)] if draft else []

    def view_context(tokens: int) -> ContextView:
        needed = fit.total_need(target, draft, replace(load, context=tokens))
        return ContextView(tokens, needed, fit.judge_fit(needed, free))

    views = [
        _model_view(store, stored, *content, need)
        for (_, stored), content, need in zip(record.language_models, contents, needs, strict=True)
    ]
    return PairView(
        name=record.name,
        source=record.source,
        summary=record.summary,
        licence=record.licence,
        roles=record.purposes,
        created=record.created,
        size=record.size,
        target=views[0],
        draft=views[1] if draft else None,
        projector=_projector_view(store, projector) if projector else None,
        matched=judgement.matched if judgement else None,
        reason=judgement.reason if judgement else "",
        notes=record.notes,
        context=size,
        needed=view_context(size).needed,
        fit=chosen,
        fit_notes=fit_notes,
        loaded=False,
        kind=record.kind_with_heads(target.drafting_heads),
        contexts=[view_context(tokens) for tokens in _LISTED_CONTEXTS if tokens < target.context]
        + [view_context(target.context)],
        problem="",
        forecast=expected,
    )


def forecast_pair(
    store: Store, record: Record, free: fit.FreeMemory, load: fit.LoadOptions
) -> ForecastView | None:
    """Return how fast a pair should be; None if it does not fit. Raises BadGguf, StoreError."""
    files = tuple(_stored_files(store, role, stored) for role, stored in record.language_models)
    contents, _ = _read_pair(files)
    return _fit_pair(contents[0][0], contents[1][0] if record.draft else None, free, load)[2]


def _projector_view(store: Store, stored: StoredModel) -> ProjectorView:
    path = store.part_path(stored.parts[0])
    kind = _read_projector_kind(file_state(path))
    return ProjectorView(stored.file, str(path), stored.repo, stored.size, kind)


@functools.lru_cache(maxsize=_MAX_REMEMBERED_PAIRS)
def _read_projector_kind(state: FileState) -> str:
    return read_local_projector(Path(state.path)).kind


def _fit_pair(
    target: ModelInfo, draft: ModelInfo | None, free: fit.FreeMemory, load: fit.LoadOptions
) -> tuple[FitView | None, tuple[str, ...], ForecastView | None]:
    try:
        fitted = fit.fit_pair(target, draft, free, load)
    except DoesNotFit as error:
        return None, (error.message,), None
    notes = (fitted.beyond, *fitted.notes) if fitted.beyond else fitted.notes
    return fit_view(fitted), notes, fit.forecast_fit(target, draft, fitted, load)


def fit_view(fitted: fit.MemoryFit) -> FitView:
    """Convert a fit to its form in the API."""
    return msgspec.convert(fitted, FitView, from_attributes=True)


class _StoredFiles(NamedTuple):
    """The files of a stored model, with their original names."""

    states: tuple[FileState, ...]
    names: tuple[str, ...]
    as_draft: bool
    pooling: Pooling | None


def _stored_files(store: Store, role: str, stored: StoredModel) -> _StoredFiles:
    return _StoredFiles(
        tuple(file_state(store.part_path(part)) for part in stored.parts),
        tuple(shard_names(Path(stored.file).name)),
        role == "draft",
        stored.pooling,
    )


# Clients list all pairs again and again, and reading one with a large vocabulary takes 0.2 s.
@functools.lru_cache(maxsize=_MAX_REMEMBERED_PAIRS)
def _read_pair(
    models: tuple[_StoredFiles, ...],
) -> tuple[tuple[tuple[ModelInfo, Traits], ...], Verdict | None]:
    """Return what the headers of a target and its draft state, and whether they match."""
    contents = [_read_model(files) for files in models]
    judgement = judge_pair(contents[0][0], contents[1][0]) if len(contents) > 1 else None
    # The vocabularies take megabytes, and nothing else here needs them.
    return tuple((_without_vocabulary(model), traits) for model, traits in contents), judgement


def _read_model(files: _StoredFiles) -> tuple[ModelInfo, Traits]:
    headers = []
    for state, name in zip(files.states, files.names, strict=True):
        source = FileSource(Path(state.path))
        source.name = name
        headers.append(read_header(source))
    check_shards(headers)
    model = describe_model(headers, as_draft=files.as_draft)
    return replace(model, pooling=files.pooling), read_traits(headers)


def _without_vocabulary(model: ModelInfo) -> ModelInfo:
    metadata = {
        key: value
        for key, value in model.header.metadata.items()
        if not (key.startswith("tokenizer.") and isinstance(value, StringArray | NumberArray))
    }
    return replace(model, header=replace(model.header, metadata=metadata))


def _model_view(
    store: Store,
    stored: StoredModel,
    model: ModelInfo,
    model_traits: Traits,
    needed: NeedView,
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


_SAME_FILE_MESSAGE = (
    "Target and draft are the same file: such a draft costs as much as it saves. "
    "Leave out the draft, or use a smaller model of the same family (to find one: "
    "localspec drafts FILE)."
)


def add_own_pair(
    store: Store,
    name: str,
    target: Path,
    draft: Path | None = None,
    *,
    roles: Sequence[str] = ("chat",),
    pooling: Pooling | None = None,
    summary: str = "",
    hash_now: bool = True,
    replace: bool = False,
    notes: tuple[str, ...] = (),
    draft_found: bool = False,
    projector: Path | None = None,
) -> Record:
    """Add a pair of files that lie anywhere on this disk.

    hash_now: False postpones the hashing until the pair is first loaded. notes: sentences about how the files
    were chosen. draft_found: as in `Record`.

    Raises:
        InvalidRequest: the name is invalid, or both files are the same.
        Conflict: the name is taken.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: the files cannot be used.
    """
    check_pair_name(name)
    if not replace:
        with contextlib.suppress(ModelNotFound):
            store.get(name)
            raise Conflict(f"A pair '{name}' already exists; to replace it, add: --replace")
    if draft and target.exists() and draft.exists() and target.samefile(draft):
        raise InvalidRequest(_SAME_FILE_MESSAGE, param="draft")
    hashes = store.hashes if hash_now else None
    record = make_record(
        name, target, draft, roles=roles, pooling=pooling, hashes=hashes, projector=projector
    )
    # Files are the same if their hashes are, or their paths if they are not hashed yet.
    ids = [tuple(part.sha256 or part.path for part in model.parts) for model in record.models]
    if draft and ids[0] == ids[1]:
        raise InvalidRequest(_SAME_FILE_MESSAGE, param="draft")
    notes = (*notes, *record.notes)
    if draft and record.draft and record.draft.size > record.target.size:
        notes = (*notes, _swap_note(name, target, draft))
    stored = {role: _use_store_files(store, model) for role, model in record.by_role}
    record = msgspec.structs.replace(
        record, **stored, summary=summary, notes=notes, draft_found=draft_found
    )
    store.put_new(record)
    return record


def _swap_note(name: str, target: Path, draft: Path) -> str:
    files = f"--target {shlex.quote(str(draft))} --draft {shlex.quote(str(target))}"
    return (
        f"The draft {draft.name} is larger than the target {target.name}, so it costs more than it "
        f"can save. If the two are swapped: localspec add {name} {files} --replace"
    )


def refresh_own_pair(
    store: Store,
    record: Record,
    cancel: threading.Event | None = None,
    progress: Callable[[int, int], None] = lambda done, size: None,
) -> tuple[Record, str]:
    """Return a pair of own files as they are now, and a sentence about what changed, or an empty text.

    These are the user's files, so a changed one is a newer version and not damage. `progress(done, total)` is
    called in bytes while files that seem changed are hashed.

    Raises:
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: the new files cannot be used.
        StoreError: the record cannot be written.
        PullCancelled: `cancel` was set meanwhile.
    """
    if record.source != "own":
        return record, ""
    changed_files, done = [], 0
    for part in record.parts:
        report = integrity.offset_progress(progress, done, record.size)
        if integrity.has_changed(store, part, cancel, report):
            changed_files.append(part.file)
        done += part.size
    if not changed_files:
        return record, ""
    paths = {role: Path(model.parts[0].path) for role, model in record.by_role}
    # The roles of an embedding model follow from its file, which may have changed.
    roles = ("chat",) if record.target.pooling else record.roles
    current = msgspec.structs.replace(
        make_record(
            record.name,
            paths["target"],
            paths.get("draft"),
            roles=roles,
            pooling=record.pooling,
            projector=paths.get("projector"),
        ),
        created=record.created,
        summary=record.summary,
        draft_found=record.draft_found,
    )
    store.put(current)
    verb = "has" if len(changed_files) == 1 else "have"
    files = " and ".join(changed_files)
    return current, f"{files} {verb} changed since the pair was added or last used."


def make_record(
    name: str,
    target: Path,
    draft: Path | None = None,
    *,
    roles: Sequence[str] = ("chat",),
    pooling: Pooling | None = None,
    hashes: HashCache | None = None,
    projector: Path | None = None,
) -> Record:
    """Return the checked record of a pair of files, without storing it.

    The built-in pair inside the package uses this. pooling: the user's choice.
    """
    target_model = _check_model(target)
    target_model = replace(target_model, pooling=pooling or target_model.pooling)
    draft_model = _check_model(draft, as_draft=True) if draft else None
    notes = check_pair(target_model, draft_model)
    if projector:
        check_projector(target_model, read_local_projector(projector))
    return Record(
        name=name,
        target=store_model(target_model, list_local_parts(target, hashes)),
        draft=store_model(draft_model, list_local_parts(draft, hashes))
        if draft_model and draft
        else None,
        projector=StoredModel(parts=list_local_parts(projector, hashes), architecture=ARCHITECTURE)
        if projector
        else None,
        source="own",
        created=time.time(),
        roles=roles_for_pooling(target_model.pooling) or tuple(roles),
        notes=notes,
        template_sha256=target_model.template_hash,
        pooling=pooling,
    )


def recall_record(name: str, target: Path, draft: Path | None) -> Record:
    """Return `make_record` of these files, which are read again only after they have changed."""
    paths = [*shard_paths(target), *(shard_paths(draft) if draft else ())]
    return _recall_record(name, target, draft, tuple(map(file_state, paths)))


@functools.lru_cache(maxsize=_MAX_REMEMBERED_PAIRS)
def _recall_record(
    name: str, target: Path, draft: Path | None, _states: tuple[FileState, ...]
) -> Record:
    return make_record(name, target, draft)


def _use_store_files(store: Store, model: StoredModel) -> StoredModel:
    """Return the model with the store's own files marked as such.

    Such files are kept as long as one pair needs them.
    """
    return msgspec.structs.replace(
        model,
        parts=tuple(
            msgspec.structs.replace(part, path="")
            if part.sha256 and Path(part.path) == store.blob(part.sha256).absolute()
            else part
            for part in model.parts
        ),
    )


def _check_model(path: Path, *, as_draft: bool = False) -> ModelInfo:
    for part in shard_paths(path):
        if not part.exists():
            raise BadGguf(f"{part} does not exist.")
    model = read_local_model(path, as_draft=as_draft)
    for part in shard_paths(path):
        check_weights(part)
    return model
