"""Convert files in processes of their own (`conversion_child`), and keep the latest results.

Agents send a conversation again with each request, and so its files. Equal files that are requested at the
same time share one process.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import threading
from collections import OrderedDict
from functools import partial

import msgspec

from localspec.attached_files import is_pdf
from localspec.children import Child, Deadline, helper_environment
from localspec.daemon.completion.conversion_child import Conversion
from localspec.daemon.logs import SharedWork, ThreadPool
from localspec.errors import Cancelled, Unavailable
from localspec.priority import lower_priority, lower_session_priority

# At the same time. Several, so that a few long documents keep no short one waiting. Pictures, which take a
# second or two, wait for no document.
MAX_PROCESSES, MAX_PICTURE_PROCESSES = 4, 2
MAX_CONVERSIONS = 16  # of either kind that run or wait; each may take CPU_LIMIT_S
MEMORY_LIMIT_BYTES = 1 << 30
CPU_LIMIT_S = 30
TIME_LIMIT_S = 300.0  # that a process may take on a busy machine
LONG_S = 1.0  # after which it gets a lower priority
CACHE_BYTES = 64 << 20
RETRY_AFTER_S = 10
_CHILD = "localspec.daemon.completion.conversion_child"
_EXCEEDED = Conversion(problem="cannot be read: that takes too much time or memory")


class Converter:
    """Converts files in processes of their own, and keeps the latest results."""

    def __init__(
        self, memory_limit_bytes: int = MEMORY_LIMIT_BYTES, cpu_limit_s: int = CPU_LIMIT_S
    ) -> None:
        self._limits = str(memory_limit_bytes), str(cpu_limit_s)
        self._documents = SharedWork[bytes](ThreadPool("file conversion", MAX_PROCESSES))
        self._pictures = SharedWork[bytes](ThreadPool("picture conversion", MAX_PICTURE_PROCESSES))
        self._cache: OrderedDict[str, bytes] = OrderedDict()  # encoded conversions
        self._is_aborted = False

    def abort(self) -> None:
        """Fail every conversion, also later ones, and end their processes."""
        self._is_aborted = True
        self._documents.close()
        self._pictures.close()

    async def convert(self, data: bytes, *, with_pictures: bool) -> Conversion:
        """Return what a file becomes.

        Raises:
            Unavailable: it cannot be converted at the moment.
        """
        kind = "pictures" if with_pictures else "text"
        key = f"{kind} {await asyncio.to_thread(_digest, data)}"
        output = self._cache.get(key)
        if output is None:
            if self._is_aborted:
                raise _stopped()
            running = self._documents if is_pdf(data) else self._pictures
            if len(running.names) >= MAX_CONVERSIONS and key not in running.names:
                raise _unavailable(f"{MAX_CONVERSIONS} files are being converted; try again.")
            output = await running.get(key, partial(self._run, kind, data))
        self._cache[key] = output
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return await asyncio.to_thread(msgspec.msgpack.decode, output, type=Conversion)

    def _run(self, kind: str, data: bytes, cancelled: threading.Event) -> bytes:
        """Return the encoded conversion that a process writes. It is killed as soon as `cancelled` is set."""
        if cancelled.is_set():
            raise _stopped()
        child = Child(
            _CHILD, kind, *self._limits, environment=helper_environment(), own_session=True
        )
        try:
            child.start()
        except OSError as error:
            raise _unavailable(
                f"The process that converts files cannot be started ({error}); try again."
            ) from error

        def give_way() -> None:
            # Where the machine has no time left, a short conversion must not wait for all others.
            lower_priority(child.pid)
            lower_session_priority(child.pid)

        try:
            return child.ask(data, Deadline(TIME_LIMIT_S, cancelled.is_set, LONG_S, give_way))
        except Cancelled:
            raise _stopped() from None
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            if isinstance(error, TimeoutError) or child.last_exit == -signal.SIGKILL:
                raise _unavailable(
                    "A process that converted a file was ended; try again."
                ) from None
            return msgspec.msgpack.encode(_EXCEEDED)
        finally:
            child.close()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _stopped() -> Unavailable:
    """Return the error of a cancelled conversion. Clients that have left do not see it."""
    return Unavailable("The daemon was stopped.", retry_after=2)


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, retry_after=RETRY_AFTER_S)
