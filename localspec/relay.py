"""Forward TCP connections of one user to a server that nobody else can reach.

llama.cpp's RPC server has neither a password nor encryption, and every user of a machine can connect to its
loopback. So the server runs in a network namespace of its own, where only its process is, and a thread of
that process accepts connections on the machine's loopback: those of the same user and of root are forwarded,
all others are closed. Only Linux has such namespaces and shows the owner of a connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

_CHUNK_BYTES = 1 << 18
RETRY_S = 0.1  # after a connection that could not be accepted
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

Connect = Callable[[], socket.socket]


class SocketTables:
    """The kernel's lists of TCP sockets, in the network namespace in which this was made."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                self._descriptors.append(os.open(f"/proc/net/{name}", os.O_RDONLY))

    @property
    def available(self) -> bool:
        """Whether this system shows who owns a socket."""
        return bool(self._descriptors)

    def peer_uid(self, connection: socket.socket) -> int | None:
        """Return the user of the other end of a loopback connection, or None if it is not listed.

        A socket that its program has closed is listed as root's, so only those of a program count.
        """
        try:
            peer, own = _address(connection.getpeername()), _address(connection.getsockname())
        except (OSError, ValueError):
            return None
        for descriptor in self._descriptors:
            for line in _read(descriptor).splitlines()[1:]:
                fields = line.split()
                if len(fields) < 10:
                    continue
                ends = fields[1][-13:], fields[2][-13:]  # an IPv6 socket may hold an IPv4 address
                if ends == (peer, own) and fields[9] != "0":  # its inode
                    return int(fields[7])
        return None

    def close(self) -> None:
        """Close the lists."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def is_foreign(uid: int | None) -> bool:
    """Return whether a user is another one than ours. Root can do all that we can, so it is not."""
    return uid not in (None, 0, os.getuid())


def forward(
    listener: socket.socket, connect: Connect, tables: SocketTables, allowed: Collection[int]
) -> None:
    """Forward the connections of these users, one at a time, until the listener is closed."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            if listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                return  # it is closed
            sys.stderr.write(f"A connection could not be accepted: {error.strerror}.\n")
            time.sleep(RETRY_S)
            continue
        with client:
            uid = tables.peer_uid(client)
            if uid not in allowed:
                sys.stderr.write(f"Refused a connection of another user (uid {uid}).\n")
                sys.stderr.flush()
                continue
            with contextlib.suppress(OSError), connect() as server:
                _join(client, server)


def enter_private_network() -> bool:
    """Move this process into a network namespace that has nothing but a loopback of its own.

    Must be called before a second thread is started. Returns False, with nothing changed, where the system
    does not let us.
    """
    if not sys.platform.startswith("linux"):
        return False
    # A namespace whose loopback cannot be started would be of no use, and there is no way back. So a child
    # process tries it first.
    child = os.fork()
    if child == 0:
        os._exit(0 if _unshare() else 1)
    _, status = os.waitpid(child, 0)
    return status == 0 and _unshare()


def _unshare() -> bool:
    import ctypes
    import fcntl
    import struct

    unshare = ctypes.CDLL(None, use_errno=True).unshare
    uid, gid = os.getuid(), os.getgid()
    try:
        if unshare(_CLONE_NEWNET) != 0:  # root alone may have one without a user namespace
            if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
                return False
            # Everything of this process keeps its owner.
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{uid} {uid} 1"),
                ("gid_map", f"{gid} {gid} 1"),
            ):
                Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    except OSError:
        return False
    return True


def _address(address: Sequence[object]) -> str:
    """Return an IPv4 address and its port as /proc/net/tcp writes them."""
    host, port = str(address[0]), address[1]
    number = int.from_bytes(socket.inet_aton(host), sys.byteorder)
    return f"{number:08X}:{port:04X}"


def _read(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    found = b""
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        found += chunk
    return found.decode("ascii", "replace")


def _join(client: socket.socket, server: socket.socket) -> None:
    """Copy both ways until both ends have said that there is no more."""
    for end in (client, server):
        if end.family != socket.AF_UNIX:
            # An answer that waits for a full packet would wait for the next question.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answers = threading.Thread(target=_copy, args=(server, client), daemon=True)
    answers.start()
    _copy(client, server)
    answers.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        while count := source.recv_into(buffer):
            sink.sendall(buffer[:count])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
