"""Convert files in processes of their own (`conversion_child`), and keep the latest results.

Agents send a conversation again with each request, and so its files.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import OrderedDict

import msgspec

from localspec.children import helper_environment
from localspec.daemon.completion.conversion_child import Conversion
from localspec.errors import Unavailable

MAX_PROCESSES = 2  # at the same time
MEMORY_LIMIT_BYTES = 1 << 30
CPU_LIMIT_S = 30
TIME_LIMIT_S = 300.0  # that a process may take on a busy machine
CACHE_BYTES = 64 << 20
_CHILD = "localspec.daemon.completion.conversion_child"


class Converter:
    """Converts files in processes of their own, and keeps the latest results."""

    def __init__(
        self, memory_limit_bytes: int = MEMORY_LIMIT_BYTES, cpu_limit_s: int = CPU_LIMIT_S
    ) -> None:
        self._limits = str(memory_limit_bytes), str(cpu_limit_s)
        self._turns = asyncio.Semaphore(MAX_PROCESSES)
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()  # encoded conversions

    async def convert(self, data: bytes, *, with_pictures: bool) -> Conversion:
        """Return what a file becomes. Raises Unavailable if that takes too long on this busy machine."""
        kind = "pictures" if with_pictures else "text"
        key = hashlib.sha256(kind.encode() + data).digest()
        if (output := self._cache.get(key)) is None:
            async with self._turns:
                output = await self._run(kind, data)
        try:
            conversion = msgspec.msgpack.decode(output, type=Conversion)
        except msgspec.DecodeError:  # The process has ended before.
            return Conversion(problem="cannot be read: that takes too much time or memory")
        self._cache[key] = output
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return conversion

    async def _run(self, kind: str, data: bytes) -> bytes:
        """Return what the process writes; that is nothing or incomplete if it exceeds a limit."""
        command = [sys.executable, "-P", "-m", _CHILD, kind, *self._limits]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                start_new_session=True,
                env=helper_environment(),
            )
        except OSError as error:
            raise Unavailable(
                f"The process that converts files cannot be started ({error}); try again."
            ) from error
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                output, _ = await process.communicate(data)
                return output
        except TimeoutError:
            raise Unavailable("Converting a file takes too long; try again.") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
