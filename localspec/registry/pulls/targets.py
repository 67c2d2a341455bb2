"""What a user asked to pull, and the list of unfinished pulls, which resume when the daemon starts again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from localspec.errors import InvalidRequest, ModelNotFound, RegistryError, UnsafePath
from localspec.files import sync_folder
from localspec.paths import read_file
from localspec.protocol.pairs import PullRequest
from localspec.registry.catalogue import NAME_PATTERN, Catalogue, CataloguePair, HubFile
from localspec.registry.hub.offline import list_in_cache, resolve_in_cache
from localspec.registry.hub.repository import (
    Reference,
    derive_pair_name,
    list_parts,
    parse_reference,
)
from localspec.registry.store.files import make_folder, write_atomically
from localspec.registry.store.store import Part, Record, StoredModel

VERSION = 1  # format version of the file


class PullTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A pull as it was requested. It contains no token.

    name: the name that the pair will have. pair: the catalogue's entry, or what was decided before
    (`decided`). target: the repository, if there is no `pair`. draft: the draft to use instead. no_draft:
    use none. no_projector: leave out the file by which the target reads pictures. asked: the request as text,
    empty for a pair as the catalogue has it. endpoint: the hub. limit_rate: bytes per second, 0 for no limit.
    whole_disk: a draft may be proposed among the files of other programs. files: the hashes of the files to
    download, once they are known.
    """

    name: str
    pair: CataloguePair | None = None
    target: Reference | None = None
    draft: Reference | None = None
    no_draft: bool = False
    no_projector: bool = False
    decided: bool = False
    asked: str = ""
    endpoint: str = ""
    limit_rate: int = 0
    whole_disk: bool = True
    files: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """What is being pulled, for a sentence."""
        return self.asked or f"{self.name} from the catalogue"


