"""Read the start of a file on the hub for its header, and keep what was downloaded of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

from localspec.registry.hub.hub import Hub, RemoteFile
from localspec.registry.hub.retry import Interrupted, Patience, patiently
from localspec.registry.store.files import check_cancel


class Flow:
    """A download of a whole file from a server that ignores ranges. Its next bytes begin at `at`.

    The connection stays open after the header, so that the file is transferred only once.
    """

    def __init__(self, chunks: Iterator[bytes], connection: ExitStack) -> None:
        self._chunks, self._connection = chunks, connection
        self.at = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.at += len(chunk)
            yield chunk

    def close(self) -> None:
        self._connection.close()


class RemoteSource:
    """The start of a file on the hub, as a gguf.Source.

    `prefix` holds the bytes that are known from an earlier pull or were read here. A header that was read is
    thus not downloaded again with the other bytes.
    """

    def __init__(
        self,
        hub: Hub,
        remote: RemoteFile,
        prefix: bytes = b"",
        patience: Patience | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self._hub, self._remote = hub, remote
        self._patience, self._cancel = patience, cancel
        self.prefix = bytearray(prefix)
        self.name = remote.name
        self.size = remote.size
        self.flow: Flow | None = None

    def read(self, offset: int, size: int) -> bytes:
        """Return one range. A server that ignores ranges is read from the start to its end."""
        end = min(offset + size, self.size)
        start = max(offset, min(end, len(self.prefix)))
        data = bytes(self.prefix[offset:start])
        if start < end:
            data += patiently(lambda: self._read(start, end), self._patience, self._cancel)
        if offset <= len(self.prefix) < end:
            self.prefix[offset:] = data
        return data

    def _read(self, start: int, end: int) -> bytes:
        if self.flow is None:
            with ExitStack() as connection:
                response = connection.enter_context(self._hub.stream(self._remote, start, end))
                if not response.whole:
                    return self._read_range(response.chunks, end - start)
                self.flow = Flow(response.chunks, connection.pop_all())
        try:
            return self._read_flow(self.flow, start, end)
        except BaseException:
            self.flow.close()
            self.flow = None
            raise

    def _read_range(self, chunks: Iterator[bytes], size: int) -> bytes:
        data = bytearray()
        for chunk in chunks:
            check_cancel(self._cancel)
            data += chunk
            if len(data) >= size:
                return bytes(data[:size])
        raise Interrupted("the connection closed early")

    def _read_flow(self, flow: Flow, start: int, end: int) -> bytes:
        """Read from the flow up to `end`, and keep everything in the prefix."""
        if len(self.prefix) >= end:
            return bytes(self.prefix[start:end])
        for chunk in flow:
            check_cancel(self._cancel)
            known = len(self.prefix) - (flow.at - len(chunk))
            self.prefix += chunk[known:]
            if len(self.prefix) >= end:
                return bytes(self.prefix[start:end])
        raise Interrupted("the connection closed early")
