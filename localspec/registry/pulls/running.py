"""The pulls under way in this process: started once, watched by many, cancelled by name."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from localspec.errors import (
    Conflict,
    DiskFull,
    Gated,
    InvalidRequest,
    LocalspecError,
    NetworkSettings,
    NotFound,
    Offline,
    ProxyRefused,
    PullCancelled,
    Unreachable,
    Untrusted,
    WebPage,
)
from localspec.registry.catalogue import Catalogue
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.repository import pair_name, reference
from localspec.registry.hub.retry import Retry
from localspec.registry.hub.transfer import Limit
from localspec.registry.pulls.decide import decide
from localspec.registry.pulls.plan import Plan
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.state import RUNNING, FileState, PullState, State
from localspec.registry.pulls.wanted import Unfinished, Wanted

_RATE_SECONDS = 5.0
# Of failures those that pass: such a pull is tried again when the daemon starts the next time.
_PASSING = (Unreachable, Offline, WebPage, ProxyRefused, Untrusted, NetworkSettings, DiskFull)
_KEPT = 32  # finished pulls that can still be asked about


class Pull:
    """One pull in its own thread. It goes on whoever watches or leaves."""

    def __init__(
        self,
        puller: Puller,
        wanted: Wanted,
        catalogue: Callable[[], Catalogue],
        unfinished: Unfinished,
        *,
        resumed: bool = False,
    ) -> None:
        self.name = name = wanted.name
        self.wanted = wanted
        self.error: LocalspecError | None = None
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._waits: dict[int, Retry] = {}  # by the thread that waits
        self._watchers: list[Callable[[], None]] = []
        patience = dataclasses.replace(puller.tuning.patience, told=self._told)
        tuning = dataclasses.replace(puller.tuning, patience=patience)
        self._puller = dataclasses.replace(puller, tuning=tuning)
        self._unfinished, self._resumed = unfinished, resumed
        self._interrupted = False
        self._keep(wanted)
        self._cancel = threading.Event()
        self._finished = threading.Event()
        self._samples: deque[tuple[float, int]] = deque()
        self._state = PullState(name=name, state="checking")
        self._thread = threading.Thread(target=self._run, name=f"pull-{name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> PullState:
        """A snapshot; cheap, from any thread."""
        return self._state

    @contextmanager
    def watched(self, changed: Callable[[], None]) -> Iterator[None]:
        """While it is held `changed` is called after each new `state`, from the pull's threads."""
        with self._lock:
            self._watchers.append(changed)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(changed)

    def cancel(self) -> None:
        """Ask it to stop, and forget that it was wanted; what was fetched is kept."""
        self._cancel.set()
        if self._finished.is_set() and self._forget():
            self._change(
                state="cancelled",
                message="The pull is cancelled; anything already downloaded is kept for the next one.",
                code="pull_cancelled",
            )

    def interrupt(self) -> None:
        """Ask it to stop for now: the daemon ends. What was cancelled before stays so."""
        if not self._cancel.is_set():
            self._interrupted = True
            self._cancel.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended; False when `timeout` seconds were not enough."""
        return self._finished.wait(timeout)

    def _run(self) -> None:
        try:
            decision = decide(self._puller, self.wanted, self._catalogue(), self._cancel)
            self._keep(msgspec.structs.replace(self.wanted, pair=decision.pair, decided=True))
            self._change(offers=decision.offers, said=decision.said)
            self._puller.pull(
                self.name,
                decision.pair,
                self._progress,
                self._cancel,
                self._planned,
                decision.known,
            )
            self._forget()
            self._change(
                state="done",
                seconds_left=0.0,
                rate=0.0,
                done=self._state.size,
                hashed=self._state.size,
            )
        except LocalspecError as error:
            self._ended_by(error)
        except Exception as error:  # a fault of ours must not leave the pull running for ever
            self._ended_by(LocalspecError(f"The pull failed: {type(error).__name__}."))
        finally:
            self._finished.set()

    def _ended_by(self, error: LocalspecError) -> None:
        """Interrupted, whatever came of that; cancelled, or failed: only what passes is tried again."""
        if self._interrupted:
            sentence = (
                f"The pull of {self.name} is interrupted because the daemon is stopping; it "
                "resumes when the daemon starts again."
            )
            self._fail(PullCancelled(sentence), "interrupted")
            return
        begun = self._resumed or bool(self.wanted.files)
        passing = (*_PASSING, Gated) if self._resumed else _PASSING  # no token was kept
        if not begun or not isinstance(error, passing):
            self._forget()
        self._fail(error, "cancelled" if error.code == "pull_cancelled" else "failed")

    def _fail(self, error: LocalspecError, state: State) -> None:
        self.error = error
        self._change(
            state=state, rate=0.0, seconds_left=None, message=error.message, code=error.code
        )

    def _keep(self, wanted: Wanted) -> None:
        """Remember what is wanted, as far as it is known."""
        self.wanted = wanted
        self._unfinished.keep(wanted)

    def _forget(self) -> bool:
        return self._unfinished.drop(self.name)

    def _planned(self, plan: Plan) -> None:
        remotes = [each.remote for each in plan.files]
        hashes = tuple(each.sha256 for each in remotes)
        self._keep(msgspec.structs.replace(self.wanted, files=hashes))
        files = tuple(FileState(each.name, 0, each.size) for each in remotes)
        size = sum(each.size for each in remotes)
        self._change(
            state="downloading", files=files, size=size, done=size - plan.fetch, notes=plan.notes
        )

    def _progress(self, files: tuple[FileState, ...]) -> None:
        """From the pull's own thread, four times a second."""
        now = time.monotonic()
        done, hashed = sum(each.done for each in files), sum(each.hashed for each in files)
        size = sum(each.size for each in files)
        verifying = done == size
        here = hashed if verifying else done
        if verifying != (self._state.state == "verifying"):
            self._samples.clear()  # of the other
        self._samples.append((now, here))
        while now - self._samples[0][0] > _RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = max(0.0, (here - before) / (now - since)) if now > since else 0.0
        self._change(
            state="verifying" if verifying else "downloading",
            done=done,
            size=size,
            hashed=hashed,
            rate=rate,
            seconds_left=(size - here) / rate if rate else None,
            files=files,
        )

    def _told(self, retry: Retry | None) -> None:
        """From the threads that fetch."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)
            if retry:
                self._waits[threading.get_ident()] = retry
            first = min(self._waits.values(), key=lambda each: each.seconds, default=None)
        self._change(retry=first)

    def _change(self, **values: object) -> None:
        with self._lock:
            self._state = msgspec.structs.replace(self._state, **values)
            watchers = tuple(self._watchers)
        for changed in watchers:
            changed()


class Pulls:
    """All pulls of a daemon; those of the last one that were not finished go on at once."""

    def __init__(
        self,
        puller: Puller,
        catalogue: Callable[[], Catalogue],
        unfinished: Unfinished,
    ) -> None:
        self._puller, self._catalogue, self._unfinished = puller, catalogue, unfinished
        self._lock = threading.Lock()
        self._pulls: dict[str, Pull] = {}
        for wanted in unfinished.all():
            hub = Hub(wanted.endpoint) if wanted.endpoint else None
            self._pulls[wanted.name] = self._pull(wanted, hub, resumed=True)

    def _pull(self, wanted: Wanted, hub: Hub | None, *, resumed: bool = False) -> Pull:
        puller = dataclasses.replace(
            self._puller,
            hub=hub or self._puller.hub,
            limit=Limit(wanted.limit_rate),
            asked=wanted.asked,
        )
        return Pull(puller, wanted, self._catalogue, self._unfinished, resumed=resumed)

    def start(self, wanted: Wanted, hub: Hub | None = None) -> Pull:
        """Start a pull (from `hub`, if not the usual one), or join the running one of this pair.

        Raises:
            Conflict: something else is being pulled under this name.
        """
        name = wanted.name
        with self._lock:
            running = self._pulls.get(name)
            if running and running.state.state in RUNNING:
                if running.wanted.asked != wanted.asked:
                    raise Conflict(
                        f"'{name}' is already being pulled, as {running.wanted.asked or name}; wait until "
                        f"it is done, or run: localspec pulls cancel {name}"
                    )
                return running
            self._pulls.pop(name, None)
            while len(self._pulls) >= _KEPT and self._forget_oldest():
                pass
            pull = self._pulls[name] = self._pull(wanted, hub)
            return pull

    def wanted(self, name: str) -> Wanted | None:
        """What is being pulled under this name, or still wanted after it failed."""
        with self._lock:
            pull = self._pulls.get(name)
        if pull and pull.state.state in RUNNING:
            return pull.wanted
        return next((each for each in self._unfinished.all() if each.name == name), None)

    def states(self) -> tuple[PullState, ...]:
        """Every pull running or lately ended, oldest first."""
        with self._lock:
            return tuple(pull.state for pull in self._pulls.values())

    def get(self, name: str) -> Pull:
        """Raises NotFound."""
        with self._lock:
            pull = self._pulls.get(name)
        if pull is None:
            raise NotFound(f"There is no pull of '{name}'; see: localspec pulls")
        return pull

    def of_repository(self, written: str) -> Pull:
        """The pull of what a person wrote for a repository. Raises NotFound."""
        with suppress(InvalidRequest, NotFound):
            found = reference(written)
            return self.get(pair_name(found) if found else written)
        return self.get(written)  # which says so

    def close(self, timeout: float = 5.0) -> None:
        """Interrupt all and wait up to `timeout` seconds; for the daemon's end."""
        with self._lock:
            pulls = list(self._pulls.values())
        for pull in pulls:
            pull.interrupt()
        end = time.monotonic() + timeout
        for pull in pulls:
            pull.wait(max(0.0, end - time.monotonic()))

    def _forget_oldest(self) -> bool:
        for name, pull in self._pulls.items():
            if pull.state.state not in RUNNING:
                del self._pulls[name]
                return True
        return False
