"""Layers on other machines: llama.cpp's RPC backend, on both ends.

llama.cpp ends the process where a server cannot be reached, speaks another version, or goes away while
it is used. So each is asked first, with the greeting of its protocol, and answers here as an error.
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

import llama_cpp._ggml as ggml

from localspec.engine.llama import waiting
from localspec.engine.llama.library import devices, initialise
from localspec.engine.rpc_entrance import Entrance
from localspec.errors import LoadFailed
from localspec.links import noticing_cuts
from localspec.relay import SocketTables, is_foreign

GREETING_S = 5.0  # a server that serves another client greets nobody
VERSION = (7, 0)  # of the protocol in the llama.cpp that is pinned (ggml-rpc.h)
_HELLO = 14  # RPC_CMD_HELLO, which stays (ggml-rpc.cpp)
_CAPABILITIES = 24  # bytes; none is asked for
_ANSWER = 11  # bytes: the size of what follows, and the version

Device = Literal["any", "cpu"]  # what a worker serves

reached: dict[str, list[int]] = {}  # the devices of each server this process has used


def silent(endpoint: str) -> str:
    """Why a server cannot be used, as a clause; empty where it greets."""
    host, port = endpoint.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), GREETING_S) as connection:
            asked = struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES)
            connection.sendall(asked)
            answer = connection.makefile("rb").read(_ANSWER)  # it may come in parts
            # Whoever listens there learns what is asked. A connection that its server has not accepted
            # yet has no owner, so this is looked up after the greeting.
            if len(answer) == _ANSWER and (foreign := _foreign_owner(connection)):
                return f"belongs to another user of this machine (uid {foreign})"
    except TimeoutError:
        return "does not answer; one worker serves one pair at a time"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"
    if len(answer) < _ANSWER:
        return "is no worker of this kind (localspec rpc-worker)"
    _, *version = struct.unpack("<Q3B", answer)
    if version[0] != VERSION[0] or version[1] > VERSION[1]:
        theirs = ".".join(map(str, version))
        return (
            f"speaks version {theirs} of the protocol; install the same localspec on both machines"
        )
    return ""


def _foreign_owner(connection: socket.socket) -> int | None:
    """Return the user at the other end of a loopback connection, if it is neither ours nor root."""
    if not connection.getpeername()[0].startswith("127."):
        return None
    with contextlib.closing(SocketTables()) as tables:
        uid = tables.peer_uid(connection)
    return uid if is_foreign(uid) else None


def reach(endpoints: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """The devices of these servers by address, and of each that cannot be used a clause that says why.

    Raises:
        LoadFailed: this build has no RPC.
    """
    found: dict[str, list[int]] = {}
    problems: list[str] = []
    add = _function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    for endpoint in endpoints:
        if why := silent(endpoint):
            problems.append(f"{endpoint} {why}")
            continue
        if endpoint not in reached:
            reached[endpoint] = _devices_of(add(endpoint.encode()))
        found[endpoint] = reached[endpoint]
    return found, problems


def notice_cuts(endpoints: Iterable[str]) -> None:
    """Have the connections to these servers end where their link was cut: llama.cpp waits for ever."""
    ports = {int(each.rsplit(":", 1)[1]) for each in endpoints}
    internet = socket.AF_INET, socket.AF_INET6
    for entry in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, or not connected
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as each:
                if each.family in internet and each.getpeername()[1] in ports:
                    for option in noticing_cuts():
                        each.setsockopt(*option)


def serve(host: str, port: int, threads: int, device: Device = "any") -> None:
    """Serve this machine's devices until the process ends: of "any" its GPUs, or its processor where it
    has none.

    Raises:
        LoadFailed: this build has no RPC, or the address cannot be used (its own words are on stderr).
    """
    start = _function(
        "ggml_backend_rpc_start_server",
        None,
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p),
    )
    here = devices(gpus=True) if device == "any" else []
    here = here or devices(gpus=False)[:1]
    handles = (ctypes.c_void_p * len(here))(*here)
    start(f"{host}:{port}".encode(), None, threads, len(here), ctypes.addressof(handles))
    raise LoadFailed(f"{host}:{port} cannot be served on.")


def main(
    host: str,
    port: int,
    threads: int,
    entrance: Entrance | None = None,
    device: Device = "any",
) -> int:
    """Serve as a process of its own, to whom the entrance lets in; return the exit status."""
    # Python would only note a Ctrl-C, and llama.cpp never returns to it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    initialise()
    waiting.keep_looking(threads)
    if entrance:
        entrance.open(host, port)
    try:
        serve(host, port, threads, device)
    except LoadFailed as error:
        sys.stderr.write(f"Error: {error.message}\n")
    return 1


def _devices_of(server: int | None) -> list[int]:
    """Of a server that was added."""
    if not server:
        return []
    lib = ggml.libggml
    lib.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_reg_dev_count.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    count = lib.ggml_backend_reg_dev_count(server)
    return [int(lib.ggml_backend_reg_dev_get(server, at)) for at in range(count)]


def built() -> bool:
    """Whether this build of llama.cpp has the backend."""
    return bool(_backend())


def _backend() -> int | None:
    by_name = ggml.libggml.ggml_backend_reg_by_name
    by_name.restype, by_name.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    found: int | None = by_name(b"RPC")
    return found


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """One that only the backend knows. Raises LoadFailed: it was not built."""
    backend = _backend()
    if not backend:
        raise LoadFailed(
            "This build of llama.cpp cannot use other machines (GGML_RPC is off). To build it again: "
            "scripts/setup --again"
        )
    get = ggml.libggml.ggml_backend_reg_get_proc_address
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(result, *arguments)(get(backend, name.encode()))
