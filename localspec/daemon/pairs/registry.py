"""The registry as the daemon uses it. Everything here blocks, so call it in a thread.

The modules of the registry are imported when they are first needed, so that an idle daemon stays small
and starts quickly.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from localspec.daemon.http import tcp
from localspec.daemon.pairs import names
from localspec.daemon.pairs.names import BUILTIN, NoSuchPair, NotPulled, builtin_files, is_file_name
from localspec.daemon.worker.plan import free_memory
from localspec.daemon.worker.table import RetentionPolicy
from localspec.errors import (
    Conflict,
    InvalidRequest,
    LocalspecError,
    ModelNotFound,
    RecordTooNew,
    RegistryError,
)
from localspec.paths import Paths
from localspec.protocol.answers import Hashing
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import AddRequest, CollectedView, RemovedView
from localspec.protocol.settings import Pooling
from localspec.registry.tuned import collect_tuned_drafts

if TYPE_CHECKING:
    from localspec.machine import Host
    from localspec.registry.catalogue import Catalogue, LiveCatalogue
    from localspec.registry.header.fit import FreeMemory
    from localspec.registry.pulls.messages import Job
    from localspec.registry.pulls.running import Pulls
    from localspec.registry.pulls.targets import PullTarget, UnfinishedPulls
    from localspec.registry.store.files import HashCache
    from localspec.registry.store.store import Record, Store


log = logging.getLogger("localspec.daemon")

FileState = tuple[str, int, int, int]  # path, inode, bytes and time of change
_MAX_CHECKED_PAIRS = 32  # results that are kept for pairs of files named by path
Result = TypeVar("Result")


def add_local_pair(registry: Registry, request: AddRequest) -> Record:
    """Make a pair of the person's own files.

    Raises InvalidRequest if a name is not allowed, Conflict if the pair's is taken or in use, ModelNotFound
    if there is no such file, and BadGguf, UnsafeModel, NotMatched or CannotRollBack if one cannot be used.
    """
    from localspec.registry.disk.discovery import find_model
    from localspec.registry.disk.drafts import find_sidecar
    from localspec.registry.store import local

    name = request.name
    registry.refuse_reserved(name)
    if request.replace and registry.in_use(name):
        raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
    file_names = [file for file in (request.target, request.draft) if file]
    _check_files_of(request, file_names)
    target, *drafts = (
        Path(file) if file.startswith("/") else names.find_file(file) for file in file_names
    )
    draft = drafts[0] if drafts else None
    notes: tuple[str, ...] = ()
    if not drafts and not request.no_draft and target.is_file() and (draft := find_sidecar(target)):
        notes = (f"{draft.name}, which lies beside the target, drafts for it.",)
    projector = Path(request.projector) if request.projector else None
    if not (projector or request.no_projector):
        projector, sentence = registry.find_projector(target, request.target)
        notes += (sentence,) if sentence else ()
    # Ollama names its files by their hashes, so the summary says which models they are.
    from_ollama = [file for file in file_names if not file.startswith("/")]
    notes += tuple(
        f"Not used of {model.name} in Ollama: {', '.join(model.unused)}. The chat template in its file is "
        "used; models.toml may set another one, and sampling parameters."
        for model in map(find_model, from_ollama)
        if model and model.unused
    )
    return local.add_own_pair(
        registry.store,
        name,
        target,
        draft,
        roles=request.roles,
        pooling=request.pooling,
        replace=request.replace,
        summary=" with ".join(file_names) if from_ollama else "",
        hash_now=request.hash_now,
        notes=notes,
        draft_found=draft is not None and not drafts,
        projector=projector,
    )


def _check_files_of(request: AddRequest, file_names: Collection[str]) -> None:
    """Refuse a request whose files are named wrongly, or named and unwanted at once."""
    for file in file_names:
        if not file.startswith("/") and ":" not in file:
            raise InvalidRequest(
                f"{file} must be an absolute path, or the name of a model in Ollama."
            )
    if request.draft and request.no_draft:
        raise InvalidRequest("Give either `draft` or `no_draft`.", param="no_draft")
    if request.projector and request.no_projector:
        raise InvalidRequest("Give either `projector` or `no_projector`.", param="no_projector")
    if request.projector and not request.projector.startswith("/"):
        raise InvalidRequest(f"{request.projector} must be an absolute path.", param="projector")


class Registry:
    """The store, catalogue and pulls of one user."""

    def __init__(
        self,
        paths: Paths,
        in_use: Callable[[str], bool],
        workers: Callable[[], Collection[int]],
        host: Host | None = None,
        *,
        checks: bool = True,
    ) -> None:
        """Create the registry. `in_use` returns whether a pair is loaded, `workers` the engines' pids.

        With `checks` False, files named by path are not checked: a foreign engine decides itself what it
        can read.
        """
        self.paths = paths
        self.in_use = in_use
        self._workers = workers
        self._host = host
        self._lock = threading.Lock()
        self._checks = checks
        self._checking = threading.Lock()
        self._checked: dict[tuple[FileState, ...], Pooling | None] = {}
        self._own_drafts: dict[tuple[FileState, ...], tuple[str, ...]] = {}
        self._catalogue: LiveCatalogue | None = None
        self._pulls: Pulls | None = None
        self._hashes: HashCache | None = None
        self._notices: dict[str, str] = {}  # by pair, until an answer has mentioned them
        self._unfinished_pulls: UnfinishedPulls | None = None
        self._ending = False

    # ------------------------------------------------------------------ parts

    @property
    def store(self) -> Store:
        from localspec.registry.store.files import HashCache
        from localspec.registry.store.store import Store

        with self._lock:
            self._hashes = self._hashes or HashCache()
        return Store(self.paths.store, self._hashes, self._unfinished().files)

    def _unfinished(self) -> UnfinishedPulls:
        from localspec.registry.pulls.targets import UnfinishedPulls

        with self._lock:
            self._unfinished_pulls = self._unfinished_pulls or UnfinishedPulls(
                self.paths.unfinished_pulls
            )
            return self._unfinished_pulls

    @property
    def catalogue(self) -> Catalogue:
        from localspec.registry.catalogue import LiveCatalogue

        with self._lock:
            if self._catalogue is None:
                self._catalogue = LiveCatalogue(self.paths.user_catalogue)
            return self._catalogue.current

    @property
    def pulls(self) -> Pulls:
        from localspec.registry.pulls.running import Pulls

        unfinished = self._unfinished()
        with self._lock:
            if self._pulls is None:
                self._pulls = Pulls(self._make_job, unfinished)
                if self._ending:
                    self._pulls.close(timeout=0)
            return self._pulls

    def _make_job(self, target: PullTarget) -> Job:
        from localspec.registry.hub.offline import find_endpoint
        from localspec.registry.pulls.messages import Job

        return Job(
            target=target,
            store=str(self.paths.store),
            pairs=dict(self.catalogue.pairs),
            memory=self.free_memory(),
            login_endpoint=find_endpoint(),
        )

    def free_memory(self) -> FreeMemory:
        """Return the memory that a pair could have if it were loaded instead of the present one."""
        from localspec.machine import Host

        return free_memory(self._host or Host.current(), self._workers())

    def apply_preset(self, pair: PairFiles) -> PairFiles:
        """Return the pair with the settings of models.toml, which override those of its target's file."""
        preset = self.catalogue.presets.get(pair.name)
        template, sampling = (preset.chat_template, preset.sampling) if preset else ("", {})
        rpc = preset.rpc if preset else ()
        return msgspec.structs.replace(pair, chat_template=template, sampling=sampling, rpc=rpc)

    def retention_policy(self, name: str) -> RetentionPolicy:
        """Return how long models.toml keeps the pair in memory."""
        preset = self.catalogue.presets.get(name) if self.has_presets else None
        return RetentionPolicy(preset.keep, preset.idle_unload) if preset else RetentionPolicy()

    @property
    def has_presets(self) -> bool:
        """Whether there is a file that may contain settings for pairs."""
        return self._catalogue is not None or self.paths.user_catalogue.exists()

    def upstream(self, name: str) -> PairFiles | None:
        """Return the pair of that name if another server answers for it."""
        key = name.strip().lower()
        upstream = self.catalogue.upstreams.get(key) if self.has_presets else None
        return PairFiles(key, "", upstream=upstream) if upstream else None

    @property
    def upstreams(self) -> list[str]:
        """The names of the pairs that other servers answer for."""
        return [*self.catalogue.upstreams] if self.has_presets else []

    # ------------------------------------------------------------------ without loading anything

    @property
    def problem(self) -> str:
        """An error in the catalogue, as far as it was read. Never blocks."""
        return self._catalogue.current.problem if self._catalogue else ""

    @property
    def running_pulls(self) -> tuple[str, ...]:
        """The names of the pairs that are being pulled."""
        if self._pulls is None:
            return ()
        from localspec.registry.pulls.messages import RUNNING_STATES

        return tuple(state.name for state in self._pulls.states() if state.state in RUNNING_STATES)

    @property
    def hashing(self) -> Hashing | None:
        """The progress of hashing a file before its pair is loaded or added."""
        reading = self._hashes.reading if self._hashes else None
        return Hashing(reading.file, reading.done, reading.size) if reading else None

    def reload(self) -> None:
        """Read models.toml again, if it has been read at all."""
        if self._catalogue:
            self._catalogue.reload()

    def resume(self) -> None:
        """Continue the pulls that the last daemon did not finish."""
        if self.paths.unfinished_pulls.exists():
            log.info("pulls of the last daemon go on: %d", len(self.pulls.states()))

    def stop(self) -> None:
        """Stop every pull. The data that they fetched is kept, and the next daemon continues them."""
        self._ending = True
        if self._pulls:
            self._pulls.close(timeout=0)

    def close(self) -> None:
        """Stop the pulls and wait for them for a short time."""
        if self._pulls:
            self._pulls.close()

    # ------------------------------------------------------------------ names

    def installed(self, name: str) -> Record:
        """Return the record of an installed pair, by its name or by an alias of the catalogue.

        Raises ModelNotFound, which says how to get the pair, or which names are similar.
        """
        key = self.resolve_alias(name).strip().lower()
        if pair := self.upstream(key):
            assert pair.upstream is not None
            raise InvalidRequest(
                f"The pair '{pair.name}' is served by {pair.upstream.upstream}: it has no files here.",
                param="model",
            )
        record = self._record(key)
        if record:
            return record
        try:
            pair_name, _ = self.catalogue.find(key)
        except ModelNotFound:
            raise self.unknown_pair_error(name) from None
        record = self._record(pair_name) if pair_name != key else None
        if record:
            return record
        raise NotPulled(
            f"The pair '{pair_name}' is not pulled yet; run: localspec pull {pair_name}",
            param="model",
        )

    def listed_name(self, name: str) -> str:
        """Return the name of a pair in the list of pairs, for any of its names."""
        # These two need no import. The status of an idle daemon may be requested every second.
        if name == BUILTIN or name.startswith(("/", "~")):
            return name
        try:
            called = self.resolve_alias(name)
        except RegistryError:  # its record cannot be read, which the list of pairs reports
            return name
        if is_file_name(called):
            return called
        key = called.strip().lower()
        return self.catalogue.aliases.get(key, key)

    def resolve_alias(self, name: str) -> str:
        """Return the installed pair for a repository (OWNER/REPO…) or for Ollama's name of its target.

        A model in Ollama's own store takes precedence over a pair. Any other name, and one that several pairs
        have, is returned unchanged.
        """
        from localspec.registry.disk import discovery
        from localspec.registry.hub.repository import derive_pair_name, parse_reference
        from localspec.registry.ollama_names import is_ollama_name

        if is_ollama_name(name):
            if discovery.find_model(name):
                return name
            pairs = [pair for pair in self._pairs_with_model(name) if self.readable_record(pair)]
            return pairs[0] if len(pairs) == 1 else name
        if "/" not in name or name.startswith(("/", "~", ".")):
            return name
        try:
            repository = parse_reference(name)
        except InvalidRequest:
            return name
        pair = derive_pair_name(repository) if repository else name
        return pair if self.readable_record(pair) else name

    def _pairs_with_model(self, name: str) -> list[str]:
        """Return the names of the pairs with the model that Ollama calls `name`, installed ones first."""
        from localspec.registry.ollama_names import find_same_model

        installed = [record.name for record in self.store.listing().records]
        same = [*find_same_model(name, installed), *self.catalogue.find_same_model(name)]
        return list(dict.fromkeys(same))

    def not_in_ollama_error(self, name: str) -> NoSuchPair:
        """Return the error that Ollama has no model of that name, and which pairs have the same model."""
        from localspec.registry.catalogue import ask_which
        from localspec.registry.ollama_names import find_same_family

        message = f"Ollama has no model '{name[:80]}'."
        installed = [record.name for record in self.store.listing().records]
        pairs = self._pairs_with_model(name)
        if len(pairs) == 1 and pairs[0] not in installed:
            advice = f" The pair '{pairs[0]}' has it and is not pulled yet; run: localspec pull {pairs[0]}"
        elif pairs:
            advice = f" Several pairs have it: {', '.join(pairs)}. Name one of them."
        else:
            listed = find_same_family(name, self.catalogue.names)
            family = find_same_family(name, installed)
            family += [self.catalogue.find(key)[0] for key in listed]
            hint = ask_which(list(dict.fromkeys(family)))
            advice = f"{hint} To list its models: localspec import"
        return NoSuchPair(message + advice, param="model")

    def refresh(
        self,
        name: str,
        cancel: threading.Event | None = None,
        progress: Callable[[int, int], None] = lambda done, size: None,
    ) -> Record:
        """Return the record of a pair, like `pulled`. Own files that have changed are read again.

        `take_notice` then mentions the change once. `progress(done, total)` is called with the bytes hashed.
        Raises BadGguf, UnsafeModel, NotMatched or CannotRollBack if the files cannot be used as they are now.
        """
        from localspec.registry.store import local

        record, notice = local.refresh_own_pair(self.store, self.installed(name), cancel, progress)
        if notice:
            log.info("%s: %s", record.name, notice)
            with self._lock:
                self._notices[record.name] = notice
        return record

    def take_notice(self, name: str) -> str:
        """Return what happened to the pair since the last call, or ""."""
        with self._lock:
            return self._notices.pop(name, "")

    def _record(self, name: str) -> Record | None:
        try:
            return self.store.get(name)
        except ModelNotFound:
            return None

    def unknown_pair_error(self, name: str) -> NoSuchPair:
        """Return the error that there is no such pair. The message suggests similar names."""
        from localspec.registry.catalogue import REPO_PATTERN, suggest_names

        catalogue = self.catalogue
        installed = [record.name for record in self.store.listing().records]
        listed = [*catalogue.pairs, *catalogue.aliases, *catalogue.upstreams]
        names = dict.fromkeys(["builtin", *installed, *listed])
        hint = suggest_names(name.strip().lower(), names)
        if REPO_PATTERN.fullmatch(name.strip()) and not hint:
            hint = f" For the repository on the Hugging Face hub: localspec pull {name.strip()}."
        mistake = f". {self.problem}" if self.problem and not tcp.is_tcp_request() else ""
        return NoSuchPair(
            f"There is no pair '{name[:80]}'.{hint} See: localspec list --all{mistake}",
            param="model",
        )

    # ------------------------------------------------------------------ changes

    def readable_record(self, name: str) -> Record | None:
        """Return the record of a pair, or None if it is damaged: a pull repairs it."""
        try:
            return self._record(name)
        except RecordTooNew:
            raise
        except RegistryError:
            return None

    def check_files(self, target: Path, draft: Path | None = None) -> Pooling | None:
        """Check files that are named by path, once for each state of the files, as for a pair that is added.

        Return the pooling of a model that turns texts into numbers. Raises BadGguf, UnsafeModel, NotMatched
        or CannotRollBack if the files cannot be used, and StoreError if a file cannot be read.
        """
        from localspec.registry.store import local
        from localspec.registry.store.files import store_error

        if not self._checks:
            return None
        try:
            return self._once(
                self._checked,
                [path for path in (target, draft) if path],
                lambda: local.make_record("named", target, draft).target.pooling,
            )
        except OSError as error:
            raise store_error(error, target) from error

    def _once(
        self,
        results: dict[tuple[FileState, ...], Result],
        files: Collection[Path],
        work: Callable[[], Result],
    ) -> Result:
        """Return the result of `work`, which is done once for each state of the files."""
        infos = [(path, path.stat()) for path in files]
        state = tuple(
            (str(path), info.st_ino, info.st_size, info.st_mtime_ns) for path, info in infos
        )
        with self._checking:
            if state not in results:
                results[state] = work()
                while len(results) > _MAX_CHECKED_PAIRS:
                    del results[next(iter(results))]
            return results[state]

    def find_own_drafts(self, target: Path) -> tuple[str, ...]:
        """Return the paths of what drafts for a target without being named, the best first.

        The target's own path stands for the heads in its file. The files are read once for each state of
        them.
        """
        from localspec.registry.disk.drafts import find_own_drafts, list_files_beside

        try:
            return self._once(
                self._own_drafts,
                (target, *list_files_beside(target)),
                lambda: tuple(map(str, find_own_drafts(target))),
            )
        except (OSError, LocalspecError):  # `check_files` says what is wrong with the target
            return ()

    def find_projector(self, target: Path, name: str = "") -> tuple[Path | None, str]:
        """Return the projector of a target that fits it, or None, and a sentence about it.

        It lies beside the target, or the manifest of a model in Ollama names it. name: the target as the user
        named it. Reads the target's header if there is a projector.
        """
        from localspec.registry.disk.discovery import find_model
        from localspec.registry.disk.drafts import find_projector, list_projectors
        from localspec.registry.header.model import read_local_model

        model = find_model(name) if ":" in name and not name.startswith(("/", "~")) else None
        try:
            candidates = model.projectors if model else list_projectors(target)
            found = find_projector(candidates, read_local_model(target)) if candidates else None
        except (OSError, LocalspecError):  # `check_files` says what is wrong with the target
            return None, ""
        if found and model:
            return found, f"The projector of {name} in Ollama lets it read pictures."
        if model and candidates:
            return None, f"It reads no pictures: the projector of {name} in Ollama cannot be used."
        beside = (
            f"{found.name}, which lies beside the target, lets it read pictures." if found else ""
        )
        return found, beside

    def check_removable(self, name: str) -> str:
        """Return the name in the store of a pair that may be removed."""
        self.refuse_reserved(name)
        return self.installed(name).name

    def remove(self, own_name: str) -> RemovedView:
        """Remove a pair and return what that freed. Raises Conflict if the pair is in use."""
        from localspec.registry.store import integrity

        removed = integrity.remove_pair(self.store, own_name, in_use=self.in_use)
        removed.freed += sum(size for _, size in self._collect_tuned_drafts())
        return removed

    def collect_garbage(self, *, dry_run: bool = False) -> CollectedView:
        """Delete the files that no pair needs. Raises Conflict while a pull is running."""
        from localspec.registry.store import integrity

        collected = integrity.collect_garbage(self.store, dry_run=dry_run)
        tuned = self._collect_tuned_drafts(dry_run=dry_run)
        collected.freed += sum(size for _, size in tuned)
        collected.files += tuple(name for name, _ in tuned)
        return collected

    def _collect_tuned_drafts(self, *, dry_run: bool = False) -> list[tuple[str, int]]:
        """Delete the tuned drafts of no pair, and return the names and sizes in bytes of their files."""
        listing = self.store.listing()
        if listing.problems:  # a record that cannot be read may be that of its pair
            return []
        files = [self.store.model_paths(record) for record in listing.records]
        with contextlib.suppress(ModelNotFound):
            builtin = builtin_files()
            files.append((Path(builtin.target), Path(builtin.draft) if builtin.draft else None))
        pairs = [(str(target), str(draft) if draft else "") for target, draft in files]
        return collect_tuned_drafts(self.paths.tuned, pairs, dry_run=dry_run)

    @staticmethod
    def refuse_reserved(name: str) -> None:
        """Refuse a name that no new pair may have. Raises InvalidRequest."""
        from localspec.registry.catalogue import explain_reserved_name

        if name == "builtin":
            raise InvalidRequest(
                "The pair 'builtin' is part of the installation; it cannot be pulled, replaced "
                "or removed."
            )
        reason = explain_reserved_name(name)
        if reason and not name.endswith(".gguf"):  # a file name is resolved elsewhere
            raise InvalidRequest(f"'{name[:80]}' cannot be a pair's name: {reason}.")
