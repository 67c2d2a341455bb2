"""Resolve any name of a pair to its files. Only this module knows what a pair may be called."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localspec.config import Config
from localspec.daemon.http import tcp
from localspec.errors import ModelNotFound, PullCancelled, RegistryError, Unavailable
from localspec.paths import expand_user, split_model_names
from localspec.protocol.frames import PairFiles
from localspec.registry.tuned import find_tuned_draft

if TYPE_CHECKING:
    from localspec.daemon.pairs.registry import Registry
    from localspec.registry.store.store import Record

BUILTIN = "builtin"
_MAX_SHOWN_CHARACTERS = 300  # of a path in an error message
# Names that mean the configured pair. Clients that must send a name send one of these.
DEFAULT_NAMES = ("", "default", "localspec")


# What a pair is used for. The configuration may name a pair for each role. Otherwise the configured pair
# has the first two roles, and pairs for the others are recognized by their files.
Role = Literal["chat", "fim", "embed", "rerank"]
# The noun for a model with the role, and an example from the catalogue.
_ROLE_EXAMPLES = {
    "embed": ("embedding model", "nomic-embed"),
    "rerank": ("reranker", "bge-reranker"),
}


class NoSuchPair(ModelNotFound):
    """No pair and no model of Ollama's has this name, so a client may have meant any pair."""


class NotPulled(ModelNotFound):
    """The pair is in the catalogue, but not on this machine."""


def resolve_pair(
    name: str, config: Config, registry: Registry, cancelled: threading.Event | None = None
) -> PairFiles:
    """Return the files of the pair `name`.

    `name` is "" for the configured pair, "builtin", the name of a pair that was pulled or added or
    that another server answers for, or TARGET or "TARGET,DRAFT", where each is an absolute path or a
    name of Ollama's with its tag.

    The files of a pulled pair are checked first, and hashed if they never were or have changed, so call
    this in a thread. Setting `cancelled` ends that when nobody waits for the result any more.

    Raises:
        ModelNotFound: There is no pair of that name, or one of its files is missing.
        Damaged, StoreError: Its files or its record are damaged.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: Files named by path, or own files that
            have changed, cannot be used.
    """
    name = resolve_default(name, config)
    if name == BUILTIN:
        return with_tuned_draft(builtin_files(), registry.paths.tuned)
    if upstream_pair := registry.upstream(name):
        return upstream_pair
    name = registry.resolve_alias(name)
    if is_file_name(name):
        files = files_of(name, registry)
        files.pooling = registry.check_files(
            *(Path(path) for path in (files.target, files.draft) if path)
        )
        found, hint = registry.find_projector(Path(files.target), split_model_names(name)[0])
        files.projector, files.projector_hint = (str(found), "") if found else (None, hint)
        return files
    from localspec.registry.store import integrity

    store = registry.store
    try:
        record = integrity.ensure_ready(store, registry.refresh(name, cancelled).name, cancelled)
    except PullCancelled:  # the daemon is ending while a client still waits
        raise Unavailable("The daemon is shutting down; try again.", retry_after=2) from None
    target, draft = store.model_paths(record)
    files = PairFiles(record.name, str(target), str(draft) if draft else None)
    files.pooling = record.target.pooling
    files.draft_named = draft is not None and not record.draft_found
    if record.projector:
        files.projector = str(store.model_path(record.projector))
    files.projector_hint = _projector_hint(record)
    if draft:  # a pair that was added with --no-draft gets none
        _add_other_drafts(files, registry.find_own_drafts(target))
    return with_tuned_draft(files, registry.paths.tuned)


def _projector_hint(record: Record) -> str:
    """Return what to do to have a projector for a pair that has none, as a sentence."""
    if record.source == "own":
        return (
            "If there is a projector for its target (mmproj-….gguf): localspec add "
            f"{record.name} --target {shlex.quote(record.target.parts[0].path)} --projector FILE --replace"
        )
    repository = record.target.repo
    if record.other_projector:
        return (
            f"Its repository has a projector, {record.other_projector}, which was left out. To pull it: "
            f"localspec rm {record.name}, then localspec pull {repository}"
        )
    return f"If its repository has a projector (mmproj-….gguf): localspec pull {record.asked or repository}"


def with_tuned_draft(files: PairFiles, tuned: Path) -> PairFiles:
    """Return the files of a pair with its tuned draft, if there is one in the folder `tuned`.

    It was judged by the user's own texts. So the pair's own draft, or none, replaces it only if it cannot be
    used or predicts next to nothing.
    """
    if found := find_tuned_draft(tuned, files.target, files.draft or ""):
        files.other_drafts = (files.draft or files.target, *files.other_drafts)
        files.draft_named = True
        files.draft = files.tuned_draft = str(found[0])
    return files


def resolve_default(name: str, config: Config) -> str:
    """Return the pair that a client's `model` means: the configured one if it names none."""
    return config.pair if name in DEFAULT_NAMES else name


