"""What a user asked to pull, and the list of unfinished pulls.

Unfinished pulls resume when the daemon starts again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from localspec.errors import InvalidRequest, ModelNotFound, RegistryError, UnsafePath
from localspec.files import sync_folder
from localspec.paths import read_file
from localspec.registry.catalogue import NAME, Catalogue, Pair, Weights
from localspec.registry.hub.cache import list_in_cache, resolve_in_cache
from localspec.registry.hub.repository import Reference, pair_name, parts_of, reference
from localspec.registry.store.files import make_folder, write_whole
from localspec.registry.store.records import Part, Record, StoredModel

VERSION = 1  # format version of the file


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A pull as it was requested. It contains no token.

    name: the name that the pair will have. pair: the catalogue's entry, or what was decided before
    (`decided`). target: the repository, if there is no `pair`. draft: the draft to use instead. no_draft:
    use none. asked: the request as text, empty for a pair as the catalogue has it. endpoint: the hub.
    limit_rate: bytes per second, 0 for no limit. whole_disk: a draft may be proposed among the files of
    other programs. files: the hashes of the files to download, once they are known.
    """

    name: str
    pair: Pair | None = None
    target: Reference | None = None
    draft: Reference | None = None
    no_draft: bool = False
    decided: bool = False
    asked: str = ""
    endpoint: str = ""
    limit_rate: int = 0
    whole_disk: bool = True
    files: tuple[str, ...] = ()


def asked(request: Wanted) -> str:
    """Return what is being pulled, for a sentence."""
    return request.asked or f"{request.name} from the catalogue"


def is_cached(request: Wanted) -> bool:
    """Return whether the Hugging Face cache has all files of a pull, so that it needs no network."""
    pair = request.pair
    if pair is None and request.target:
        return bool(list_in_cache(request.target.repo, request.target.revision))
    models = [model for model in (pair.target, pair.draft) if model and model.repo] if pair else []
    return bool(models) and all(
        resolve_in_cache(model.repo, part, model.revision)
        for model in models
        for part in parts_of(model.file)
    )


def wanted(
    text: str,
    catalogue: Catalogue,
    find_record: Callable[[str], Record | None],
    part_path: Callable[[Part], Path],
    *,
    draft: str | None = None,
    no_draft: bool = False,
    pair: str | None = None,
    endpoint: str = "",
    limit_rate: int = 0,
    whole_disk: bool = True,
) -> Wanted:
    """Return the pull that `text` asks for.

    The text names a repository, a pair that was pulled from one before, or a pair of the catalogue.

    find_record: returns the record of an installed pair. part_path: returns the path of a pair's file. pair:
    the name for the pair, if not the usual one.

    Raises:
        InvalidRequest: the repository is invalid, or the name is invalid or belongs to a catalogue pair.
        ModelNotFound: there is no such pair.
    """
    if draft and no_draft:
        raise InvalidRequest("A draft cannot be both named and left out.", param="draft")
    target = reference(text, endpoint)
    draft_model = _parse_draft(draft, endpoint) if draft else None
    catalogue_pair: Pair | None = None
    if target is None:
        record = find_record(text.strip().lower())
        if record and not (draft or no_draft or pair) and _can_pull_again(record, catalogue):
            return _repeat_pull(record, part_path, endpoint, limit_rate)
        usual_name, catalogue_pair = catalogue.find(text)
    else:
        usual_name = pair_name(target)
    source = str(target) if target else (usual_name if draft_model or no_draft or pair else "")
    name = _check_name(pair, usual_name, catalogue) if pair or target else usual_name
    return Wanted(
        name=name,
        pair=catalogue_pair,
        target=target,
        draft=draft_model,
        no_draft=no_draft,
        asked=source
        + (f" --draft {draft_model}" if draft_model else " --no-draft" if no_draft else ""),
        endpoint=endpoint,
        limit_rate=limit_rate,
        whole_disk=whole_disk,
    )


def _parse_draft(draft: str, endpoint: str) -> Reference:
    parsed = reference(draft, endpoint)
    if not parsed:
        raise InvalidRequest(
            f"'{draft[:80]}' is not a repository; use OWNER/REPO[:QUANT].", param="draft"
        )
    return parsed


def _check_name(chosen: str | None, default_name: str, catalogue: Catalogue) -> str:
    """Return the name for the pair.

    Raises:
        InvalidRequest: it is invalid, or means another pair of the catalogue.
    """
    name = (chosen or default_name).strip().lower()
    if not NAME.fullmatch(name) or name.endswith(".gguf"):
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
    if chosen is None or catalogue_name != default_name:
        raise InvalidRequest(
            f"'{name}' is a pair in the catalogue; choose another name: --name NAME", param="pair"
        )
    return name


def _can_pull_again(record: Record, catalogue: Catalogue) -> bool:
    """Return whether the pair was pulled from a repository, or is no longer in the catalogue."""
    return record.source == "hub" and bool(record.asked or record.name not in catalogue.pairs)


def _repeat_pull(
    record: Record, part_path: Callable[[Part], Path], endpoint: str, limit_rate: int
) -> Wanted:
    """Return a pull of the same files, as the hub has them now."""
    pair = Pair(
        summary=record.summary,
        target=as_weights(record.target, part_path),
        draft=as_weights(record.draft, part_path) if record.draft else None,
        licence=record.licence,
        roles=tuple(role for role in ("chat", "fim", "embed", "rerank") if role in record.roles),
    )
    return Wanted(
        name=record.name,
        pair=pair,
        decided=True,
        asked=record.asked,
        endpoint=endpoint,
        limit_rate=limit_rate,
    )


def as_weights(stored: StoredModel, part_path: Callable[[Part], Path]) -> Weights:
    """Return what to pull for a stored model: its file in its repository, or the local file."""
    if stored.repo:
        return Weights(repo=stored.repo, file=stored.file)
    return Weights(repo="", file=str(part_path(stored.parts[0])))


class _UnfinishedFile(msgspec.Struct):
    pulls: tuple[Wanted, ...] = ()
    version: int = VERSION


class Unfinished:
    """The list of unfinished pulls, stored in one file. It may be used from several threads.

    The file is replaced as a whole, and deleted when the list is empty. If it cannot be written, the pull
    continues but does not resume by itself later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def all(self) -> tuple[Wanted, ...]:
        """Return the unfinished pulls, oldest first; none if the file is broken."""
        try:
            content = msgspec.json.decode(read_file(self._path), type=_UnfinishedFile)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return ()
        return content.pulls if content.version == VERSION else ()

    def files(self) -> frozenset[str]:
        """Return the hashes of all files that are being downloaded."""
        return frozenset(sha256 for pull in self.all() for sha256 in pull.files)

    def keep(self, request: Wanted) -> None:
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

    def _write(self, pulls: tuple[Wanted, ...]) -> None:
        with suppress(RegistryError, UnsafePath, OSError):
            if pulls:
                make_folder(self._path.parent)
                write_whole(self._path, msgspec.json.encode(_UnfinishedFile(pulls)))
            else:
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)


def _without_secrets(endpoint: str) -> str:
    """Return the URL without user name, password, query and fragment, which may contain a key."""
    if not endpoint:
        return ""
    try:
        address = urlsplit(endpoint)
    except ValueError:
        return ""
    host = address.netloc.rpartition("@")[2]
    return urlunsplit((address.scheme, host, address.path, "", ""))
