"""A proxy on loopback, and a self-signed certificate."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class TestProxy:
    """An HTTP proxy. `status`: its answer to every request, instead of forwarding it.

    It requires `password` ("NAME:WORD") if there is one. Whatever host is requested, it connects to `to`.
    """

    __test__ = False  # not a test class

    def __init__(self, to: int = 0, *, password: str = "", status: int = 0) -> None:
        self.to, self.password, self.status = to, password, status
        self.requests: list[str] = []
        self._server = _Server(self)
        self.place = f"127.0.0.1:{self._server.server_address[1]}"

    def url(self, password: str = "") -> str:
        return f"http://{password}@{self.place}" if password else f"http://{self.place}"

    @contextlib.contextmanager
    def running(self) -> Iterator[TestProxy]:
        thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, proxy: TestProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that was killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_CONNECT(self) -> None:
        proxy = self.server.proxy
        if self._refused():
            return
        with socket.create_connection(("127.0.0.1", proxy.to)) as far:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_copy, args=(far, self.connection), daemon=True)
            back.start()
            _copy(self.connection, far)
            back.join()
        self.close_connection = True

    def do_HEAD(self) -> None:
        """Forward plain HTTP, over one connection for each request."""
        if self._refused():
            return
        with socket.create_connection(("127.0.0.1", self.server.proxy.to)) as far:
            path = "/" + self.path.split("/", 3)[3]
            lines = [f"{self.command} {path} HTTP/1.1"]
            lines += [f"{k}: {v}" for k, v in self.headers.items() if k.lower() != "connection"]
            far.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
            _copy(far, self.connection)
        self.close_connection = True

    def do_GET(self) -> None:
        self.do_HEAD()

    def _refused(self) -> bool:
        proxy = self.server.proxy
        proxy.requests.append(self.path)
        credentials = self.headers.get("Proxy-Authorization", "").removeprefix("Basic ")
        expected = base64.b64encode(proxy.password.encode()).decode()
        status = proxy.status or (407 if credentials != expected else 0)
        if status:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return bool(status)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def make_certificate(folder: Path) -> Path:
    """Make a self-signed certificate for 127.0.0.1 and localhost, with its key, in one PEM file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("this machine has no openssl to make a certificate with")
    file = folder / "own certificate.pem"
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "30", "-subj", "/CN=test hub", "-keyout", str(key),
            "-out", str(certificate), "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    file.write_text(key.read_text() + certificate.read_text())
    return file


def dead_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port
