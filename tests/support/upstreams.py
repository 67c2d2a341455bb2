"""A server with OpenAI's API whose every byte a test controls, and which records its requests."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE


@dataclass
class ReceivedRequest:
    """A received request. `closed_at`: when its client closed the connection (monotonic), or 0."""

    line: str
    headers: dict[str, str]
    body: Any
    closed_at: float = 0.0

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]


Answering = Callable[[ReceivedRequest, socket.socket], None]


@dataclass
class ScriptedServer:
    """A server: `answer` writes the response; by default it lists models, and a chat says hello.

    `silent`: nothing more is answered, as when a link is cut unnoticed. `root`: the true name of the models,
    whatever they are called.
    """

    url: str = ""
    owner: str = "vllm"
    silent: bool = False
    tls: ssl.SSLContext | None = None
    models: list[str] = field(default_factory=lambda: ["tiny"])
    root: str = ""
    context: int = 0
    answer: Answering | None = None
    metrics: Callable[[], str] | None = None
    requests: list[ReceivedRequest] = field(default_factory=list)
    stream: bytes = b""
    connections: list[socket.socket] = field(default_factory=list)

    def serve(self, connection: socket.socket) -> None:
        self.connections.append(connection)
        if self.tls is not None:
            try:
                connection = self.tls.wrap_socket(connection, server_side=True)
            except OSError:
                return  # a client that does not trust us leaves at once
        with connection, contextlib.suppress(OSError):
            connection.settimeout(PATIENCE)
            while (request := _request(connection)) is not None:
                if self.silent:
                    self.watch(request, connection)
                    return
                if request.path == "/metrics":
                    text = self.metrics() if self.metrics else None
                    connection.sendall(
                        encode_response(text, "200 OK" if text else "404 None", plain=text)
                    )
                    continue
                self.requests.append(request)
                if request.path.endswith("/models"):
                    listed = [
                        {
                            "id": model,
                            "owned_by": self.owner,
                            "root": self.root,
                            "max_model_len": self.context,
                        }
                        for model in self.models
                    ]
                    connection.sendall(encode_response({"object": "list", "data": listed}))
                elif self.answer is not None:
                    try:
                        self.answer(request, connection)
                    except OSError:  # the client left before it had its answer
                        request.closed_at = time.monotonic()
                    return
                else:
                    connection.sendall(encode_stream(self.stream or encode_chat("hello", " there")))

    def watch(self, request: ReceivedRequest, connection: socket.socket) -> None:
        """Wait until the client leaves."""
        with contextlib.suppress(OSError):
            connection.recv(1)
        request.closed_at = time.monotonic()


def _request(connection: socket.socket) -> ReceivedRequest | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(1 << 16)):
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, _, v in (header.partition(": ") for header in rest)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(1 << 16)
    return ReceivedRequest(line, headers, json.loads(body) if body else None)


def encode_response(
    value: object, status: str = "200 OK", headers: str = "", plain: str | None = None
) -> bytes:
    data = (json.dumps(value) if plain is None else plain).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return f"{head}{headers}\r\n".encode() + data


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def encode_chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""


def encode_stream(data: bytes) -> bytes:
    return HEAD + encode_chunk(data) + b"0\r\n\r\n"


def encode_event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def encode_chat(*texts: str, finish: str = "stop", **last_chunk: Any) -> bytes:
    """Return a complete chat in these pieces; `last_chunk` are keys of its last chunk."""
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    pieces += [{"content": text} for text in texts]
    deltas: list[tuple[dict[str, Any], str | None]] = [(piece, None) for piece in pieces]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in [*deltas, ({}, finish)]
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": len(texts)}
    ends: list[object] = [{"choices": [], "usage": usage, **last_chunk}, b"[DONE]"]
    return b"".join(map(encode_event, [*chunks, *ends]))


def make_tls_context(folder: Path, address: str) -> tuple[ssl.SSLContext, Path]:
    """Return a TLS context for a server at that address, and the file of its self-signed certificate."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    run = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=tower", "-addext", f"subjectAltName=IP:{address}",
         "-keyout", str(key), "-out", str(certificate)],
        capture_output=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@contextlib.contextmanager
def scripted_server(
    port: int = 0, listening: socket.socket | None = None, **fields: Any
) -> Iterator[ScriptedServer]:
    """Run a server on `listening`, a socket of another host, or on a local socket at the port."""
    with listening or socket.create_server(("127.0.0.1", port)) as listening:
        host, port = listening.getsockname()
        server = ScriptedServer(**fields)
        server.url = f"http{'s' * (server.tls is not None)}://{host}:{port}/v1"

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server
        finally:
            for open_socket in (listening, *server.connections):
                with contextlib.suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)
