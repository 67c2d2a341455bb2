"""What a person asked to be pulled, and what of it is not here yet: that goes on when the daemon starts
again.
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

VERSION = 1  # of the file


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A pull as it was asked for. No token is in it.

    `name`: what the pair will be called. `pair`: the catalogue's, or what was decided before
    (`decided`); else `target` says where to look. `draft`: the one to take instead, `no_draft`:
    none. `asked`: all this as text, empty for a pair as the catalogue has it. `endpoint`: the hub.
    `limit_rate`: bytes per second, 0: as fast as it comes. `whole_disk`: a draft may be proposed
    among the files of other programs. `files`: the hashes of what is fetched, once they are known.
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


def asked(each: Wanted) -> str:
    """For a sentence: as what something is pulled."""
    return each.asked or f"{each.name} from the catalogue"


def is_cached(wanted: Wanted) -> bool:
    """Whether the Hugging Face cache has what a pull needs, so that it may do without a network."""
    pair = wanted.pair
    if pair is None and wanted.target:
        return bool(list_in_cache(wanted.target.repo, wanted.target.revision))
    models = [each for each in (pair.target, pair.draft) if each and each.repo] if pair else []
    return bool(models) and all(
        resolve_in_cache(each.repo, part, each.revision)
        for each in models
        for part in parts_of(each.file)
    )


def wanted(
    text: str,
    catalogue: Catalogue,
    here: Callable[[str], Record | None],
    part_path: Callable[[Part], Path],
    *,
    draft: str | None = None,
    no_draft: bool = False,
    pair: str | None = None,
    endpoint: str = "",
    limit_rate: int = 0,
    whole_disk: bool = True,
) -> Wanted:
    """What `text` asks for: a repository; a pair that was pulled from one, again; a catalogue's pair.

    `here` gives the record of a pair, `part_path` where a file of one lies; `pair` is the name to give
    it, else the usual one.

    Raises:
        InvalidRequest: something that is no repository; a name that cannot be, or the catalogue's.
        ModelNotFound: no such pair.
    """
    if draft and no_draft:
        raise InvalidRequest("A draft cannot be both named and left out.", param="draft")
    target = reference(text, endpoint)
    drafting = _drafting(draft, endpoint) if draft else None
    found: Pair | None = None
    if target is None:
        again = here(text.strip().lower())
        if again and not (draft or no_draft or pair) and _is_of_hub(again, catalogue):
            return _again(again, part_path, endpoint, limit_rate)
        own, found = catalogue.find(text)
    else:
        own = pair_name(target)
    what = str(target) if target else (own if drafting or no_draft or pair else "")
    name = _checked(pair, own, catalogue) if pair or target else own
    return Wanted(
        name=name,
        pair=found,
        target=target,
        draft=drafting,
        no_draft=no_draft,
        asked=what + (f" --draft {drafting}" if drafting else " --no-draft" if no_draft else ""),
        endpoint=endpoint,
        limit_rate=limit_rate,
        whole_disk=whole_disk,
    )


def _drafting(draft: str, endpoint: str) -> Reference:
    found = reference(draft, endpoint)
    if not found:
        raise InvalidRequest(
            f"'{draft[:80]}' is not a repository; use OWNER/REPO[:QUANT].", param="draft"
        )
    return found


def _checked(given: str | None, own: str, catalogue: Catalogue) -> str:
    """The pair's name: no other pair of the catalogue may be meant by it."""
    name = (given or own).strip().lower()
    if not NAME.fullmatch(name) or name.endswith(".gguf"):
        raise InvalidRequest(
            f"'{name[:80]}' is not a valid pair name; use at most 64 lowercase letters, "
            "digits, '.', '_' and '-', starting with a letter or digit and not ending in "
            ".gguf.",
            param="pair",
        )
    try:
        meant, _ = catalogue.find(name)
    except ModelNotFound:
        return name
    if given is None or meant != own:
        raise InvalidRequest(
            f"'{name}' is a pair in the catalogue; choose another name: --name NAME", param="pair"
        )
    return name


def _is_of_hub(record: Record, catalogue: Catalogue) -> bool:
    """Whether it was pulled from a repository, or the catalogue has it no more."""
    return record.source == "hub" and bool(record.asked or record.name not in catalogue.pairs)


def _again(
    record: Record, part_path: Callable[[Part], Path], endpoint: str, limit_rate: int
) -> Wanted:
    """The same files as before, as the hub has them now."""
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
    """A model of a record as something to pull: from its repository, or the file here."""
    if stored.repo:
        return Weights(repo=stored.repo, file=stored.file)
    return Weights(repo="", file=str(part_path(stored.parts[0])))


class _Kept(msgspec.Struct):
    pulls: tuple[Wanted, ...] = ()
    version: int = VERSION


class Unfinished:
    """One file, written whole each time, and none while nothing is wanted. For threads.

    What cannot be kept is pulled all the same; it only does not go on by itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def all(self) -> tuple[Wanted, ...]:
        """What is wanted, the oldest first; nothing where the file is broken."""
        try:
            kept = msgspec.json.decode(read_file(self._path), type=_Kept)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return ()
        return kept.pulls if kept.version == VERSION else ()

    def files(self) -> frozenset[str]:
        """The hashes of all files that are being fetched."""
        return frozenset(sha256 for each in self.all() for sha256 in each.files)

    def keep(self, wanted: Wanted) -> None:
        """Also in place of what was wanted under this name before."""
        wanted = msgspec.structs.replace(wanted, endpoint=_without_secrets(wanted.endpoint))
        with self._lock:
            others = [each for each in self.all() if each.name != wanted.name]
            self._write((*others, wanted))

    def drop(self, name: str) -> bool:
        """Forget one; whether it was wanted."""
        with self._lock:
            pulls = self.all()
            others = tuple(each for each in pulls if each.name != name)
            if others != pulls:
                self._write(others)
            return others != pulls

    def _write(self, pulls: tuple[Wanted, ...]) -> None:
        with suppress(RegistryError, UnsafePath, OSError):
            if pulls:
                make_folder(self._path.parent)
                write_whole(self._path, msgspec.json.encode(_Kept(pulls)))
            else:
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)


def _without_secrets(endpoint: str) -> str:
    """An address without a user's name and password, and without what may be a key behind it."""
    if not endpoint:
        return ""
    try:
        address = urlsplit(endpoint)
    except ValueError:
        return ""
    host = address.netloc.rpartition("@")[2]
    return urlunsplit((address.scheme, host, address.path, "", ""))
