"""Child processes: how localspec starts, asks, limits and ends them, and which variables they get.

A `Child` runs one of our modules. It has a socket in place of stdin, on which parent and child exchange
messages, each preceded by its length in four bytes (as `frames` of the protocol are). It ends when the socket
is closed, so none outlives its parent.

The daemon has the environment of the shell or service that started it, with logins, keys and proxy
passwords. A worker reads downloaded files, a template process runs downloaded templates, and a grammar
process compiles what a client sends. So each of them gets a list of named variables and nothing else. A pull
speaks to the hub with the user's login and proxies, so it alone has the variables of a shell.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from localspec.errors import Cancelled

# Python needs these to find the same packages and to format text and times in the same way.
_HELPER_VARIABLES = {
    *("HOME", "LANG", "LANGUAGE", "TZ", "TZDIR"),
    *("LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR", "PYTHONUSERBASE", "PYTHONNOUSERSITE"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH"),
    *("PYTHONCOERCECLOCALE", "PYTHONIOENCODING", "PYTHONUTF8"),
    *("VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
    *("COVERAGE_FILE", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
}
# The engine also needs these, for its folders, its memory and the dynamic loader.
_ENGINE_VARIABLES = _HELPER_VARIABLES | {
    *("PATH", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "LOCALSPEC_HOME"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_DATA_DIRS", "XDG_DATA_HOME"),
    *("XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
    *("GLIBC_TUNABLES", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "DYLD_FRAMEWORK_PATH"),
    *("PYTHONDEVMODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONWARNINGS"),
    *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"),
}
# Device drivers, thread and arithmetic libraries and llama.cpp read too many variables to list.
_ENGINE_PREFIXES = (
    *("GGML_", "LLAMA_"),
    *("GOMP_", "KMP_", "OMP_", "BLIS_", "MKL_", "OPENBLAS_", "VECLIB_", "GOTO_", "MALLOC_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "GPU_", "AMD_", "HIP_", "HSA_", "ROCBLAS_", "ROCM_", "ROCR_"),
    *("VK_", "MESA_", "RADV_", "MTL_", "METAL_", "ONEAPI_", "SYCL_", "UR_", "ZE_"),
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|LOGIN|COOKIE", re.IGNORECASE)
MAX_TEXT_CHARS = 8 << 20  # of a rendered prompt, and so of what files put into one
POLL_INTERVAL_S = 0.05  # A child ends at most this long after nobody waits for it any more.
# Of all children: generating an answer has priority. With an even lower one, such as `lower_priority` gives,
# their work would wait for the end of an answer that keeps all cores busy.
NICENESS = 5
_LENGTH = struct.Struct("<I")  # of a message
_Result = TypeVar("_Result")
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # a value of GLIBC_TUNABLES


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `environ` that a worker needs.

    The weights are placed in huge pages where glibc and the kernel support it, unless the user has set that
    tunable. A pass reads all weights, and with small pages address translation takes a tenth of its time.
    """
    environment = {
        name: value
        for name, value in environ.items()
        if name in _ENGINE_VARIABLES
        or (name.startswith(_ENGINE_PREFIXES) and not _SECRET_NAME.search(name))
    }
    tunables = environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}" if tunables else HUGE_PAGES
    return environment


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a process needs to render a chat template or compile a grammar."""
    return {name: value for name, value in environ.items() if name in _HELPER_VARIABLES}


@dataclass(slots=True)
class Deadline:
    """How long a parent waits for a child, and what else it watches meanwhile."""

    limit_s: float  # seconds until TimeoutError
    is_cancelled: Callable[[], bool] = bool  # whether the wait is to end with Cancelled
    long_s: float = math.inf  # seconds after which `on_long` is called once, to give way
    on_long: Callable[[], None] = lambda: None
    _start: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise Cancelled or TimeoutError if the wait is over."""
        if self.is_cancelled():
            raise Cancelled("The request was cancelled.")
        waited = time.monotonic() - self._start
        if waited > self.limit_s:
            raise TimeoutError
        if waited > self.long_s:
            self.long_s = math.inf
            self.on_long()


