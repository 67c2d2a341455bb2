"""The daemon's socket: its path, and as much HTTP/1.1 and server-sent events as our own daemon speaks.

http.client takes 40 ms to import on a slow machine, half of what `ask` may add, and pathlib with
platformdirs takes 30 ms. This module needs only `socket`. One connection carries one request.
"""

# ruff: noqa: PTH100, PTH118 - this module avoids pathlib, which takes long to import
from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys

from localspec.errors import (
    RETRYABLE,
    BadResponse,
    LocalspecError,
    NoAnswer,
    NoDaemon,
    UnsafePath,
    error_from_code,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import Any

_MAX_PATH_BYTES = 103  # equal to paths.MAX_SOCKET_PATH_BYTES, which would be a slow import
# Longest status line and headers together, in bytes; also the longest size line of a chunk.
MAX_HEAD_BYTES = 65_536
_READ_BYTES = 65_536
_CONNECTION_LOST = (
    "The daemon ended in the middle of its answer; `localspec status` shows the reason."
)


def socket_path() -> str:
    """Return the path of this user's socket.

    Only the two simple cases are decided here, without an import. `paths.default_paths` decides the others,
    and a test checks that both agree. Raises UnsafePath if the path is longer than the operating system
    allows.
    """
    path = _path_without_imports()
    if not path or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        from localspec import paths

        return str(paths.check_socket_path(paths.default_paths().socket))
    return path


def _path_without_imports() -> str:
    if home := os.environ.get("LOCALSPEC_HOME"):
        return os.path.join(os.path.abspath(home), "run", "localspec.sock")
    standard = f"/run/user/{os.getuid()}"
    if sys.platform != "linux" or os.environ.get("XDG_RUNTIME_DIR") != standard:
        return ""
    try:
        info = os.lstat(standard)
    except OSError:
        return ""
    is_private = info.st_uid == os.getuid() and not info.st_mode & 0o077
    if not stat.S_ISDIR(info.st_mode) or not is_private:
        return ""
    return os.path.join(standard, "localspec", "localspec.sock")


class Reader:
    """A buffered reader over `receive(count)`, which returns b"" at the end of the stream.

    `read_line` and `read_some` raise:
        NoDaemon: The stream ended.
        BadResponse: A line is longer than any that our daemon sends.
    """

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive
        self._buffer = b""

    def _fill(self) -> bool:
        data = self._receive(_READ_BYTES)
        self._buffer += data
        return bool(data)

    def read_line(self) -> bytes:
        """Return the next line, without its line end."""
        while True:
            line, end, remainder = self._buffer.partition(b"\n")
            if end:
                self._buffer = remainder
                return line.removesuffix(b"\r")
            if len(line) > MAX_HEAD_BYTES:
                raise BadResponse(f"The daemon sent a line of more than {MAX_HEAD_BYTES} bytes.")
            if not self._fill():
                raise NoDaemon(_CONNECTION_LOST)

    def read_some(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, whatever has arrived."""
        if not self._buffer and not self._fill():
            raise NoDaemon(_CONNECTION_LOST)
        data, self._buffer = self._buffer[:max_bytes], self._buffer[max_bytes:]
        return data

    def read_to_end(self) -> Iterator[bytes]:
        """Yield everything up to the end of the stream."""
        while self._buffer or self._fill():
            data, self._buffer = self._buffer, b""
            yield data


class Response:
    """A response: status and headers are read at once, the body as it arrives.

    Header names are lower case.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.status = 100
        while 100 <= self.status < 200:  # informational responses precede the final one
            self._read_head()

    def _read_head(self) -> None:
        parts = self._reader.read_line().split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
            raise BadResponse("The program listening on the daemon's socket does not speak HTTP.")
        self.status = _parse_length(parts[1], 10)
        if not 100 <= self.status <= 599:
            raise BadResponse(f"The daemon answered with the invalid status {self.status}.")
        self.headers: dict[str, str] = {}
        total = 0
        while line := self._reader.read_line():
            total += len(line)
            name, colon, value = line.partition(b":")
            if total > MAX_HEAD_BYTES or not colon:
                raise BadResponse("The daemon's answer has invalid headers.")
            self.headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")

    def chunks(self) -> Iterator[bytes]:
        """Yield the body in the pieces that the daemon sent.

        Raises NoDaemon if the connection ended before the body did, and BadResponse if the framing is
        invalid.
        """
        if self.status in (204, 304):
            return
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            yield from self._read_chunked()
        elif "content-length" in self.headers:
            yield from self._read_length(_parse_length(self.headers["content-length"].encode(), 10))
        else:
            yield from self._reader.read_to_end()

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def _read_length(self, remaining: int) -> Iterator[bytes]:
        while remaining:
            data = self._reader.read_some(remaining)
            remaining -= len(data)
            yield data

    def _read_chunked(self) -> Iterator[bytes]:
        while size := _parse_length(self._reader.read_line().partition(b";")[0].strip(), 16):
            yield from self._read_length(size)
            if self._reader.read_line():
                raise BadResponse("The daemon sent a chunk longer than it said.")
        while self._reader.read_line():
            pass  # trailers are ignored


def _parse_length(text: bytes, base: int) -> int:
    """Parse a length in digits only. int() alone would accept signs, spaces and underscores."""
    digits = b"0123456789abcdefABCDEF"[: 10 if base == 10 else 22]
    if not text or len(text) > 16 or text.strip(digits):
        raise BadResponse("The daemon's answer has an invalid length.")
    return int(text, base)


def events(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the `data` of each server-sent event. An incomplete event at the end of the stream is dropped."""
    buffer, data = b"", list[bytes]()
    for chunk in chunks:
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data).decode("utf-8", "replace")
                data = []


def json_events(
    open_response: Callable[[], tuple[Connection, Response]],
) -> Generator[dict[str, Any], None, None]:
    """Yield the JSON of each server-sent event up to [DONE].

    `open_response` sends the request; it is called when the first event is requested. Raises LocalspecError
    if the error event of the stream, as its own class, and NoDaemon if the stream ended without [DONE].
    """
    connection, response = open_response()
    try:
        for text in events(response.chunks()):
            if text == "[DONE]":
                return
            chunk: dict[str, Any] = json.loads(text)
            if "error" in chunk:
                raise error_from_detail(chunk["error"])
            yield chunk
        raise NoDaemon("The daemon's answer ended before it was complete.")
    finally:
        connection.close()


def error_from_detail(detail: dict[str, Any]) -> LocalspecError:
    """Return the exception that an OpenAI error object describes."""
    return error_from_code(
        str(detail.get("code")),
        str(detail.get("message")).removeprefix(RETRYABLE),
        param=detail.get("param"),
        n_prompt_tokens=detail.get("n_prompt_tokens"),
        n_ctx=detail.get("n_ctx"),
    )


class Connection:
    """One connected socket. Closing it cancels whatever the daemon does for it."""

    def __init__(self, path: str, timeout: float | None = None) -> None:
        """Connect to the socket at `path`. `timeout` limits every single wait, in seconds.

        Raises NoDaemon if no daemon is listening.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise _connect_error(error, path) from error

    def request(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response:
        """Send one request and read the head of its response.

        Raises NoDaemon if the daemon ended the connection, and NoAnswer if the daemon did not respond in
        time, and BadResponse if the response is not valid HTTP.
        """
        lines = [f"{method} {target} HTTP/1.1", "Host: localspec", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        try:  # noqa: SIM105 - contextlib would be one more import
            self._socket.sendall("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon may have answered (413, draining) without reading everything
        return Response(Reader(self._read))

    def _read(self, count: int) -> bytes:
        try:
            return self._socket.recv(count)
        except TimeoutError as error:
            raise NoAnswer("The daemon does not respond; see `localspec status`.") from error
        except OSError as error:
            raise NoDaemon(_CONNECTION_LOST) from error

    def close(self) -> None:
        self._socket.close()

    def shut_down(self) -> None:
        """End the connection from another thread, where `close` would wait for a running read."""
        try:  # noqa: SIM105 - contextlib would be one more import
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already


def _connect_error(error: OSError, path: str) -> LocalspecError:
    if isinstance(error, PermissionError):
        return UnsafePath(f"{path} cannot be opened: it belongs to another user.")
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return NoDaemon("No daemon is running; start one with: localspec start")
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return NoAnswer("The daemon does not respond; to stop it: localspec stop")
    return NoDaemon(f"Cannot reach the daemon at {path}: {error.strerror or error}.")
