"""A hub on loopback for the real huggingface_hub client: metadata, redirects, ranges, and faults.

It implements what huggingface_hub 2.4.0 requests: /api/models/OWNER/NAME/tree/REVISION in pages, and
HEAD and GET of /OWNER/NAME/resolve/REVISION/FILE, with X-Repo-Commit, X-Linked-ETag, X-Linked-Size
and a redirect to another host (`localhost`, not `127.0.0.1`, as the hub redirects to its storage)
that serves ranges. It counts everything that it does; `Faults` are its errors, per file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 64 << 10


@dataclass
class Faults:
    """The faults of one file. Counts are used up, so that a retry succeeds."""

    # Bytes per answer before the connection breaks.
    close_after: list[int] = field(default_factory=list)
    stall_after: list[int] = field(default_factory=list)  # bytes per answer before silence
    statuses: list[tuple[int, str]] = field(default_factory=list)  # (status, Retry-After) to GETs
    head_statuses: list[tuple[int, str]] = field(default_factory=list)
    ignore_range: bool = False
    corrupt: bool = False  # one byte differs, the size does not
    portal: bool = False  # a web page for everything
    portal_on_get: bool = False
    gated: bool = False  # a token is needed
    change_after: int = 0  # after this many GETs the content changes
    direct: bool = False  # no redirect
    packed: str = ""  # Content-Encoding of the compressed content: gzip, deflate, br
    unmarked: int = 0  # this many more GETs are answered without regard to their range
    answer: tuple[int, str] | None = None  # (status, X-Error-Code) to everything
    moved_to: str = ""  # every request is redirected to this endpoint


@dataclass
class Request:
    """One request as it was received."""

    method: str
    path: str
    range: str
    to_storage: bool
    host: str = ""
    authorization: str = ""  # the header as received

    @property
    def authorized(self) -> bool:
        return bool(self.authorization)


@dataclass
class _File:
    data: bytes
    sha256: str
    faults: Faults
    commit: str = COMMIT
    gets: int = 0


class TestHub:
    """The server. `sent` counts bytes of files that left it; `rate` limits them, per second."""

    __test__ = False  # not a test class

    def __init__(self, certificate: Path | None = None) -> None:
        """Create a hub; `certificate` is a PEM file with its key, to speak HTTPS."""
        self.files: dict[tuple[str, str], _File] = {}
        self.requests: list[Request] = []
        self.sent = 0
        self.page = 1000  # files in one answer of a list
        self.list_statuses: list[tuple[int, str]] = []  # (status, Retry-After) to lists, used up
        self.list_page = False  # a web page instead of lists
        self.token = "hf_secrettokenfortests"
        self._lock = threading.Condition()
        self._rate = self._due = 0.0
        self._server = _Server(self)
        self.port = self._server.server_address[1]
        scheme = "https" if certificate else "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.endpoint = f"{scheme}://127.0.0.1:{self.port}"
        self.storage = f"{scheme}://localhost:{self.port}"
        self.silence = threading.Event()  # set at the end, so that stalled answers finish

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        """Set the limit; answers in progress continue with the new rate at once."""
        with self._lock:
            self._rate, self._due = rate, 0.0
            self._lock.notify_all()

    def add(self, repo: str, file: str, data: bytes, faults: Faults | None = None) -> Faults:
        """Put a file on the hub; the faults may be changed later."""
        entry = _File(data, hashlib.sha256(data).hexdigest(), faults or Faults())
        self.files[repo, file] = entry
        return entry.faults

    def replace(self, repo: str, file: str, data: bytes) -> None:
        """Make a new commit with other content."""
        entry = self.files[repo, file]
        entry.data, entry.sha256 = data, hashlib.sha256(data).hexdigest()
        entry.commit = hashlib.sha1(data).hexdigest()

    def gets(self) -> list[Request]:
        """Return the GETs of file content."""
        return [
            request for request in self.requests if request.method == "GET" and request.to_storage
        ]

    def count(self, size: int) -> None:
        with self._lock:
            self.sent += size
            if not (rate := self._rate):
                return
            due = self._due = max(self._due, time.monotonic() - 0.05) + size / rate
            self._lock.wait_for(lambda: self._rate != rate, due - time.monotonic())

    @contextmanager
    def running(self) -> Iterator[TestHub]:
        """Serve until the block ends."""
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self.silence.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, hub: TestHub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        """Use a small send buffer, so that `TestHub.sent` counts only bytes that have left."""
        connection, address = super().get_request()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIECE)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that was killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        hub, path = self.server.hub, unquote(self.path.split("?")[0])
        if path.startswith("http://"):  # a request to a proxy
            path = "/" + path.split("/", 3)[3]
        to_storage = self.headers.get("Host", "").startswith("localhost")
        authorization = self.headers.get("Authorization", "")
        with hub._lock:
            hub.requests.append(
                Request(
                    self.command,
                    path,
                    self.headers.get("Range", ""),
                    to_storage,
                    self.headers.get("Host", ""),
                    authorization,
                )
            )
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        if listed:
            self._list(listed[1])
            return
        match = re.fullmatch(r"/(?:storage/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        entry = hub.files.get((match[1], match[3])) if match else None
        if entry is None:
            self._plain(404, {"X-Error-Code": "EntryNotFound" if match else "RepoNotFound"})
        elif entry.faults.portal:
            self._page()
        elif entry.faults.moved_to:
            self._plain(307, {"Location": entry.faults.moved_to + path})
        elif to_storage:
            self._content(entry)
        else:
            self._resolve(entry, path, authorization)

    def _list(self, repo: str) -> None:
        """Send a page of the repository's files, and the address of the next page."""
        hub = self.server.hub
        if hub.list_statuses:
            self._status(hub.list_statuses.pop(0))
            return
        if hub.list_page:
            self._page()
            return
        files = [(file, entry) for (place, file), entry in hub.files.items() if place == repo]
        if not files:
            self._plain(401, {"X-Error-Code": "RepoNotFound"})
            return
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        page = files[start : start + hub.page]
        body = json.dumps(
            [{"type": "directory", "path": "folder", "oid": "0", "size": 0}]
            + [
                {
                    "type": "file",
                    "path": file,
                    "size": len(entry.data),
                    "oid": entry.sha256[:40],
                    "lfs": {"oid": entry.sha256, "size": len(entry.data), "pointerSize": 134},
                }
                for file, entry in page
            ]
        ).encode()
        self.send_response(200)
        if start + hub.page < len(files):
            path = self.path.split("?")[0]
            next_page = f"{hub.endpoint}{path}?recursive=true&cursor={start + hub.page}"
            self.send_header("Link", f'<{next_page}>; rel="next"')
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _resolve(self, entry: _File, path: str, authorization: str) -> None:
        """Answer as the hub: with metadata and the address at the storage."""
        hub, faults = self.server.hub, entry.faults
        if faults.answer:
            status, code = faults.answer
            self._plain(status, {"X-Error-Code": code} if code else {})
            return
        if faults.gated and authorization != f"Bearer {hub.token}":
            self._plain(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            return
        if self.command == "HEAD" and faults.head_statuses:
            self._status(faults.head_statuses.pop(0))
            return
        if self.command == "GET":
            entry.gets += 1
            if faults.change_after and entry.gets > faults.change_after:
                faults.change_after = 0
                entry.data = entry.data[:-1] + bytes([entry.data[-1] ^ 1])
                entry.sha256 = hashlib.sha256(entry.data).hexdigest()
                entry.commit = hashlib.sha1(entry.data).hexdigest()
        headers = {
            "X-Repo-Commit": entry.commit,
            "X-Linked-ETag": f'"{entry.sha256}"',
            "X-Linked-Size": str(len(entry.data)),
            "ETag": f'"{entry.sha256}"',
        }
        if faults.direct:
            self._content(entry, headers)
        else:
            location = f"{hub.storage}/storage{path}?signature=abc"
            self._plain(302, headers | {"Location": location})

    def _content(self, entry: _File, extra: dict[str, str] | None = None) -> None:
        """Answer as the storage: with bytes."""
        faults, data = entry.faults, entry.data
        if self.command == "GET" and faults.statuses:
            self._status(faults.statuses.pop(0))
            return
        if faults.portal_on_get:
            self._page()
            return
        start, end, status = 0, len(data), 200
        range_match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if faults.packed and self.command == "GET":
            self._packed(entry, faults.packed, ranged=bool(range_match) and not faults.ignore_range)
            return
        if faults.unmarked and self.command == "GET":
            faults.unmarked -= 1
            range_match = None
        if range_match and not faults.ignore_range:
            start = int(range_match[1])
            end = min(end, int(range_match[2]) + 1) if range_match[2] else end
            status = 206
        self.send_response(status)
        for key, value in (extra or {"ETag": '"storage"'}).items():
            self.send_header(key, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "GET":
            self._send(entry, start, end)

    def _packed(self, entry: _File, encoding: str, *, ranged: bool) -> None:
        """Answer as a mirror does that compresses everything."""
        body = gzip.compress(entry.data) if encoding == "gzip" else zlib.compress(entry.data)
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Encoding", encoding)
        if ranged:
            size = len(entry.data)
            self.send_header("Content-Range", f"bytes 0-{size - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.server.hub.count(len(body))
        self.wfile.write(body)

    def _send(self, entry: _File, start: int, end: int) -> None:
        faults, hub = entry.faults, self.server.hub
        close = faults.close_after.pop(0) if faults.close_after else None
        stall = faults.stall_after.pop(0) if faults.stall_after else None
        limit = min(bound for bound in (close, stall, end - start) if bound is not None)
        middle = len(entry.data) - 100
        for offset in range(start, start + limit, _PIECE):
            piece = entry.data[offset : min(offset + _PIECE, start + limit)]
            if faults.corrupt and offset <= middle < offset + len(piece):
                index = middle - offset
                piece = piece[:index] + bytes([piece[index] ^ 0x55]) + piece[index + 1 :]
            self.wfile.write(piece)
            hub.count(len(piece))
        if stall is not None and limit == stall:
            hub.silence.wait(60)
        if limit < end - start:
            self.close_connection = True

    def _status(self, answer: tuple[int, str]) -> None:
        status, retry_after = answer
        self._plain(status, {"Retry-After": retry_after} if retry_after else {})

    def _page(self) -> None:
        page = b"<html><body>Welcome to Hotel WiFi</body></html>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    def _plain(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
