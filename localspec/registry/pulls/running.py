"""The pulls of a daemon, each a process that is started once, may be watched by many, and has a name."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec

from localspec.children import Child, Deadline
from localspec.errors import (
    Cancelled,
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
    error_from_code,
)
from localspec.registry.hub.repository import derive_pair_name, parse_reference
from localspec.registry.pulls.messages import RUNNING_STATES, Job, PullState, Report, State
from localspec.registry.pulls.targets import PullTarget, UnfinishedPulls

log = logging.getLogger("localspec.daemon")
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
    """One pull in its own process. It continues whether or not anybody watches.

    make_job: returns the job for a target. environment: the variables of the process. resumed: the previous
    daemon began it.
    """

    def __init__(
        self,
        target: PullTarget,
        make_job: Callable[[PullTarget], Job],
        environment: Mapping[str, str],
        unfinished: UnfinishedPulls,
        *,
        endpoint: str = "",
        token: str = "",
        resumed: bool = False,
    ) -> None:
        self.name = target.name
        self.target = target
        self.error: LocalspecError | None = None
        self.ended_at = 0.0  # monotonic time; 0 while it runs
        self.state = PullState(name=target.name, state="checking")
        self._make_job = make_job
        self._endpoint, self._token = endpoint or target.endpoint, token
        self._child = Child("localspec.registry.pulls.child", environment=environment)
        self._unfinished, self._resumed = unfinished, resumed
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []
        self._interrupted = False
        self._cancel = threading.Event()
        self._finished = threading.Event()
        unfinished.keep(target)
        threading.Thread(target=self._run, name=f"pull-{self.name}", daemon=True).start()

    @contextmanager
    def watched(self, changed: Callable[[], None]) -> Iterator[None]:
        """Call `changed` after each change of `state`, from the pull's thread, until the block ends."""
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
        if self._finished.is_set() and self._unfinished.drop(self.name):
            self._show(
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

    @property
    def is_running(self) -> bool:
        return self.state.state in RUNNING_STATES

    def _run(self) -> None:
        try:
            self._follow()
        except Cancelled:
            self._end_cancelled()
        except LocalspecError as error:
            self._fail(error)
        except EOFError:
            self._fail(LocalspecError("The pull failed: its process ended unexpectedly."))
        except Exception as error:  # a bug must not leave the pull running for ever
            self._fail(LocalspecError(f"The pull failed: {type(error).__name__}."))
        finally:
            self.ended_at = time.monotonic()
            self._finished.set()

    def _follow(self) -> None:
        """Run the process and show its states until the pull is done."""
        job = msgspec.structs.replace(
            self._make_job(self.target), endpoint=self._endpoint, token=self._token
        )
        deadline = Deadline(math.inf, self._cancel.is_set)
        with self._child as child:
            child.send(msgspec.json.encode(job), deadline)
            while self.is_running:
                report = msgspec.json.decode(child.receive(deadline), type=Report)
                if report.target:
                    self.target = report.target
                    self._unfinished.keep(report.target)
                if report.state.state == "failed":
                    raise error_from_code(report.state.code, report.state.message)
                if report.state.state == "done":
                    self._unfinished.drop(self.name)
                self.state = report.state
                self._notify()

    def _end_cancelled(self) -> None:
        if self._interrupted:
            sentence = (
                f"The pull of {self.name} is interrupted because the daemon is stopping; it "
                "resumes when the daemon starts again."
            )
            self._end_with(PullCancelled(sentence), "interrupted")
        else:
            sentence = (
                "The pull was cancelled; anything already downloaded is kept for the next one."
            )
            self._unfinished.drop(self.name)
            self._end_with(PullCancelled(sentence), "cancelled")

    def _fail(self, error: LocalspecError) -> None:
        """Show an error. Only a pull that has started and has a temporary error is tried again later."""
        has_started = self._resumed or bool(self.target.files)
        # A resumed pull has no token, since tokens are not stored.
        temporary = (*_TEMPORARY_ERRORS, Gated) if self._resumed else _TEMPORARY_ERRORS
        if not has_started or not isinstance(error, temporary):
            self._unfinished.drop(self.name)
        self._end_with(error, "failed")

    def _end_with(self, error: LocalspecError, state: State) -> None:
        self.error = error
        self._show(
            state=state,
            rate=0.0,
            seconds_left=None,
            message=error.message,
            code=error.code,
            retry=None,
        )

    def _show(self, **values: object) -> None:
        self.state = msgspec.structs.replace(self.state, **values)
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            watchers = tuple(self._watchers)
        for notify in watchers:
            notify()


class Pulls:
    def __init__(self, make_job: Callable[[PullTarget], Job], unfinished: UnfinishedPulls) -> None:
        self._make_job, self._unfinished = make_job, unfinished
        self._lock = threading.Lock()
        self._pulls: dict[str, Pull] = {}

    def resume(self) -> None:
        """Continue the unfinished pulls of the previous daemon."""
        with self._lock:
            for target in self._unfinished.all():
                if target.name not in self._pulls:
                    log.info("a pull of the last daemon goes on: %s", target.name)
                    self._pulls[target.name] = Pull(
                        target, self._make_job, os.environ, self._unfinished, resumed=True
                    )

    @property
    def running(self) -> list[Pull]:
        """The pulls that are not ended."""
        with self._lock:
            return [pull for pull in self._pulls.values() if pull.is_running]

    def start(
        self,
        wanted: PullTarget,
        environment: Mapping[str, str] = os.environ,
        *,
        endpoint: str = "",
        token: str = "",
    ) -> Pull:
        """Start a pull, or join the running one of this pair.

        environment: the variables of its process. endpoint, token: as in `Hub`.

        Raises:
            Conflict: something else is being pulled under this name.
        """
        name = wanted.name
        with self._lock:
            running = self._pulls.get(name)
            if running and running.is_running:
                if running.target.asked != wanted.asked:
                    raise Conflict(
                        f"'{name}' is already being pulled, as {running.target.asked or name}; wait until "
                        f"it is done, or run: localspec pulls cancel {name}"
                    )
                return running
            self._pulls.pop(name, None)
            ended = [key for key, pull in self._pulls.items() if not pull.is_running]
            for key in ended[: max(0, len(self._pulls) + 1 - _MAX_LISTED_PULLS)]:
                del self._pulls[key]
            pull = self._pulls[name] = Pull(
                wanted,
                self._make_job,
                environment,
                self._unfinished,
                endpoint=endpoint,
                token=token,
            )
            return pull

    def find_target(self, name: str) -> PullTarget | None:
        """Return the request that is being pulled under this name, or that failed and will be resumed."""
        with self._lock:
            pull = self._pulls.get(name)
        if pull and pull.is_running:
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
        """Return the pull of this name. Raises NotFound if there is none."""
        with self._lock:
            pull = self._pulls.get(name)
        if pull is None:
            raise NotFound(f"There is no pull of '{name}'; see: localspec pulls")
        return pull

    def forget(self, name: str) -> None:
        """Remove a pull from the list if it has ended."""
        with self._lock:
            if (pull := self._pulls.get(name)) and not pull.is_running:
                del self._pulls[name]

    def find(self, written: str) -> Pull:
        """Return the pull of a repository, given as the user wrote it. Raises NotFound if there is none."""
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
