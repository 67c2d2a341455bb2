"""From a name to files. The one place that knows what a pair may be called."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localspec.config import Config
from localspec.daemon.http import tcp
from localspec.errors import ModelNotFound, PullCancelled, RegistryError, Unavailable
from localspec.paths import model_files
from localspec.protocol.frames import PairFiles

if TYPE_CHECKING:
    from localspec.daemon.pairs.registry import Registry

BUILTIN = "builtin"
_SHOWN = 300  # characters of a path in an error: longer ones were not written by a person
# Clients that must send some name send one of these.
CONFIGURED = ("", "default", "localspec")


# What a pair is asked for. The configuration may say which one has a role; else the configured one has the
# first two, and the others are told by their files.
Role = Literal["chat", "fim", "embed", "rerank"]
_ROLES = {
    "embed": ("embedding model", "nomic-embed"),
    "rerank": ("reranker", "bge-reranker"),
}


class NoSuchPair(ModelNotFound):
    """No pair has the name, and no model of Ollama's: a client may have meant any."""


class NotPulled(ModelNotFound):
    """The pair is in the catalogue, and not on this machine."""


def resolve(
    name: str, config: Config, registry: Registry, left: threading.Event | None = None
) -> PairFiles:
    """The files of the pair `name`: "" for the configured one, "builtin", a pair that was pulled or
    added, one that another server answers for, or a target or "TARGET,DRAFT", each an absolute path or a
    name of Ollama's with its tag.

    A pulled pair's files are looked at first, and hashed when that was never done or they changed:
    call it in a thread. That ends once `left` is set: nobody waits for it any more.

    Raises:
        ModelNotFound: nothing of that name is here, or a file of it is missing.
        Damaged, StoreError: its files or its record are not what they should be.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: files named by paths, or own files that
            have changed, as for `add`.
    """
    name = full_name(name, config)
    if name == BUILTIN:
        return builtin()
    if afar := registry.upstream(name):
        return afar
    name = registry.called(name)
    if names_files(name):
        found = files_of(name, registry)
        found.pooling = registry.check(
            *(Path(each) for each in (found.target, found.draft) if each)
        )
        return found
    from localspec.registry.store import integrity

    store = registry.store
    try:
        record = integrity.ready(store, registry.refreshed(name, left).name, left)
    except PullCancelled:  # somebody waits still where the daemon ends
        raise Unavailable("The daemon is shutting down; try again.", retry_after=2) from None
    target, draft = store.paths(record)
    files = PairFiles(record.name, str(target), str(draft) if draft else None)
    files.pooling = record.target.pooling
    return files


def full_name(name: str, config: Config) -> str:
    """What a client's `model` means: the configured pair where it says nothing."""
    return config.pair if name in CONFIGURED else name


def in_role(role: Role, config: Config, registry: Registry) -> str:
    """The name of the pair that has the role: the one that is configured, else the only one that was
    installed for it alone. Reads files.

    Raises:
        ModelNotFound: there is none for embeddings or ranks, or more than one.
    """
    configured = {"embed": config.pair_embed, "rerank": config.pair_rerank, "fim": config.pair_fim}
    if role == "chat" or configured[role]:
        return configured.get(role, config.pair)
    records = registry.store.listing().records
    if role == "fim":
        found = [each.name for each in records if each.roles == ("fim",)]
        return found[0] if len(found) == 1 else config.pair
    found = [each.name for each in records if role in each.roles]
    if len(found) == 1:
        return found[0]
    what, example = _ROLES[role]
    if found:
        raise ModelNotFound(
            f"Several {what}s are installed: {', '.join(found)}. Name one of them as `model`, or: "
            f"localspec config set pair.{role} {found[0]}",
            param="model",
        )
    raise ModelNotFound(
        f"No {what} is installed. To pull one: localspec pull {example}", param="model"
    )


def names_files(name: str) -> bool:
    """Whether it means files, which no pair's name can be taken for."""
    return any(
        each.lower().endswith(".gguf") or each.startswith(("/", "~")) or ":" in each
        for each in name.split(",")
    )


def needs_a_look(name: str) -> bool:
    """Whether resolving it reads files (and so belongs in a thread)."""
    return name != BUILTIN


def builtin() -> PairFiles:
    """The pair inside the package.

    Raises:
        ModelNotFound: it was packaged without.
    """
    spec = importlib.util.find_spec("localspec")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "builtin"
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if not target.is_file():
        raise ModelNotFound(f"The built-in pair is missing: there is no {target}.", param="model")
    return PairFiles(BUILTIN, str(target), str(draft) if draft.is_file() else None)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Over TCP no answer tells which files there are: all that is wrong with a path is one error.

    Raises:
        ModelNotFound: over TCP, in place of any ModelNotFound or RegistryError; else these as they are.
    """
    try:
        yield
    except (ModelNotFound, RegistryError) as error:
        if tcp.answers_tcp():
            kind = NoSuchPair if isinstance(error, NoSuchPair) else ModelNotFound
            raise kind("There is no usable model at that path.", param="model") from None
        raise


def from_files(name: str) -> PairFiles:
    """The files that `name` means; nothing of them is looked at. Raises ModelNotFound."""
    parts = model_files(name)
    if len(parts) > 2:
        raise ModelNotFound(
            f"'{name[:80]}' names more than two files, a target and a draft.", param="model"
        )
    try:
        files = [one_file(part) for part in parts]
    except NoSuchPair as error:
        if len(parts) == 1:
            raise
        # Whether the configured pair stands in must not depend on there being the other file.
        raise ModelNotFound(error.message, param=error.param) from None
    return PairFiles(name, str(files[0]), str(files[1]) if len(files) == 2 else None)


def files_of(name: str, registry: Registry) -> PairFiles:
    """Return the files that `name` means, like `from_files`.

    Raises:
        NoSuchPair: Ollama has no model of that name; the message says which pairs have the same one.
    """
    from localspec.registry.ollama_names import is_ollama_name

    try:
        return from_files(name)
    except NoSuchPair:
        if is_ollama_name(name):
            raise registry.not_in_ollama(name) from None
        raise


def one_file(name: str) -> Path:
    """The file at an absolute path, or that Ollama knows by a name with a tag. Raises ModelNotFound."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # "~nobody": a user whom this machine does not know
        raise ModelNotFound(
            f"'{name[:80]}' is not a file: there is no such user.", param="model"
        ) from error
    if path.is_absolute():
        if not _is_file(path):
            raise ModelNotFound(f"There is no file {str(path)[:_SHOWN]}.", param="model")
        return path
    if ":" in name:
        from localspec.registry.disk import ollama

        if file := ollama.named(name):
            return file
        raise NoSuchPair(
            f"Ollama has no model '{name[:80]}'. To list its models: localspec import",
            param="model",
        )
    raise ModelNotFound(
        f"'{name[:80]}' is neither an absolute path nor two of them, target and draft, "
        "separated by a comma.",
        param="model",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than a path may be, a folder that may not be read
        return False
