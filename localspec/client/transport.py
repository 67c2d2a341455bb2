"""The daemon's socket: where it is, and as much of HTTP/1.1 and of events as our own daemon speaks.

http.client costs 40 ms to import on a slow machine, half of what `ask` may add, and pathlib with
platformdirs 30 ms; this module needs only `socket`. One connection carries one request.
"""

# ruff: noqa: PTH100, PTH118 - pathlib is what is avoided here
from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys

from localspec.errors import BadResponse, LocalspecError, NoAnswer, NoDaemon, UnsafePath, from_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import Any

_MAX_PATH = 103  # paths.MAX_SOCKET_PATH
MAX_HEAD = 65_536  # bytes of status line and headers; also of a chunk's size line
_READ = 65_536
_GONE = "The daemon ended in the middle of its answer; `localspec status` shows the reason."


def socket_path() -> str:
    """The path of this user's socket.

    Only the two cases that need no thought are decided here; `paths.default_paths` decides the
    others, and a test holds both to the same answer.

    Raises:
        UnsafePath: longer than the operating system takes.
    """
    path = _plain_path()
    if path is None or len(os.fsencode(path)) > _MAX_PATH:
        from localspec import paths

        return str(paths.check_socket_path(paths.default_paths().socket))
    return path


def _plain_path() -> str | None:
    home = os.environ.get("LOCALSPEC_HOME")
    if home:
        return os.path.join(os.path.abspath(home), "run", "localspec.sock")
    if sys.platform != "linux":
        return None
    standard = f"/run/user/{os.getuid()}"
    if os.environ.get("XDG_RUNTIME_DIR") != standard:
        return None
    try:
        info = os.lstat(standard)
    except OSError:
        return None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        return None
    return os.path.join(standard, "localspec", "localspec.sock")


class Reader:
    """Lines and bytes out of `receive(count)`, which returns b"" at the end of the stream.

    Raises (by `line` and `some`):
        NoDaemon: the stream ended.
        BadResponse: a line is longer than any of ours.
    """

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive
        self._buffer = b""

    def _fill(self) -> bool:
        data = self._receive(_READ)
        self._buffer += data
        return bool(data)

    def line(self) -> bytes:
        """Up to and without the next line end."""
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                return line.removesuffix(b"\r")
            if len(line) > MAX_HEAD:
                raise BadResponse(f"The daemon sent a line of more than {MAX_HEAD} bytes.")
            if not self._fill():
                raise NoDaemon(_GONE)

    def some(self, most: int) -> bytes:
        """Between 1 and `most` bytes, whatever has arrived."""
        if not self._buffer and not self._fill():
            raise NoDaemon(_GONE)
        data, self._buffer = self._buffer[:most], self._buffer[most:]
        return data

    def rest(self) -> Iterator[bytes]:
        """Everything up to the end of the stream."""
        while self._buffer or self._fill():
            data, self._buffer = self._buffer, b""
            yield data


class Response:
    """Status and headers, read at once; the body as it arrives. Header names are lower case."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.status = 100
        while 100 <= self.status < 200:  # informational answers precede the real one
            self.status = _status(reader.line())
            self.headers = _headers(reader)

    def chunks(self) -> Iterator[bytes]:
        """The body in the pieces the daemon sent.

        Raises:
            NoDaemon: the connection ended before the body did.
            BadResponse: the framing makes no sense.
        """
        if self.status in (204, 304):
            return
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            yield from self._chunked()
        elif "content-length" in self.headers:
            yield from self._counted(_number(self.headers["content-length"].encode(), 10))
        else:
            yield from self._reader.rest()

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def _counted(self, left: int) -> Iterator[bytes]:
        while left:
            data = self._reader.some(left)
            left -= len(data)
            yield data

    def _chunked(self) -> Iterator[bytes]:
        while size := _number(self._reader.line().partition(b";")[0].strip(), 16):
            yield from self._counted(size)
            if self._reader.line():
                raise BadResponse("The daemon sent a chunk longer than it said.")
        while self._reader.line():
            pass  # trailers: nobody needs them


def _status(line: bytes) -> int:
    parts = line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
        raise BadResponse("The program listening on the daemon's socket does not speak HTTP.")
    status = _number(parts[1], 10)
    if not 100 <= status <= 599:
        raise BadResponse(f"The daemon answered with the invalid status {status}.")
    return status


def _headers(reader: Reader) -> dict[str, str]:
    headers: dict[str, str] = {}
    total = 0
    while line := reader.line():
        total += len(line)
        name, colon, value = line.partition(b":")
        if total > MAX_HEAD or not colon:
            raise BadResponse("The daemon's answer has invalid headers.")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    return headers


def _number(text: bytes, base: int) -> int:
    """A length; int() alone would take signs, spaces and underscores."""
    digits = b"0123456789abcdefABCDEF"[: 10 if base == 10 else 22]
    if not text or len(text) > 16 or text.strip(digits):
        raise BadResponse("The daemon's answer has an invalid length.")
    return int(text, base)


def events(chunks: Iterator[bytes]) -> Iterator[str]:
    """The `data` of each server-sent event. One that the stream ends within is dropped."""
    buffer = b""
    data: list[bytes] = []
    for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data).decode("utf-8", "replace")
                data = []


def answers(
    opened: Callable[[], tuple[Connection, Response]],
) -> Generator[dict[str, Any], None, None]:
    """The JSON of each server-sent event up to [DONE], out of what `opened` gives once one is asked for.

    Raises:
        LocalspecError: the error among them, as its own class.
        NoDaemon: they ended without [DONE].
    """
    connection, response = opened()
    try:
        for text in events(response.chunks()):
            if text == "[DONE]":
                return
            chunk: dict[str, Any] = json.loads(text)
            if "error" in chunk:
                raise error_of(chunk["error"])
            yield chunk
        raise NoDaemon("The daemon's answer ended before it was complete.")
    finally:
        connection.close()


def error_of(detail: dict[str, Any]) -> LocalspecError:
    """The exception behind an OpenAI error object."""
    return from_code(
        str(detail.get("code")),
        str(detail.get("message")),
        param=detail.get("param"),
        n_prompt_tokens=detail.get("n_prompt_tokens"),
        n_ctx=detail.get("n_ctx"),
    )


class Connection:
    """One connected socket. Close it to cancel whatever the daemon does for it."""

    def __init__(self, path: str, timeout: float | None = None) -> None:
        """Connect, or raise NoDaemon when nobody listens (`timeout` in seconds, for every wait)."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise _explained(error, path) from error

    def request(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response:
        """Send one request and read the head of its answer.

        Raises:
            NoDaemon: it went away; NoAnswer: it says nothing in time.
            BadResponse: what came is no HTTP.
        """
        lines = [f"{method} {target} HTTP/1.1", "Host: localspec", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        try:  # noqa: SIM105 - contextlib would be an import more
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
            raise NoDaemon(_GONE) from error

    def close(self) -> None:
        self._socket.close()

    def cut(self) -> None:
        """End it from another thread, whose `close` would wait for what this one reads."""
        try:  # noqa: SIM105 - contextlib would be an import more
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended


def _explained(error: OSError, path: str) -> LocalspecError:
    if isinstance(error, PermissionError):
        return UnsafePath(f"{path} cannot be opened: it belongs to another user.")
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return NoDaemon("No daemon is running; start one with: localspec start")
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return NoAnswer("The daemon does not respond; to stop it: localspec stop")
    return NoDaemon(f"Cannot reach the daemon at {path}: {error.strerror or error}.")
