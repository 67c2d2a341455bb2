"""Run layers on other machines with llama.cpp's RPC backend: both its client and its server.

llama.cpp ends the process if a server cannot be reached, has another protocol version, or disconnects while
it is used. Each server is therefore greeted first, with the protocol's hello message, so that problems become
errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from localspec.engine.llama import waiting
from localspec.engine.llama.ggml import declare
from localspec.engine.llama.model import devices, initialise
from localspec.engine.rpc_entrance import Entrance
from localspec.errors import LoadFailed
from localspec.files import keepalive_options
from localspec.relay import SocketTables, is_other_user

GREETING_S = 5.0  # Timeout of the greeting. A server that serves another client does not reply.
VERSION = (7, 0)  # Protocol version of the pinned llama.cpp (ggml-rpc.h).
_HELLO = 14  # RPC_CMD_HELLO, the same in all protocol versions (ggml-rpc.cpp).
_N_CAPABILITY_BYTES = 24  # All zero: no capabilities are requested.
_N_REPLY_BYTES = 11  # The size of what follows, and the version.

Device = Literal["any", "cpu"]  # The devices that a worker serves.

reached: dict[str, list[int]] = {}  # The devices of each server that this process has used.


def find_problem(endpoint: str) -> str:
    """Return why a server cannot be used, as a clause; "" if it replies to the greeting."""
    host, port = endpoint.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), GREETING_S) as connection:
            hello = struct.pack("<BQ", _HELLO, _N_CAPABILITY_BYTES) + bytes(_N_CAPABILITY_BYTES)
            connection.sendall(hello)
            # The reply may arrive in parts, which a file object joins.
            reply = connection.makefile("rb").read(_N_REPLY_BYTES)
            # The server would see the user's prompts, so it must not belong to another user. The owner is
            # looked up after the greeting, because a connection has none before the server accepts it.
            if len(reply) == _N_REPLY_BYTES and connection.getpeername()[0].startswith("127."):
                with contextlib.closing(SocketTables()) as tables:
                    if is_other_user(uid := tables.peer_uid(connection)):
                        return f"belongs to another user of this machine (uid {uid})"
    except TimeoutError:
        return "does not answer; one worker serves one pair at a time"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"
    if len(reply) < _N_REPLY_BYTES:
        return "is no worker of this kind (localspec rpc-worker)"
    _, *version = struct.unpack("<Q3B", reply)
    if version[0] != VERSION[0] or version[1] > VERSION[1]:
        theirs = f"version {'.'.join(map(str, version))} of the protocol"
        return f"speaks {theirs}; install the same localspec on both machines"
    return ""


def connect(endpoints: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the devices of these servers by address, and the problem of each one that cannot be used.

    Raises LoadFailed if this build has no RPC.
    """
    problems = dict[str, str]()
    add = _function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    count = declare("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    get = declare("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    for endpoint in endpoints:
        if problem := find_problem(endpoint):
            problems[endpoint] = f"{endpoint} {problem}"
        elif endpoint not in reached:
            server = add(endpoint.encode())
            indices = range(count(server) if server else 0)
            reached[endpoint] = [int(get(server, index)) for index in indices]
    usable = {endpoint: reached[endpoint] for endpoint in endpoints if endpoint not in problems}
    return usable, list(problems.values())


def enable_keepalive(endpoints: Iterable[str]) -> None:
    """Make the connections to these servers end if their link is cut; llama.cpp would wait for ever."""
    ports = {int(endpoint.rsplit(":", 1)[1]) for endpoint in endpoints}
    internet = socket.AF_INET, socket.AF_INET6
    for entry in Path("/dev/fd").iterdir():
        # The descriptor was closed in the meantime, or is not connected.
        with contextlib.suppress(OSError):
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in internet and connection.getpeername()[1] in ports:
                    for option in keepalive_options():
                        connection.setsockopt(*option)


def serve(host: str, port: int, threads: int, device: Device = "any") -> None:
    """Serve this machine's devices until the process ends.

    device: "any" serves the GPUs, or the CPU if there are none.

    Raises LoadFailed if this build has no RPC, or the address cannot be used; the reason is on stderr.
    """
    text, size = ctypes.c_char_p, ctypes.c_size_t
    parameters = (text, text, size, size, ctypes.c_void_p)
    start = _function("ggml_backend_rpc_start_server", None, *parameters)
    served = (devices(gpus=True) if device == "any" else []) or devices(gpus=False)[:1]
    handles = (ctypes.c_void_p * len(served))(*served)
    start(f"{host}:{port}".encode(), None, threads, len(served), ctypes.addressof(handles))
    raise LoadFailed(f"{host}:{port} cannot be served on.")


def main(
    host: str, port: int, threads: int, entrance: Entrance | None = None, device: Device = "any"
) -> int:
    """Serve as a process of its own, to clients that the entrance admits; return the exit status."""
    # Python's handler would only set a flag for Ctrl-C, because llama.cpp never returns to Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    initialise()
    waiting.check_load_in_thread(threads)
    if entrance:
        entrance.open(host, port)
    try:
        serve(host, port, threads, device)
    except LoadFailed as error:
        sys.stderr.write(f"Error: {error.message}\n")
    return 1


def has_rpc_backend() -> bool:
    return bool(_find_backend())


def _find_backend() -> Any:
    return declare("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")


def _function(name: str, result: Any, *parameters: Any) -> Any:
    """Return a function of the RPC backend. Raises LoadFailed if the backend was not built."""
    backend = _find_backend()
    if not backend:
        raise LoadFailed(
            "This build of llama.cpp cannot use other machines (GGML_RPC is off). To build it again: "
            "scripts/setup --again"
        )
    pointer = ctypes.c_void_p
    find = declare("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *parameters)(find(backend, name.encode()))