def is_cached(request: PullTarget, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the Hugging Face cache has all files of a pull, so that it needs no network."""
    pair = request.pair
    if pair is None and request.target:
        return bool(list_in_cache(request.target.repo, request.target.revision, environ))
    models = [model for model in (pair.target, pair.draft) if model and model.repo] if pair else []
    return bool(models) and all(
        resolve_in_cache(model.repo, part, model.revision, environ)
        for model in models
        for part in list_parts(model.file)
    )


def resolve_target(
    request: PullRequest,
    catalogue: Catalogue,
    find_record: Callable[[str], Record | None],
    part_path: Callable[[Part], Path],
    *,
    endpoint: str = "",
    whole_disk: bool = True,
) -> PullTarget:
    """Return the pull that a request asks for.

    Its name is a repository, a pair that was pulled from one before, or a pair of the catalogue. find_record:
    returns the record of an installed pair. part_path: returns the path of a pair's file.

    Raises:
        InvalidRequest: the repository is invalid, or the name is invalid or belongs to a catalogue pair.
        ModelNotFound: there is no such pair.
    """
    target, draft = parse_reference(request.name, endpoint), _parse_draft(request, endpoint)
    options = f" --draft {draft}" if draft else " --no-draft" if request.no_draft else ""
    options += " --no-projector" if request.no_projector else ""
    pair, decided = None, False
    if target:
        name = usual_name = derive_pair_name(target)
        asked = f"{target}{options}"
    else:
        record = find_record(request.name.strip().lower())
        if record and record.source == "hub" and not (options or request.pair):
            # It was pulled from a repository, or is no longer in the catalogue.
            decided = bool(record.asked or record.name not in catalogue.pairs)
        if record and decided:
            name, pair, asked = record.name, _as_pair(record, part_path), record.asked
        else:
            usual_name, pair = catalogue.find(request.name)
            name, asked = usual_name, f"{usual_name}{options}" if options or request.pair else ""
    if request.pair or target:
        name = _check_name(request.pair, usual_name, catalogue)
    return PullTarget(
        name=name,
        pair=pair,
        target=target,
        draft=draft,
        no_draft=request.no_draft,
        no_projector=request.no_projector,
        decided=decided,
        asked=asked,
        endpoint=endpoint,
        limit_rate=request.limit_rate,
        whole_disk=whole_disk,
    )


def _parse_draft(request: PullRequest, endpoint: str) -> Reference | None:
    if not request.draft:
        return None
    if request.no_draft:
        raise InvalidRequest("A draft cannot be both named and left out.", param="draft")
    if draft := parse_reference(request.draft, endpoint):
        return draft
    raise InvalidRequest(
        f"'{request.draft[:80]}' is not a repository; use OWNER/REPO[:QUANT].", param="draft"
    )


def _check_name(chosen: str | None, usual_name: str, catalogue: Catalogue) -> str:
    name = (chosen or usual_name).strip().lower()
    if not NAME_PATTERN.fullmatch(name) or name.endswith(".gguf"):
        raise InvalidRequest(
            f"'{name[:80]}' is not a valid pair name; use at most 64 lowercase letters, "
            "digits, '.', '_' and '-', starting with a letter or digit and not ending in "
            ".gguf.",
            param="pair",
        )
    try:
        catalogue_name, _ = catalogue.find(name)
    except ModelNotFound:
        return name
    if chosen is None or catalogue_name != usual_name:
        raise InvalidRequest(
            f"'{name}' is a pair in the catalogue; choose another name: --name NAME", param="pair"
        )
    return name


def _as_pair(record: Record, part_path: Callable[[Part], Path]) -> CataloguePair:
    """Return what to pull for the same files again, as the hub has them now."""
    return CataloguePair(
        summary=record.summary,
        target=as_weights(record.target, part_path),
        draft=as_weights(record.draft, part_path) if record.draft else None,
        projector=as_weights(record.projector, part_path) if record.projector else None,
        licence=record.licence,
        roles=tuple(role for role in ("chat", "fim", "embed", "rerank") if role in record.roles),
    )


def as_weights(stored: StoredModel, part_path: Callable[[Part], Path]) -> HubFile:
    """Return what to pull for a stored model: its file in its repository, or the local file."""
    if stored.repo:
        return HubFile(repo=stored.repo, file=stored.file)
    return HubFile(repo="", file=str(part_path(stored.parts[0])))


class _UnfinishedFile(msgspec.Struct):
    pulls: tuple[PullTarget, ...] = ()
    version: int = VERSION


class UnfinishedPulls:
    """The list of unfinished pulls, stored in one file. It may be used from several threads.

    The file is replaced as a whole, and deleted when the list is empty. If it cannot be written, the pull
    continues but does not resume by itself later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def all(self) -> tuple[PullTarget, ...]:
        """Return the unfinished pulls, oldest first; none if the file is broken."""
        try:
            content = msgspec.json.decode(read_file(self._path), type=_UnfinishedFile)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return ()
        return content.pulls if content.version == VERSION else ()

    def files(self) -> frozenset[str]:
        """Return the hashes of all files that are being downloaded."""
        return frozenset(sha256 for pull in self.all() for sha256 in pull.files)

    def keep(self, request: PullTarget) -> None:
        """Add a pull, replacing any other of the same name."""
        request = msgspec.structs.replace(request, endpoint=_without_secrets(request.endpoint))
        with self._lock:
            other_pulls = [pull for pull in self.all() if pull.name != request.name]
            self._write((*other_pulls, request))

    def drop(self, name: str) -> bool:
        """Remove a pull; return whether it was in the list."""
        with self._lock:
            pulls = self.all()
            remaining = tuple(pull for pull in pulls if pull.name != name)
            if remaining != pulls:
                self._write(remaining)
            return remaining != pulls

    def _write(self, pulls: tuple[PullTarget, ...]) -> None:
        with suppress(RegistryError, UnsafePath, OSError):
            if pulls:
                make_folder(self._path.parent)
                write_atomically(self._path, msgspec.json.encode(_UnfinishedFile(pulls)))
            else:
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)


def _without_secrets(endpoint: str) -> str:
    """Return the URL without user name, password, query and fragment, which may contain a key."""
    try:
        address = urlsplit(endpoint)
    except ValueError:
        return ""
    host = address.netloc.rpartition("@")[2]
    return urlunsplit((address.scheme, host, address.path, "", ""))
