"""The pulls in progress in this process: each is started once, may be watched by many, and has a name."""

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
from localspec.registry.hub.repository import derive_pair_name, parse_reference
from localspec.registry.hub.retry import Retry
from localspec.registry.hub.transfer import RateLimit
from localspec.registry.pulls.plan import PullPlan
from localspec.registry.pulls.pull import RUNNING_STATES, FileState, Puller, PullState, State
from localspec.registry.pulls.resolve import PullTarget, UnfinishedPulls, decide

_RATE_WINDOW_S = 5.0
# Failures that may be temporary. Such a pull is tried again when the daemon starts the next time.
_TEMPORARY_ERRORS = (
    Unreachable,
    Offline,
    WebPage,
    ProxyRefused,
    Untrusted,
    NetworkSettings,
    DiskFull,
)
_ENDED_LISTED_S = 3600.0  # how long a pull that ended is listed
_MAX_LISTED_PULLS = 32  # finished ones beyond that are forgotten


class Pull:
    """One pull in its own thread. It continues whether or not anybody watches."""

    def __init__(
        self,
        puller: Puller,
        request: PullTarget,
        catalogue: Callable[[], Catalogue],
        unfinished: UnfinishedPulls,
        *,
        resumed: bool = False,
    ) -> None:
        self.name = name = request.name
        self.target = request
        self.error: LocalspecError | None = None
        self.ended_at = 0.0  # monotonic time; 0 while it runs
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._waits: dict[int, Retry] = {}  # by the id of the waiting thread
        self._watchers: list[Callable[[], None]] = []
        retry_policy = dataclasses.replace(puller.tuning.retry_policy, on_wait=self._set_retry)
        tuning = dataclasses.replace(puller.tuning, retry_policy=retry_policy)
        self._puller = dataclasses.replace(puller, tuning=tuning)
        self._unfinished, self._resumed = unfinished, resumed
        self._interrupted = False
        self._remember(request)
        self._cancel = threading.Event()
        self._finished = threading.Event()
        self._samples: deque[tuple[float, int]] = deque()
        self._state = PullState(name=name, state="checking")
        self._thread = threading.Thread(target=self._run, name=f"pull-{name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> PullState:
        """A snapshot of the pull; cheap to read from any thread."""
        return self._state

    @contextmanager
    def watched(self, changed: Callable[[], None]) -> Iterator[None]:
        """Call `changed` after each change of `state`, from the pull's threads, until the block ends."""
        with self._lock:
            self._watchers.append(changed)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(changed)

    def cancel(self) -> None:
        """Stop the pull and forget that it was requested; what was downloaded is kept."""
        self._cancel.set()
        if self._finished.is_set() and self._forget():
            self._update_state(
                state="cancelled",
                message="The pull is cancelled; anything already downloaded is kept for the next one.",
                code="pull_cancelled",
            )

    def interrupt(self) -> None:
        """Stop the pull until the daemon starts again; a cancelled pull stays cancelled."""
        if not self._cancel.is_set():
            self._interrupted = True
            self._cancel.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the pull has ended; return False after `timeout` seconds."""
        return self._finished.wait(timeout)

    def _run(self) -> None:
        try:
            decision = decide(self._puller, self.target, self._catalogue(), self._cancel)
            self._remember(msgspec.structs.replace(self.target, pair=decision.pair, decided=True))
            self._update_state(offers=decision.offers, said=decision.said)
            self._puller.pull(
                self.name,
                decision.pair,
                self._on_progress,
                self._cancel,
                self._on_plan,
                decision.known,
            )
            self._forget()
            self._update_state(
                state="done",
                seconds_left=0.0,
                rate=0.0,
                done=self._state.size,
                hashed=self._state.size,
            )
        except LocalspecError as error:
            self._end_with(error)
        except Exception as error:  # a bug must not leave the pull running for ever
            self._end_with(LocalspecError(f"The pull failed: {type(error).__name__}."))
        finally:
            self.ended_at = time.monotonic()
            self._finished.set()

    def _end_with(self, error: LocalspecError) -> None:
        """Set the final state after an error: interrupted, cancelled or failed.

        Only a pull with a temporary error is tried again later.
        """
        if self._interrupted:
            sentence = (
                f"The pull of {self.name} is interrupted because the daemon is stopping; it "
                "resumes when the daemon starts again."
            )
            self._fail(PullCancelled(sentence), "interrupted")
            return
        has_started = self._resumed or bool(self.target.files)
        # A resumed pull has no token, since tokens are not stored.
        temporary = (*_TEMPORARY_ERRORS, Gated) if self._resumed else _TEMPORARY_ERRORS
        if not has_started or not isinstance(error, temporary):
            self._forget()
        self._fail(error, "cancelled" if error.code == "pull_cancelled" else "failed")

    def _fail(self, error: LocalspecError, state: State) -> None:
        self.error = error
        self._update_state(
            state=state, rate=0.0, seconds_left=None, message=error.message, code=error.code
        )

    def _remember(self, request: PullTarget) -> None:
        """Store the request as far as it is known."""
        self.target = request
        self._unfinished.keep(request)

    def _forget(self) -> bool:
        return self._unfinished.drop(self.name)

    def _on_plan(self, plan: PullPlan) -> None:
        remotes = [file.remote for file in plan.files]
        hashes = tuple(file.sha256 for file in remotes)
        self._remember(msgspec.structs.replace(self.target, files=hashes))
        files = tuple(FileState(file.name, 0, file.size) for file in remotes)
        size = sum(file.size for file in remotes)
        self._update_state(
            state="downloading", files=files, size=size, done=size - plan.fetch, notes=plan.notes
        )

    def _on_progress(self, files: tuple[FileState, ...]) -> None:
        """Update the state; the pull's own thread calls this four times a second."""
        now = time.monotonic()
        done, hashed = sum(file.done for file in files), sum(file.hashed for file in files)
        size = sum(file.size for file in files)
        verifying = done == size
        position = hashed if verifying else done
        if verifying != (self._state.state == "verifying"):
            self._samples.clear()  # they belong to the other phase
        self._samples.append((now, position))
        while now - self._samples[0][0] > _RATE_WINDOW_S:
            self._samples.popleft()
        start_time, start_position = self._samples[0]
        rate = (
            max(0.0, (position - start_position) / (now - start_time)) if now > start_time else 0.0
        )
        self._update_state(
            state="verifying" if verifying else "downloading",
            done=done,
            size=size,
            hashed=hashed,
            rate=rate,
            seconds_left=(size - position) / rate if rate else None,
            files=files,
        )

    def _set_retry(self, retry: Retry | None) -> None:
        """Update the retry that is shown; the downloading threads call this."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)
            if retry:
                self._waits[threading.get_ident()] = retry
            next_retry = min(self._waits.values(), key=lambda wait: wait.seconds, default=None)
        self._update_state(retry=next_retry)

    def _update_state(self, **values: object) -> None:
        with self._lock:
            self._state = msgspec.structs.replace(self._state, **values)
            watchers = tuple(self._watchers)
        for notify in watchers:
            notify()


class Pulls:
    """All pulls of a daemon. The unfinished pulls of the previous daemon resume at once."""

    def __init__(
        self,
        puller: Puller,
        catalogue: Callable[[], Catalogue],
        unfinished: UnfinishedPulls,
    ) -> None:
        self._puller, self._catalogue, self._unfinished = puller, catalogue, unfinished
        self._lock = threading.Lock()
        self._pulls: dict[str, Pull] = {}
        for request in unfinished.all():
            hub = Hub(request.endpoint) if request.endpoint else None
            self._pulls[request.name] = self._start_pull(request, hub, resumed=True)

    def _start_pull(self, request: PullTarget, hub: Hub | None, *, resumed: bool = False) -> Pull:
        puller = dataclasses.replace(
            self._puller,
            hub=hub or self._puller.hub,
            limit=RateLimit(request.limit_rate),
            asked=request.asked,
        )
        return Pull(puller, request, self._catalogue, self._unfinished, resumed=resumed)

    def start(self, wanted: PullTarget, hub: Hub | None = None) -> Pull:
        """Start a pull, or join the running one of this pair.

        hub: a hub other than the usual one.

        Raises:
            Conflict: something else is being pulled under this name.
        """
        name = wanted.name
        with self._lock:
            running = self._pulls.get(name)
            if running and running.state.state in RUNNING_STATES:
                if running.target.asked != wanted.asked:
                    raise Conflict(
                        f"'{name}' is already being pulled, as {running.target.asked or name}; wait until "
                        f"it is done, or run: localspec pulls cancel {name}"
                    )
                return running
            self._pulls.pop(name, None)
            while len(self._pulls) >= _MAX_LISTED_PULLS and self._forget_oldest():
                pass
            pull = self._pulls[name] = self._start_pull(wanted, hub)
            return pull

    def find_target(self, name: str) -> PullTarget | None:
        """Return the request that is being pulled under this name, or that failed and will be resumed."""
        with self._lock:
            pull = self._pulls.get(name)
        if pull and pull.state.state in RUNNING_STATES:
            return pull.target
        return next((request for request in self._unfinished.all() if request.name == name), None)

    def states(self) -> tuple[PullState, ...]:
        """Return the state of every running or recently ended pull, oldest first."""
        with self._lock:
            for name, pull in [*self._pulls.items()]:
                if pull.ended_at and time.monotonic() - pull.ended_at > _ENDED_LISTED_S:
                    del self._pulls[name]
            return tuple(pull.state for pull in self._pulls.values())

    def get(self, name: str) -> Pull:
        """Return the pull of this name.

        Raises:
            NotFound: there is none.
        """
        with self._lock:
            pull = self._pulls.get(name)
        if pull is None:
            raise NotFound(f"There is no pull of '{name}'; see: localspec pulls")
        return pull

    def find(self, written: str) -> Pull:
        """Return the pull of a repository, given as the user wrote it.

        Raises:
            NotFound: there is none.
        """
        with suppress(InvalidRequest, NotFound):
            repository = parse_reference(written)
            return self.get(derive_pair_name(repository) if repository else written)
        return self.get(written)  # raises NotFound with the name as it was written

    def close(self, timeout: float = 5.0) -> None:
        """Interrupt all pulls when the daemon ends, and wait up to `timeout` seconds."""
        with self._lock:
            pulls = list(self._pulls.values())
        for pull in pulls:
            pull.interrupt()
        end = time.monotonic() + timeout
        for pull in pulls:
            pull.wait(max(0.0, end - time.monotonic()))

    def _forget_oldest(self) -> bool:
        for name, pull in self._pulls.items():
            if pull.state.state not in RUNNING_STATES:
                del self._pulls[name]
                return True
        return False
