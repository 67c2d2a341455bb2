"""The process of one pull: `python -m localspec.registry.pulls.child`.

It has the network variables of the shell that requested the pull. It gets its job as one message, reports
each state as another, and may be killed at any moment.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from localspec.children import become_helper, receive_message, send_message
from localspec.errors import LocalspecError
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.retry import Retry
from localspec.registry.hub.transfer import RateLimit
from localspec.registry.pulls.decide import decide
from localspec.registry.pulls.messages import FileState, Job, PullState, Report
from localspec.registry.pulls.pull import Puller, PullPlan
from localspec.registry.store.store import Store

_RATE_WINDOW_S = 5.0


def main() -> None:
    """Pull what the parent asks for."""
    # A service manager ends all processes of the daemon at once; then the daemon says what ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = become_helper()
    job = msgspec.json.decode(receive_message(connection), type=Job)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    reporter = _Reporter(connection, job)
    try:
        _pull(job, reporter)
    except LocalspecError as error:
        reporter.fail(error)
    except Exception as error:  # a bug must not leave the pull running for ever
        reporter.fail(LocalspecError(f"The pull failed: {type(error).__name__}."))


def _end_with_parent(connection: socket.socket) -> None:
    """End this process once the parent has closed the connection, on which it sends nothing more."""
    connection.recv(1)
    os._exit(1)


def _pull(job: Job, reporter: _Reporter) -> None:
    target = job.target
    puller = Puller(
        Store(Path(job.store)),
        Hub(
            job.endpoint,
            token=job.token,
            login_endpoint=job.login_endpoint,
            stall=job.tuning.stall_s,
        ),
        job.tuning,
        job.memory,
        load=job.load,
        limit=RateLimit(target.limit_rate),
        asked=target.asked,
        on_wait=reporter.show_wait,
    )
    decision = decide(puller, target, job.pairs)
    reporter.target = msgspec.structs.replace(target, pair=decision.pair, decided=True)
    reporter.update(offers=decision.offers, said=decision.said)
    puller.pull(
        target.name, decision.pair, reporter.show_progress, reporter.show_plan, decision.known
    )
    size = reporter.state.size
    reporter.update(state="done", seconds_left=0.0, rate=0.0, done=size, hashed=size)


class _Reporter:
    """The state of the pull, which is sent to the parent whenever it changes."""

    def __init__(self, connection: socket.socket, job: Job) -> None:
        self._connection = connection
        self.target = self._sent_target = job.target
        self.state = PullState(name=job.target.name, state="checking")
        self._lock = threading.Lock()
        self._waits: dict[int, Retry] = {}  # by the id of the waiting thread
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, **values: object) -> None:
        with self._lock:
            self.state = msgspec.structs.replace(self.state, **values)
            target = self.target if self.target != self._sent_target else None
            self._sent_target = self.target
            send_message(self._connection, msgspec.json.encode(Report(self.state, target)))

    def fail(self, error: LocalspecError) -> None:
        self.update(
            state="failed", rate=0.0, seconds_left=None, message=error.message, code=error.code
        )

    def show_plan(self, plan: PullPlan) -> None:
        remotes = [file.remote for file in plan.files]
        hashes = tuple(remote.sha256 for remote in remotes)
        self.target = msgspec.structs.replace(self.target, files=hashes)
        size = sum(remote.size for remote in remotes)
        self.update(
            state="downloading",
            files=tuple(FileState(remote.name, 0, remote.size) for remote in remotes),
            size=size,
            done=size - plan.fetch,
            notes=plan.notes,
            forecast=plan.forecast,
        )

    def show_progress(self, files: tuple[FileState, ...]) -> None:
        """Show the state of all files; the pull's main thread calls this four times a second."""
        now = time.monotonic()
        done, hashed = sum(file.done for file in files), sum(file.hashed for file in files)
        size = sum(file.size for file in files)
        verifying = done == size
        position = hashed if verifying else done
        if verifying != (self.state.state == "verifying"):
            self._samples.clear()  # they belong to the other phase
        self._samples.append((now, position))
        while now - self._samples[0][0] > _RATE_WINDOW_S:
            self._samples.popleft()
        start_time, start_position = self._samples[0]
        seconds = now - start_time
        rate = max(0.0, (position - start_position) / seconds) if seconds else 0.0
        self.update(
            state="verifying" if verifying else "downloading",
            done=done,
            size=size,
            hashed=hashed,
            rate=rate,
            seconds_left=(size - position) / rate if rate else None,
            files=files,
        )

    def show_wait(self, retry: Retry | None) -> None:
        """Show the next retry of all threads; the waiting thread calls this."""
        with self._lock:
            self._waits.pop(threading.get_ident(), None)
            if retry:
                self._waits[threading.get_ident()] = retry
            next_retry = min(self._waits.values(), key=lambda wait: wait.seconds, default=None)
        self.update(retry=next_retry)


if __name__ == "__main__":
    main()