def send_message(connection: socket.socket, data: bytes, deadline: Deadline | None = None) -> None:
    """Send one message. A parent, whose connection has a timeout, has a deadline. Raises OSError."""
    message, n_sent = memoryview(_LENGTH.pack(len(data)) + data), 0
    while n_sent < len(message):
        n_sent += _retry(partial(connection.send, message[n_sent:]), deadline)


def receive_message(connection: socket.socket, deadline: Deadline | None = None) -> bytes:
    """Receive one message. Raises EOFError if the other side has closed the connection."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    return receive_exactly(connection, length, deadline)


def receive_exactly(
    connection: socket.socket, n_bytes: int, deadline: Deadline | None = None
) -> bytes:
    """Receive so many bytes. Raises EOFError if the other side has closed the connection."""
    data = bytearray()
    while len(data) < n_bytes:
        wanted = min(n_bytes - len(data), 1 << 20)
        chunk = _retry(partial(connection.recv, wanted), deadline)
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _retry(operation: Callable[[], _Result], deadline: Deadline | None) -> _Result:
    """Return the result of an operation on a socket, however often its timeout passes before the deadline."""
    while True:
        if deadline:
            deadline.check()
        with contextlib.suppress(TimeoutError):
            return operation()


class Child:
    """A process that runs one of our modules and answers messages, one after the other.

    After it failed to answer, it is ended; `start` starts another one.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        own_session: bool = False,
        quiet: bool = True,
    ) -> None:
        """Describe the process, without starting it.

        environment: all variables that it gets. own_session: it may give way to other sessions. quiet: what
        it writes to stderr is dropped.
        """
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._environment = environment
        self._own_session = own_session
        self._stderr = subprocess.DEVNULL if quiet else None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.last_exit = 0  # the exit status of the last process, as `subprocess` reports it

    def start(self) -> None:
        """Start the process without waiting for it. Raises OSError if that is not possible."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=self._own_session,
                env=self._environment,
            )
            on_failure.pop_all()
        ours.settimeout(POLL_INTERVAL_S)
        self._connection = ours

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def connection(self) -> socket.socket:
        assert self._connection is not None
        return self._connection

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send a message. Raises EOFError, TimeoutError or Cancelled after it has ended the process."""
        self._end_on_failure(send_message, data, deadline)

    def receive(self, deadline: Deadline) -> bytes:
        """Return the next message. Raises EOFError, TimeoutError or Cancelled, as `send`."""
        return self._end_on_failure(receive_message, deadline)

    def ask(self, data: bytes, deadline: Deadline) -> bytes:
        """Return the reply to a message. Raises EOFError, TimeoutError or Cancelled, as `send`."""
        self.send(data, deadline)
        return self.receive(deadline)

    def _end_on_failure(self, transfer: Callable[..., _Result], *arguments: object) -> _Result:
        try:
            return transfer(self.connection, *arguments)
        except BaseException as error:
            self.close()
            if isinstance(error, ConnectionError):
                raise EOFError from None
            raise

    def kill(self) -> None:
        """Kill the process, which a thread that waits for it notices."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self.last_exit = self._process.wait()
        self._connection = self._process = None


def become_helper() -> socket.socket:
    """Give way to answers, in the child, and return the connection to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the client.
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    return socket.socket(fileno=0)


def limit_cpu_time(n_seconds: int | None) -> None:
    """Have this process end once it has computed for so many more seconds. None: it has no limit."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = math.ceil(sum(os.times()[:2]))
    with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
        limit = resource.RLIM_INFINITY if n_seconds is None else used + n_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def drop_core_dumps() -> None:
    """Have the system write no memory of this process to the disk when a limit ends it."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(n_bytes: int) -> None:
    """Limit this process's address space to `n_bytes` more than it has now."""
    import resource

    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        used = int(pages) * resource.getpagesize()
    except OSError:  # Not Linux: the limit then includes the memory used so far.
        used = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + n_bytes if hard == resource.RLIM_INFINITY else min(used + n_bytes, hard)
    # macOS refuses the limit. The parent's time limit still applies.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
