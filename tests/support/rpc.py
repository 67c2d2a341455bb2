"""Another machine, as a process on this one: what `localspec rpc-worker` becomes."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

from tests.support.daemons import wait_for

HELLO = struct.pack("<BQ", 14, 24) + bytes(24)  # the greeting of llama.cpp's protocol


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def rpc_worker(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of a worker, once it listens, and its process. port: 0 for any."""
    port = port or free_port()
    command = [sys.executable, "-m", "localspec.engine", "--rpc-worker"]
    command += ["127.0.0.1", str(port), "1", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:

        def listens() -> bool:
            assert worker.poll() is None, "the worker ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        wait_for(listens, "a worker that listens")
        try:
            yield f"127.0.0.1:{port}", worker
        finally:
            worker.kill()
