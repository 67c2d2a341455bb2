"""The store, the catalogue and the pulls of one user, and the files that any name of a pair means.

Everything here blocks, so call it in a thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from localspec.errors import (
    Conflict,
    InvalidRequest,
    LocalspecError,
    ModelNotFound,
    PullCancelled,
    RecordTooNew,
    RegistryError,
    Unavailable,
)
from localspec.paths import Paths, expand_user, split_model_names
from localspec.protocol.answers import Hashing
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import AddRequest, CollectedView, RemovedView
from localspec.protocol.settings import Pooling
from localspec.registry.catalogue import (
    REPO_PATTERN,
    Catalogue,
    Preset,
    ask_which,
    explain_reserved_name,
    reload_catalogue,
    suggest_names,
)
from localspec.registry.disk import discovery
from localspec.registry.disk.drafts import (
    find_own_drafts,
    find_projector,
    list_files_beside,
    list_projectors,
)
from localspec.registry.header.fit import FreeMemory, LoadOptions, can_foresee
from localspec.registry.header.model import read_local_model
from localspec.registry.header.speeds import load_speeds
from localspec.registry.hub.offline import find_endpoint
from localspec.registry.hub.repository import derive_pair_name, parse_reference
from localspec.registry.ollama_names import find_same_family, find_same_model, is_ollama_name
from localspec.registry.pulls.messages import Job
from localspec.registry.pulls.running import Pulls
from localspec.registry.pulls.targets import PullTarget, UnfinishedPulls
from localspec.registry.store import integrity, local
from localspec.registry.store.files import FileState, HashCache, file_state, store_error
from localspec.registry.store.store import Record, Store
from localspec.registry.tuned import collect_tuned_drafts, find_tuned_draft

log = logging.getLogger("localspec.daemon")

BUILTIN = "builtin"
_MAX_SHOWN_CHARACTERS = 300  # of a path in an error message
_MAX_REMEMBERED_TARGETS = 32  # whose drafts are known until a file changes


class NoSuchPair(ModelNotFound):
    """No pair and no model of Ollama's has this name, so a client may have meant any pair."""


class NotPulled(ModelNotFound):
    """The pair is in the catalogue, but not on this machine."""


def is_file_name(name: str) -> bool:
    """Return whether the name means files. No name of a pair has such a form."""
    return any(
        part.lower().endswith(".gguf") or part.startswith(("/", "~")) or ":" in part
        for part in name.split(",")
    )


def builtin_files() -> PairFiles:
    """Return the files of the pair inside the package. Raises ModelNotFound if it has none."""
    folder = Path(__file__).parent.parent / "builtin"
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if not target.is_file():
        raise ModelNotFound(f"The built-in pair is missing: there is no {target}.", param="model")
    return PairFiles(BUILTIN, str(target), str(draft) if draft.is_file() else None)


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


