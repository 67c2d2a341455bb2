"""The registry as the daemon uses it. Everything here blocks: call it in a thread.

Nothing of the registry is imported before somebody asks for it, so that an idle daemon stays small
and starts quickly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localspec.daemon.pairs.names import BUILTIN, NoSuchPair, NotPulled, names_files
from localspec.daemon.worker.placement import free_memory
from localspec.daemon.worker.residents import Stay
from localspec.errors import InvalidRequest, ModelNotFound, RecordTooNew, RegistryError
from localspec.paths import Paths
from localspec.protocol.answers import Hashing
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import CollectedView, RemovedView
from localspec.protocol.settings import Pooling

if TYPE_CHECKING:
    from localspec.machine import Host
    from localspec.registry.catalogue import Catalogue, LiveCatalogue
    from localspec.registry.header.fit import Memory
    from localspec.registry.pulls.running import Pulls
    from localspec.registry.pulls.wanted import Unfinished
    from localspec.registry.store.files import Hashes
    from localspec.registry.store.records import Record
    from localspec.registry.store.store import Store

log = logging.getLogger("localspec.daemon")

_REMEMBERED = 32  # files named by paths that were found right


class Registry:
    """Store, catalogue and pulls of one user."""

    def __init__(
        self,
        paths: Paths,
        in_use: Callable[[str], bool],
        workers: Callable[[], Collection[int]],
        host: Host | None = None,
        *,
        checks: bool = True,
    ) -> None:
        """`in_use`: whether a pair is loaded; `workers`: the engines' pids.

        `checks` False: an engine of somebody else's decides itself what it can read.
        """
        self.paths = paths
        self.in_use = in_use
        self._workers = workers
        self._host = host
        self._lock = threading.Lock()
        self._checks = checks
        self._checking = threading.Lock()
        self._checked: dict[tuple[tuple[str, int, int, int], ...], Pooling | None] = {}
        self._catalogue: LiveCatalogue | None = None
        self._pulls: Pulls | None = None
        self._hashes: Hashes | None = None
        self._news: dict[str, str] = {}  # by pair, until somebody has been told
        self._kept: Unfinished | None = None
        self._ending = False

    # ------------------------------------------------------------------ parts

    @property
    def store(self) -> Store:
        from localspec.registry.store.store import Store

        return Store(self.paths.store, self._known_hashes(), self._unfinished().files)

    def _unfinished(self) -> Unfinished:
        from localspec.registry.pulls.wanted import Unfinished

        with self._lock:
            self._kept = self._kept or Unfinished(self.paths.unfinished_pulls)
            return self._kept

    def _known_hashes(self) -> Hashes:
        from localspec.registry.store.files import Hashes

        with self._lock:
            self._hashes = self._hashes or Hashes()
            return self._hashes

    @property
    def catalogue(self) -> Catalogue:
        return self._live().current

    def _live(self) -> LiveCatalogue:
        from localspec.registry.catalogue import LiveCatalogue

        with self._lock:
            if self._catalogue is None:
                self._catalogue = LiveCatalogue(self.paths.user_catalogue)
            return self._catalogue

    @property
    def pulls(self) -> Pulls:
        from localspec.registry.hub.hub import Hub
        from localspec.registry.pulls.pull import Puller
        from localspec.registry.pulls.running import Pulls

        store, unfinished = self.store, self._unfinished()
        with self._lock:
            if self._pulls is None:
                puller = Puller(store, Hub(), memory=self.memory)
                self._pulls = Pulls(puller, lambda: self.catalogue, unfinished)
                if self._ending:
                    self._pulls.close(timeout=0)
            return self._pulls

    def memory(self) -> Memory:
        """What a pair could have if it were loaded instead of the present one."""
        from localspec.machine import Host

        return free_memory(self._host or Host.here(), self._workers())

    def preset(self, pair: PairFiles) -> PairFiles:
        """The pair with what models.toml says of it in place of its target's file."""
        found = self.catalogue.presets.get(pair.name)
        template, sampling = (found.chat_template, found.sampling) if found else ("", {})
        rpc = found.rpc if found else ()
        return msgspec.structs.replace(pair, chat_template=template, sampling=sampling, rpc=rpc)

    def stay(self, name: str) -> Stay:
        """How long models.toml says that the pair stays in memory."""
        found = self.catalogue.presets.get(name) if self.has_presets else None
        return Stay(found.keep, found.idle_unload) if found else Stay()

    @property
    def has_presets(self) -> bool:
        """Whether there is a file that may say any."""
        return self._catalogue is not None or self.paths.user_catalogue.exists()

    def upstream(self, name: str) -> PairFiles | None:
        """The pair of that name, where another server answers for it."""
        own = name.strip().lower()
        found = self.catalogue.upstreams.get(own) if self.has_presets else None
        return PairFiles(own, "", upstream=found) if found else None

    @property
    def upstreams(self) -> list[str]:
        """The names of those pairs."""
        return [*self.catalogue.upstreams] if self.has_presets else []

    # ------------------------------------------------------------------ without loading anything

    @property
    def problem(self) -> str:
        """What is wrong with the catalogue, as far as it was read; never blocks."""
        return self._catalogue.problem if self._catalogue else ""

    @property
    def pulling(self) -> tuple[str, ...]:
        """The pairs that are being pulled."""
        if self._pulls is None:
            return ()
        from localspec.registry.pulls.state import RUNNING

        return tuple(state.name for state in self._pulls.states() if state.state in RUNNING)

    @property
    def hashing(self) -> Hashing | None:
        """How far the file is that is hashed before its pair is loaded or added."""
        reading = self._hashes.reading if self._hashes else None
        return Hashing(reading.file, reading.done, reading.size) if reading else None

    def reload(self) -> None:
        """Read models.toml again, if anybody has read it yet."""
        if self._catalogue:
            self._catalogue.reload()

    def resume(self) -> None:
        """Go on with the pulls that the last daemon did not finish."""
        if self.paths.unfinished_pulls.exists():
            log.info("pulls of the last daemon go on: %d", len(self.pulls.states()))

    def stop(self) -> None:
        """Ask every pull to stop; what they fetched is kept, and they go on at the next start."""
        self._ending = True
        if self._pulls:
            self._pulls.close(timeout=0)

    def close(self) -> None:
        """Stop the pulls and wait for them a little."""
        if self._pulls:
            self._pulls.close()

    # ------------------------------------------------------------------ names

    def pulled(self, name: str) -> Record:
        """The record of a pair that is here, by its name or an alias of the catalogue.

        Raises:
            ModelNotFound: saying how to get it, or which names are near.
        """
        wanted = self.called(name).strip().lower()
        if found := self.upstream(wanted):
            assert found.upstream is not None
            raise InvalidRequest(
                f"The pair '{found.name}' is served by {found.upstream.upstream}: it has no files here.",
                param="model",
            )
        record = self._record(wanted)
        if record:
            return record
        try:
            own, _ = self.catalogue.find(wanted)
        except ModelNotFound:
            raise self.unknown(name) from None
        record = self._record(own) if own != wanted else None
        if record:
            return record
        raise NotPulled(
            f"The pair '{own}' is not pulled yet; run: localspec pull {own}", param="model"
        )

    def own_name(self, name: str) -> str:
        """Return what a pair is called in the list of pairs, for any of its names."""
        # Nothing is imported for these two: the status of an idle daemon is asked every second.
        if name == BUILTIN or name.startswith(("/", "~")):
            return name
        try:
            called = self.called(name)
        except RegistryError:  # its record cannot be read, which the list says
            return name
        if names_files(called):
            return called
        wanted = called.strip().lower()
        return self.catalogue.aliases.get(wanted, wanted)

    def called(self, name: str) -> str:
        """Return the pair that is here of a repository (OWNER/REPO…) or of Ollama's name for its target.

        A model in Ollama's own store goes before a pair. Any other name is returned as it is.
        """
        from localspec.registry.hub.repository import pair_name, reference
        from localspec.registry.ollama_names import is_ollama_name

        if is_ollama_name(name):
            return self._same_as_in_ollama(name)
        if "/" not in name or name.startswith(("/", "~", ".")):
            return name
        try:
            found = reference(name)
        except InvalidRequest:
            return name
        own = pair_name(found) if found else name
        return own if self.whole_record(own) else name

    def _same_as_in_ollama(self, name: str) -> str:
        """Return the installed pair with the model that Ollama calls `name`; `name` if there is none,
        if Ollama has the model itself, or if several pairs have it.
        """
        from localspec.registry.disk import ollama

        if ollama.named(name):
            return name
        here = [each for each in self._same_model(name) if self.whole_record(each)]
        return here[0] if len(here) == 1 else name

    def _same_model(self, name: str) -> list[str]:
        """Return the names of the pairs with the model that Ollama calls `name`, installed ones ahead."""
        from localspec.registry.ollama_names import same_model

        here = [record.name for record in self.store.listing().records]
        return list(dict.fromkeys([*same_model(name, here), *self.catalogue.same_model(name)]))

    def not_in_ollama(self, name: str) -> NoSuchPair:
        """Return the error that Ollama has no model of that name, with the pairs that have it."""
        from localspec.registry.catalogue import one_of
        from localspec.registry.ollama_names import same_family

        said = f"Ollama has no model '{name[:80]}'."
        here = [record.name for record in self.store.listing().records]
        same = self._same_model(name)
        if len(same) == 1 and same[0] not in here:
            more = (
                f" The pair '{same[0]}' has it and is not pulled yet; run: localspec pull {same[0]}"
            )
        elif same:
            more = f" Several pairs have it: {', '.join(same)}. Name one of them."
        else:
            own = same_family(name, self.catalogue.names)
            family = [*same_family(name, here), *(self.catalogue.find(each)[0] for each in own)]
            hint = one_of(list(dict.fromkeys(family)))
            more = f"{hint} To list its models: localspec import"
        return NoSuchPair(said + more, param="model")

    def refreshed(
        self,
        name: str,
        cancel: threading.Event | None = None,
        progress: Callable[[int, int], None] = lambda done, size: None,
    ) -> Record:
        """As `pulled`; own files that have changed are read again, and `news` says so once.

        `progress(done, total)` in bytes hears of their hashing.

        Raises:
            BadGguf, UnsafeModel, NotMatched, CannotRollBack: they cannot be used as they are now.
        """
        from localspec.registry.store import local

        record, news = local.refreshed(self.store, self.pulled(name), cancel, progress)
        if news:
            log.info("%s: %s", record.name, news)
            with self._lock:
                self._news[record.name] = news
        return record

    def news(self, name: str) -> str:
        """What happened to the pair since this was asked last; empty where nothing did."""
        with self._lock:
            return self._news.pop(name, "")

    def _record(self, name: str) -> Record | None:
        try:
            return self.store.get(name)
        except ModelNotFound:
            return None

    def unknown(self, name: str) -> NoSuchPair:
        """That there is no such pair, and which names are near."""
        from localspec.registry.catalogue import REPO, did_you_mean

        catalogue = self.catalogue
        here = [record.name for record in self.store.listing().records]
        others = [*catalogue.pairs, *catalogue.aliases, *catalogue.upstreams]
        names = dict.fromkeys(["builtin", *here, *others])
        hint = did_you_mean(name.strip().lower(), names)
        if REPO.fullmatch(name.strip()) and not hint:
            hint = f" For the repository on the Hugging Face hub: localspec pull {name.strip()}."
        return NoSuchPair(
            f"There is no pair '{name[:80]}'.{hint} See: localspec list --all", param="model"
        )

    # ------------------------------------------------------------------ changes

    def whole_record(self, name: str) -> Record | None:
        """A record that can be read; a broken one is mended by a pull."""
        try:
            return self._record(name)
        except RecordTooNew:
            raise
        except RegistryError:
            return None

    def check(self, target: Path, draft: Path | None = None) -> Pooling | None:
        """What `add` checks of files, for those that are named by their paths; each state once. Returns the
        pooling of what turns texts into numbers.

        Raises:
            BadGguf, UnsafeModel, NotMatched, CannotRollBack; StoreError: one cannot be read.
        """
        from localspec.registry.store import local
        from localspec.registry.store.files import store_error

        if not self._checks:
            return None
        try:
            state = tuple(_state(path) for path in (target, draft) if path)
            with self._checking:
                if state not in self._checked:
                    found = local.describe_files("named", target, draft).target.pooling
                    kept = list(self._checked.items())[-_REMEMBERED:]
                    self._checked = dict([*kept, (state, found)])
                return self._checked[state]
        except OSError as error:
            raise store_error(error, target) from error

    def removable(self, name: str) -> str:
        """The own name of a pair that is in the store."""
        self.refuse_reserved(name)
        return self.pulled(name).name

    def remove(self, own_name: str) -> RemovedView:
        """What that freed. Raises Conflict where it is in use."""
        from localspec.registry.store import garbage

        return garbage.remove(self.store, own_name, in_use=self.in_use)

    def collect(self, *, dry_run: bool = False) -> CollectedView:
        """Delete what no pair needs. Raises Conflict while a pull is running."""
        from localspec.registry.store import garbage

        return garbage.collect(self.store, dry_run=dry_run)

    @staticmethod
    def refuse_reserved(name: str) -> None:
        """Raises InvalidRequest."""
        from localspec.registry.catalogue import reserved

        if name == "builtin":
            raise InvalidRequest(
                "The pair 'builtin' is part of the installation; it cannot be pulled, replaced "
                "or removed."
            )
        what = reserved(name)
        if what and not name.endswith(".gguf"):  # a file is looked for elsewhere
            raise InvalidRequest(f"'{name[:80]}' cannot be a pair's name: {what}.")


def _state(path: Path) -> tuple[str, int, int, int]:
    """What changes when a file does."""
    info = path.stat()
    return str(path), info.st_ino, info.st_size, info.st_mtime_ns