def pair_of_role(role: Role, config: Config, registry: Registry) -> str:
    """Return the name of the pair that has the role: the configured one, or the only one installed for it.

    Reads files. Raises ModelNotFound if no pair, or more than one, is installed for embeddings or reranking.
    """
    configured = {"embed": config.pair_embed, "rerank": config.pair_rerank, "fim": config.pair_fim}
    if role == "chat" or configured[role]:
        return configured.get(role, config.pair)
    records = registry.store.listing().records
    if role == "fim":
        candidates = [record.name for record in records if record.roles == ("fim",)]
        return candidates[0] if len(candidates) == 1 else config.pair
    candidates = [record.name for record in records if role in record.roles]
    if len(candidates) == 1:
        return candidates[0]
    noun, example = _ROLE_EXAMPLES[role]
    if candidates:
        raise ModelNotFound(
            f"Several {noun}s are installed: {', '.join(candidates)}. Name one of them as `model`, "
            f"or: localspec config set pair.{role} {candidates[0]}",
            param="model",
        )
    raise ModelNotFound(
        f"No {noun} is installed. To pull one: localspec pull {example}", param="model"
    )


def is_file_name(name: str) -> bool:
    """Return whether the name means files. No name of a pair has such a form."""
    return any(
        part.lower().endswith(".gguf") or part.startswith(("/", "~")) or ":" in part
        for part in name.split(",")
    )


def builtin_files() -> PairFiles:
    """Return the files of the pair inside the package. Raises ModelNotFound if it has none."""
    spec = importlib.util.find_spec("localspec")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "builtin"
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if not target.is_file():
        raise ModelNotFound(f"The built-in pair is missing: there is no {target}.", param="model")
    return PairFiles(BUILTIN, str(target), str(draft) if draft.is_file() else None)


@contextlib.contextmanager
def hidden_file_errors() -> Iterator[None]:
    """Replace all errors about a path by one over TCP, so that no response reveals which files exist.

    Raises:
        ModelNotFound: Over TCP, in place of any ModelNotFound or RegistryError. Without TCP these
            errors are raised unchanged.
    """
    try:
        yield
    except (ModelNotFound, RegistryError) as error:
        if tcp.is_tcp_request():
            error_class = NoSuchPair if isinstance(error, NoSuchPair) else ModelNotFound
            raise error_class("There is no usable model at that path.", param="model") from None
        raise


def files_of(name: str, registry: Registry) -> PairFiles:
    """Return the files that `name` means, with what drafts for a lone target, without reading the target.

    A name of two files means exactly these, so that drafts can be compared.

    Raises:
        NoSuchPair: Ollama has no model of that name. The message names pairs with the same model.
        ModelNotFound: There is no such file, or the name is one of more than two.
    """
    from localspec.registry.ollama_names import is_ollama_name

    parts = split_model_names(name)
    if len(parts) > 2:
        problem = f"'{name[:80]}' names more than two files, a target and a draft."
        raise ModelNotFound(problem, param="model")
    try:
        target, *drafts = map(find_file, parts)
    except NoSuchPair as error:
        if len(parts) == 1 and is_ollama_name(name):
            raise registry.not_in_ollama_error(name) from None
        if len(parts) == 1:
            raise
        # A plain ModelNotFound: the configured pair never answers for a name of two files, so that no
        # response reveals whether one of them exists.
        raise ModelNotFound(error.message, param=error.param) from None
    files = PairFiles(name, str(target), str(drafts[0]) if drafts else None)
    if files.draft is None:
        own_drafts = registry.find_own_drafts(target)
        if own_drafts and own_drafts[0] != files.target:
            files.draft = own_drafts[0]
        _add_other_drafts(files, own_drafts)
    return files


def _add_other_drafts(files: PairFiles, drafts: Sequence[str]) -> None:
    """Name the drafts that replace the pair's own one if it turns out to be of no use."""
    used = Path(files.draft or files.target).resolve()
    files.other_drafts = tuple(draft for draft in drafts if Path(draft).resolve() != used)


def find_file(name: str) -> Path:
    """Return the file at an absolute path, or Ollama's by a name with a tag. Raises ModelNotFound."""
    path = expand_user(name)
    if path.is_absolute():
        with contextlib.suppress(OSError):  # the path is too long, or a folder may not be read
            if path.is_file():
                return path
        shown = str(path)[:_MAX_SHOWN_CHARACTERS]
        raise ModelNotFound(f"There is no file {shown}.", param="model")
    if ":" in name:
        from localspec.registry.disk import discovery

        model = discovery.find_model(name)
        if model and model.file:
            return model.file
        if model:
            raise ModelNotFound(
                f"'{name[:80]}' of Ollama cannot be used: {model.problem}.", param="model"
            )
        raise NoSuchPair(
            f"Ollama has no model '{name[:80]}'. To list its models: localspec import",
            param="model",
        )
    if name.startswith("~"):
        raise ModelNotFound(f"'{name[:80]}' is not a file: there is no such user.", param="model")
    raise ModelNotFound(
        f"'{name[:80]}' is neither an absolute path nor two of them, target and draft, "
        "separated by a comma.",
        param="model",
    )
