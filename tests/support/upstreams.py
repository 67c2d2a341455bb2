"""A server of OpenAI's shapes whose every byte is a test's, and which remembers what it was sent."""

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


@dataclass
class Seen:
    """A request. `left`: when its client closed the connection (monotonic), 0 while it has not."""

    line: str
    headers: dict[str, str]
    body: Any
    left: float = 0.0

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]


Answering = Callable[[Seen, socket.socket], None]


@dataclass
class ScriptedServer:
    """`answer` writes whatever it likes; without it models are listed and a chat says hello.

    `silent`: nothing more is answered, as when a link is cut and nothing says so. `root`: what the models
    are, whatever they are called.
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
    seen: list[Seen] = field(default_factory=list)
    stream: bytes = b""
    connections: list[socket.socket] = field(default_factory=list)

    def serve(self, connection: socket.socket) -> None:
        self.connections.append(connection)
        if self.tls is not None:
            try:
                connection = self.tls.wrap_socket(connection, server_side=True)
            except OSError:
                return  # a client that trusts nobody leaves at once
        with connection, contextlib.suppress(OSError):
            connection.settimeout(30)
            while (seen := _request(connection)) is not None:
                if self.silent:
                    self.watch(seen, connection)
                    return
                if seen.path == "/metrics":
                    text = self.metrics() if self.metrics else None
                    connection.sendall(whole(text, "200 OK" if text else "404 None", plain=text))
                    continue
                self.seen.append(seen)
                if seen.path.endswith("/models"):
                    listed = [
                        {
                            "id": each,
                            "owned_by": self.owner,
                            "root": self.root,
                            "max_model_len": self.context,
                        }
                        for each in self.models
                    ]
                    connection.sendall(whole({"object": "list", "data": listed}))
                elif self.answer is not None:
                    self.answer(seen, connection)
                    return
                else:
                    connection.sendall(streamed(self.stream or said("hello", " there")))

    def watch(self, seen: Seen, connection: socket.socket) -> None:
        """Until the client leaves."""
        with contextlib.suppress(OSError):
            connection.recv(1)
        seen.left = time.monotonic()


def _request(connection: socket.socket) -> Seen | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(1 << 16)):
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, _, v in (each.partition(": ") for each in rest)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(1 << 16)
    return Seen(line, headers, json.loads(body) if body else None)


def whole(
    value: object, status: str = "200 OK", headers: str = "", plain: str | None = None
) -> bytes:
    data = (json.dumps(value) if plain is None else plain).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return f"{head}{headers}\r\n".encode() + data


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""


def streamed(data: bytes) -> bytes:
    return HEAD + chunked(data) + b"0\r\n\r\n"


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def said(*texts: str, finish: str = "stop", **last: Any) -> bytes:
    """A whole chat in so many pieces; `last` are keys of its last chunk."""
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    pieces += [{"content": text} for text in texts]
    ended: list[tuple[dict[str, Any], str | None]] = [(each, None) for each in pieces]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in [*ended, ({}, finish)]
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": len(texts)}
    ends: list[object] = [{"choices": [], "usage": usage, **last}, b"[DONE]"]
    return b"".join(map(event, [*chunks, *ends]))


def certified(folder: Path, address: str) -> tuple[ssl.SSLContext, Path]:
    """What a server of that address shows, and the file of who vouches for it: nobody but itself."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=tower", "-addext", f"subjectAltName=IP:{address}",
         "-keyout", str(key), "-out", str(certificate)],
        capture_output=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@contextlib.contextmanager
def scripted_server(
    port: int = 0, listening: socket.socket | None = None, **fields: Any
) -> Iterator[ScriptedServer]:
    """`listening`: a socket of another host; else one of this machine's, at the port."""
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
            for each in (listening, *server.connections):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
