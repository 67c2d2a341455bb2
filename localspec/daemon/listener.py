"""The daemon's socket: 0600 in a 0700 directory, and only for the user who owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import sys
from http import HTTPStatus
from pathlib import Path

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.daemon import probe
from localspec.errors import AlreadyRunning, UnsafePath
from localspec.paths import check_socket_path

log = logging.getLogger("localspec.listener")


def bind(path: Path) -> socket.socket:
    """Listen on `path`; a socket nobody answers on is replaced.

    Raises:
        AlreadyRunning: somebody answers there, although we hold the lock.
        UnsafePath: the path is too long, or something lies there that is no socket.
    """
    check_socket_path(path)
    _clear(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)  # uvicorn's own `uds` would leave it open to everybody
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise UnsafePath(f"Cannot listen on {path}: {error.strerror}.") from error
    finally:
        os.umask(previous)
    return listening


def _clear(path: Path) -> None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise UnsafePath(f"{path} is not a socket; remove it and try again.")
    if probe.answers(path):
        raise AlreadyRunning(f"Another program answers on {path}.")
    log.info("replacing the stale socket %s", path)
    path.unlink(missing_ok=True)


def unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def peer(connected: socket.socket) -> tuple[int | None, int]:
    """User and process at the other end, from the kernel; None and 0 where it does not say."""
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        pid, uid, _gid = struct.unpack(
            "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return int(uid), int(pid)
    if sys.platform == "darwin":
        # struct xucred: version, uid, …; SOL_LOCAL is 0 and LOCAL_PEERCRED 1.
        data = connected.getsockopt(0, 1, struct.calcsize("2IH16I"))
        return int(struct.unpack_from("2I", data)[1]), 0
    return None, 0


MAX_HEAD = 64 * 1024  # bytes of a request before its body
UNIX = "unix"  # in the place of a host name, before the number of the peer's process


class OwnerOnly(H11Protocol):
    """HTTP for connections of our own user; others are dropped before a byte is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        if connected.family != socket.AF_UNIX:
            return
        uid, pid = peer(connected)
        self.client = (UNIX, pid)
        if uid not in (None, os.getuid()):
            log.warning("a connection of uid %s was refused", uid)
            transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the same shape as everything else."""
        status, code = 400, "invalid_request"
        if len(self.conn.trailing_data[0]) >= MAX_HEAD:
            status, code = 431, "header_too_large"
            msg = f"The request's head is longer than {MAX_HEAD} bytes."
        detail = {"message": msg, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": detail})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun already
            reason = HTTPStatus(status).phrase.encode()
            head = h11.Response(status_code=status, headers=headers, reason=reason)
            self.transport.write(self.conn.send(head) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
        self.transport.close()
