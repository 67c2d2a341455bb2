"""The worker's side of `child`: send jobs, wait for them, and end those whose client has disconnected."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from localspec.children import (
    POLL_INTERVAL_S,
    Child,
    Deadline,
    helper_environment,
    receive_exactly,
    receive_message,
    send_message,
)
from localspec.engine.sampling.grammars.child import CPU_LIMIT_S, Outcome
from localspec.engine.sampling.grammars.sources import GrammarJob, GrammarSources, GrammarTokens
from localspec.errors import Cancelled, GrammarRejected, Unavailable
from localspec.priority import lower_priority

START_LIMIT_S = 60.0  # Wall time that the process may take to read the vocabulary.
WALL_LIMIT_S = 60.0  # Wall time that a job may take, however busy the machine is.
LONG_S = 0.1  # CPU time of a job after which the calling thread lowers its priority.
LONG_WALL_S = 0.3  # Wall time after which a job's process gets a lower priority.
_CHILD = "localspec.engine.sampling.grammars.child"


class TooComplex(GrammarRejected):
    """Raised when a job's process ended before the job, because of a limit or by the system."""


class GrammarProcess:
    """A process that compiles grammars and is started at the first job. Any thread may send jobs."""

    def __init__(
        self, vocabulary: Callable[[], GrammarTokens], cpu_limit_s: float = CPU_LIMIT_S
    ) -> None:
        """Prepare the process without starting it. cpu_limit_s: CPU seconds for one job."""
        self._cpu_limit_s = cpu_limit_s
        self._vocabulary = vocabulary
        self._starting = threading.Lock()
        self._child = Child(_CHILD, str(cpu_limit_s), environment=helper_environment())

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
            ours.settimeout(POLL_INTERVAL_S)
            try:
                reply = _run_job(ours, msgspec.msgpack.encode(job), cancelled)
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
        with self._starting:
            self._child.close()

    def _pass_connection(self, connection: socket.socket) -> None:
        """Pass a connection to the process, which is started if it does not run."""
        with self._starting:
            failure: OSError | EOFError = EOFError()
            for _ in range(2):
                try:
                    if not self._child.is_running:
                        self._child.close()
                        self._child.start()
                        vocabulary = msgspec.msgpack.encode(self._vocabulary())
                        self._child.send(vocabulary, Deadline(START_LIMIT_S))
                    socket.send_fds(self._child.connection, [b"\0"], [connection.fileno()])
                    return
                except (OSError, EOFError) as error:
                    # The process has died, for example because memory was short.
                    self._child.close()
                    failure = error
        raise _unavailable(failure)

    def _too_complex(self, job: GrammarJob) -> TooComplex:
        names = {"json_schema": "schema", "regex": "regular expression"}
        name = "grammar of these tools"
        if job.constraint is not None:
            name = names.get(job.constraint.kind, "grammar")
        return TooComplex(
            f"The {name} is too complex: compiling it takes more than {self._cpu_limit_s:g} seconds "
            "or too much memory.",
            param=job.param,
        )


def _run_job(connection: socket.socket, job: bytes, cancelled: Callable[[], bool]) -> bytes:
    """Return the reply to a job. Its process is ended if it is cancelled or takes too long."""
    deadline = Deadline(WALL_LIMIT_S, cancelled)
    send_message(connection, job, deadline)
    (pid,) = struct.unpack("<I", receive_exactly(connection, 4, deadline))
    deadline.long_s, deadline.on_long = LONG_WALL_S, lambda: lower_priority(pid)
    try:
        return receive_message(connection, deadline)
    except (Cancelled, TimeoutError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


def _unavailable(error: OSError | EOFError) -> Unavailable:
    reason = (isinstance(error, OSError) and error.strerror) or str(error) or "it ended"
    return Unavailable(
        f"The process that compiles grammars cannot be started ({reason}); try again."
    )
