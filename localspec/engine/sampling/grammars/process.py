"""The worker's side of `child`: send jobs, wait for them, and end those whose client has disconnected."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from localspec.children import helper_environment
from localspec.engine.sampling.grammars.child import CPU_LIMIT_S, Outcome, Vocabulary, send
from localspec.engine.sampling.grammars.sources import GrammarJob, GrammarSources
from localspec.errors import Cancelled, GrammarRejected, Unavailable
from localspec.priority import lower_priority

WALL_LIMIT_S = 60.0  # Wall time that a job may take, however busy the machine is.
POLL_INTERVAL_S = 0.05  # A job ends at most this long after its client has disconnected.
LONG_S = 0.1  # CPU time of a job after which the calling thread lowers its priority.
LONG_WALL_S = 0.3  # Wall time after which a job's process gets a lower priority.
_CHILD = "localspec.engine.sampling.grammars.child"


class TooComplex(GrammarRejected):
    """Raised when a job's process ended before the job, because of a limit or by the system."""


class GrammarProcess:
    """A process that compiles grammars and is started at the first job. Any thread may send jobs."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], cpu_limit_s: float = CPU_LIMIT_S
    ) -> None:
        """Prepare the process without starting it. cpu_limit_s: CPU seconds for one job."""
        self._cpu_limit_s = cpu_limit_s
        self._vocabulary = vocabulary
        self._starting = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def build(self, job: GrammarJob, cancelled: Callable[[], bool]) -> GrammarSources:
        """Return the sources of a job's grammars, all of which are known to compile.

        If compiling took long, the calling thread lowers its priority, because it will compile them again.

        Raises:
            GrammarRejected: a grammar is not usable; TooComplex if it takes too long to compile.
            Cancelled: `cancelled` returned True.
            Unavailable: the process cannot be started, or the machine is too busy.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _unavailable(error) from error
        with ours:
            with theirs:
                self._pass_connection(theirs)
            try:
                send(ours, msgspec.msgpack.encode(job))
                pid = struct.unpack("<I", self._read(ours, 4, cancelled, None))[0]
                size = struct.unpack("<I", self._read(ours, 4, cancelled, pid))[0]
                reply = self._read(ours, size, cancelled, pid)
            except TimeoutError as error:
                raise Unavailable(
                    "The machine is too busy to compile the grammar; try again."
                ) from error
            except (EOFError, OSError):
                raise self._too_complex(job) from None
        outcome = msgspec.msgpack.decode(reply, type=Outcome)
        if outcome.sources is None:
            raise GrammarRejected(outcome.error, param=outcome.param)
        if outcome.seconds > LONG_S:
            lower_priority()
        return outcome.sources

    def close(self) -> None:
        """End the process, if it was started."""
        with self._starting:
            self._stop()

    def _pass_connection(self, connection: socket.socket) -> None:
        """Pass a connection to the process, which is started if it does not run."""
        with self._starting:
            for _ in range(2):
                try:
                    if self._control is None:
                        self._start()
                    assert self._control is not None
                    socket.send_fds(self._control, [b"\0"], [connection.fileno()])
                    return
                except OSError as error:
                    # The process has died, for example because memory was short.
                    self._stop()
                    failure = error
        raise _unavailable(failure)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", _CHILD, str(theirs.fileno()), str(self._cpu_limit_s)]
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=helper_environment(),
            )
            on_failure.pop_all()
        self._control = ours
        send(ours, msgspec.msgpack.encode(self._vocabulary()))

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read(
        self, connection: socket.socket, size: int, cancelled: Callable[[], bool], pid: int | None
    ) -> bytes:
        """Read `size` bytes. End the job's process `pid` if it is cancelled or takes too long.

        Raises:
            EOFError: the job's process has ended.
            TimeoutError: the machine is too busy.
            Cancelled: `cancelled` returned True.
        """
        start = time.monotonic()
        deadline, lowered = start + WALL_LIMIT_S, pid is None
        data = bytearray()
        while len(data) < size:
            if cancelled() or time.monotonic() > deadline:
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if cancelled():
                    raise Cancelled("The request was cancelled.")
                raise TimeoutError
            if not lowered and time.monotonic() > start + LONG_WALL_S:
                lowered = True
                lower_priority(pid)
            if select.select([connection], [], [], POLL_INTERVAL_S)[0]:
                chunk = connection.recv(size - len(data))
                if not chunk:
                    raise EOFError
                data += chunk
        return bytes(data)

    def _too_complex(self, job: GrammarJob) -> TooComplex:
        kind = "" if job.constraint is None else job.constraint.kind
        names = {
            "": "grammar of these tools",
            "json_schema": "schema",
            "regex": "regular expression",
        }
        return TooComplex(
            f"The {names.get(kind, 'grammar')} is too complex: compiling it takes more than "
            f"{self._cpu_limit_s:g} seconds or too much memory.",
            param=job.param,
        )


def _unavailable(error: OSError) -> Unavailable:
    return Unavailable(
        f"The process that compiles grammars cannot be started ({error.strerror or error}); try again."
    )