def add_local_pair(registry: Registry, request: AddRequest) -> Record:
    """Make a pair of the person's own files.

    Raises InvalidRequest if a name is not allowed, Conflict if the pair's is taken or in use, ModelNotFound
    if there is no such file, and BadGguf, UnsafeModel, NotMatched or CannotRollBack if one cannot be used.
    """
    name = request.name
    registry.refuse_reserved(name)
    if request.replace and registry.in_use(name):
        raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
    file_names = [file for file in (request.target, request.draft) if file]
    _check_files_of(request, file_names)
    target, *drafts = (
        Path(file) if file.startswith("/") else find_file(file) for file in file_names
    )
    draft = drafts[0] if drafts else None
    notes: tuple[str, ...] = ()
    if not drafts and not request.no_draft and (sidecar := registry.find_sidecar(target)):
        draft = Path(sidecar)
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
        for model in map(discovery.find_model, from_ollama)
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
        free_memory: Callable[[], FreeMemory],
        *,
        checks: bool = True,
        by_tcp: Callable[[], bool] = bool,
        backend: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Create the registry. `in_use` returns whether a pair is loaded.

        free_memory: returns the memory that a pair could have if it were loaded instead of the present one.
        checks: if False, files named by path are not checked: a foreign engine decides itself what it can
        read. by_tcp: returns whether the current request came over TCP, so that no error reveals a path.
        backend: returns that which llama.cpp was built for.
        """
        self.paths = paths
        self.in_use = in_use
        self.free_memory = free_memory
        self._checks = checks
        self._by_tcp, self._backend = by_tcp, backend
        self._lock = threading.Lock()
        self._hashes = HashCache()
        unfinished = UnfinishedPulls(paths.unfinished_pulls)
        self.store = Store(paths.store, self._hashes, unfinished.files)
        self.pulls = Pulls(self._make_job, unfinished)
        self._catalogue: Catalogue | None = None  # read when it is first needed
        self._notices: dict[str, str] = {}  # by pair, until an answer has mentioned them

    @property
    def catalogue(self) -> Catalogue:
        with self._lock:
            self._catalogue = self._catalogue or reload_catalogue(self.paths.user_catalogue)
            return self._catalogue

    def _make_job(self, target: PullTarget) -> Job:
        free, speeds = self.free_memory(), load_speeds(str(self.paths.state))
        load = LoadOptions(speeds=speeds, foreseeable=can_foresee(self._backend(), free))
        return Job(
            target=target,
            store=str(self.paths.store),
            pairs=dict(self.catalogue.pairs),
            memory=free,
            load=load,
            login_endpoint=find_endpoint(),
        )

    def apply_preset(self, pair: PairFiles) -> PairFiles:
        """Return the pair with the settings of models.toml, which override those of its target's file."""
        preset = self.preset(pair.name)
        return msgspec.structs.replace(
            pair, chat_template=preset.chat_template, sampling=preset.sampling, rpc=preset.rpc
        )

    def preset(self, name: str) -> Preset:
        """Return what models.toml states about the pair of that name."""
        presets = self.catalogue.presets if self.has_presets else {}
        return presets.get(name) or Preset()

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

    @property
    def problem(self) -> str:
        """An error in the catalogue, as far as it was read. Never blocks."""
        return self._catalogue.problem if self._catalogue else ""

    @property
    def running_pulls(self) -> tuple[str, ...]:
        """The names of the pairs that are being pulled."""
        return tuple(pull.name for pull in self.pulls.running)

    @property
    def hashing(self) -> Hashing | None:
        """The progress of hashing a file before its pair is loaded or added."""
        return self._hashes.reading

    def reload(self) -> None:
        """Read models.toml again, if it has been read at all."""
        if self._catalogue:
            self._catalogue = reload_catalogue(self.paths.user_catalogue, self._catalogue)

    def resolve(self, name: str, cancelled: threading.Event | None = None) -> PairFiles:
        """Return the files of the pair `name`.

        `name` is "builtin", the name of a pair that was pulled or added or that another server answers for,
        or TARGET or "TARGET,DRAFT", where each is an absolute path or a name of Ollama's with its tag.

        The files of a pulled pair are checked first, and hashed if they never were or have changed, so call
        this in a thread. Setting `cancelled` ends that when nobody waits for the result any more.

        Raises:
            ModelNotFound: There is no pair of that name, or one of its files is missing.
            Damaged, StoreError: Its files or its record are damaged.
            BadGguf, UnsafeModel, NotMatched, CannotRollBack: Files named by path, or own files that
                have changed, cannot be used.
        """
        if name == BUILTIN:
            return with_tuned_draft(builtin_files(), self.paths.tuned)
        if upstream_pair := self.upstream(name):
            return upstream_pair
        name = self.resolve_alias(name)
        if is_file_name(name):
            files = self.files_of(name)
            files.pooling = self.check_files(
                *(Path(path) for path in (files.target, files.draft) if path)
            )
            found, hint = self.find_projector(Path(files.target), split_model_names(name)[0])
            files.projector, files.projector_hint = (str(found), "") if found else (None, hint)
            return files
        try:
            record = integrity.ensure_ready(
                self.store, self.refresh(name, cancelled).name, cancelled
            )
        except PullCancelled:  # the daemon is ending while a client still waits
            raise Unavailable("The daemon is shutting down; try again.", retry_after=2) from None
        target, draft = self.store.model_paths(record)
        files = PairFiles(record.name, str(target), str(draft) if draft else None)
        files.pooling = record.target.pooling
        files.draft_named = draft is not None and not record.draft_found
        if record.projector:
            files.projector = str(self.store.model_path(record.projector))
        files.projector_hint = _projector_hint(record)
        if draft:  # a pair that was added with --no-draft gets none
            _add_other_drafts(files, self.find_own_drafts(target))
        return with_tuned_draft(files, self.paths.tuned)

    def files_of(self, name: str) -> PairFiles:
        """Return the files that `name` means, with what drafts for a lone target, without reading the target.

        A name of two files means exactly these, so that drafts can be compared.

        Raises:
            NoSuchPair: Ollama has no model of that name. The message names pairs with the same model.
            ModelNotFound: There is no such file, or the name is one of more than two.
        """
        parts = split_model_names(name)
        if len(parts) > 2:
            problem = f"'{name[:80]}' names more than two files, a target and a draft."
            raise ModelNotFound(problem, param="model")
        try:
            target, *drafts = map(find_file, parts)
        except NoSuchPair as error:
            if len(parts) == 1 and is_ollama_name(name):
                raise self.not_in_ollama_error(name) from None
            if len(parts) == 1:
                raise
            # A plain ModelNotFound: the configured pair never answers for a name of two files, so that no
            # response reveals whether one of them exists.
            raise ModelNotFound(error.message, param=error.param) from None
        files = PairFiles(name, str(target), str(drafts[0]) if drafts else None)
        if files.draft is None:
            files.draft = self.find_sidecar(target)
            _add_other_drafts(files, self.find_own_drafts(target))
        return files

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
        # The status of an idle daemon may be requested every second.
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
        installed = [record.name for record in self.store.listing().records]
        same = [*find_same_model(name, installed), *self.catalogue.find_same_model(name)]
        return list(dict.fromkeys(same))

    def not_in_ollama_error(self, name: str) -> NoSuchPair:
        """Return the error that Ollama has no model of that name, and which pairs have the same model."""
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
        catalogue = self.catalogue
        installed = [record.name for record in self.store.listing().records]
        listed = [*catalogue.pairs, *catalogue.aliases, *catalogue.upstreams]
        names = dict.fromkeys([BUILTIN, *installed, *listed])
        hint = suggest_names(name.strip().lower(), names)
        if REPO_PATTERN.fullmatch(name.strip()) and not hint:
            hint = f" For the repository on the Hugging Face hub: localspec pull {name.strip()}."
        mistake = f". {self.problem}" if self.problem and not self._by_tcp() else ""
        return NoSuchPair(
            f"There is no pair '{name[:80]}'.{hint} See: localspec list --all{mistake}",
            param="model",
        )

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
        if not self._checks:
            return None
        try:
            return local.recall_record("named", target, draft).target.pooling
        except OSError as error:
            raise store_error(error, target) from error

    def find_own_drafts(self, target: Path) -> tuple[str, ...]:
        """Return the paths of what drafts for a target without being named, the best first.

        The target's own path stands for the heads in its file. The files are read once for each state of
        them.
        """
        try:
            files = (target, *list_files_beside(target))
            return _recall_own_drafts(target, tuple(map(file_state, files)))
        except (OSError, LocalspecError):  # `check_files` says what is wrong with the target
            return ()

    def find_sidecar(self, target: Path) -> str | None:
        """Return the path of the sidecar that drafts for a target without being named, or None."""
        first = next(iter(self.find_own_drafts(target)), None)
        return None if first == str(target) else first

    def find_projector(self, target: Path, name: str = "") -> tuple[Path | None, str]:
        """Return the projector of a target that fits it, or None, and a sentence about it.

        It lies beside the target, or the manifest of a model in Ollama names it. name: the target as the user
        named it. Reads the target's header if there is a projector.
        """
        model = (
            discovery.find_model(name) if ":" in name and not name.startswith(("/", "~")) else None
        )
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
        removed = integrity.remove_pair(self.store, own_name, in_use=self.in_use)
        removed.freed += sum(size for _, size in self._collect_tuned_drafts())
        return removed

    def collect_garbage(self, *, dry_run: bool = False) -> CollectedView:
        """Delete the files that no pair needs. Raises Conflict while a pull is running."""
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
        if name == BUILTIN:
            raise InvalidRequest(
                "The pair 'builtin' is part of the installation; it cannot be pulled, replaced "
                "or removed."
            )
        reason = explain_reserved_name(name)
        if reason and not name.endswith(".gguf"):  # a file name is resolved elsewhere
            raise InvalidRequest(f"'{name[:80]}' cannot be a pair's name: {reason}.")


@functools.lru_cache(maxsize=_MAX_REMEMBERED_TARGETS)
def _recall_own_drafts(target: Path, _states: tuple[FileState, ...]) -> tuple[str, ...]:
    return tuple(map(str, find_own_drafts(target)))


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


def _add_other_drafts(files: PairFiles, drafts: Sequence[str]) -> None:
    """Name the drafts that replace the pair's own one if it turns out to be of no use."""
    used = Path(files.draft or files.target).resolve()
    files.other_drafts = tuple(draft for draft in drafts if Path(draft).resolve() != used)
