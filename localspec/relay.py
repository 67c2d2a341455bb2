"""Forward TCP connections of one user to a server that no other user can reach.

llama.cpp's RPC server has neither a password nor encryption, and every user of a machine can connect to its
loopback. So the server runs in a network namespace of its own, which contains only its process. A thread of
that process accepts connections on the machine's loopback. Those of the same user and of root are
forwarded; all others are closed. Only Linux has such namespaces and shows the owner of a connection.
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
RETRY_S = 0.1  # pause after a connection that could not be accepted
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

Connect = Callable[[], socket.socket]


class SocketTables:
    """The kernel's lists of TCP sockets.

    They belong to the network namespace in which the object was created.
    """

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
        """Return the user at the other end of a loopback connection, or None if it is not listed.

        A socket that its program has closed is listed as root's, so only sockets that are still open count.
        """
        try:
            names = connection.getpeername(), connection.getsockname()
            searched = tuple(map(_format_address, names))
        except (OSError, ValueError):
            return None
        for descriptor in self._descriptors:
            for line in _read_table(descriptor).splitlines()[1:]:
                fields = line.split()
                if len(fields) < 10:
                    continue
                # An IPv6 socket may hold an IPv4 address.
                addresses = fields[1][-13:], fields[2][-13:]
                if addresses == searched and fields[9] != "0":  # the inode; 0 after close
                    return int(fields[7])
        return None

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def is_other_user(uid: int | None) -> bool:
    """Return whether a user is neither this one nor root, which can do anything that this user can."""
    return uid not in (None, 0, os.getuid())


def forward(
    listener: socket.socket, connect: Connect, tables: SocketTables, allowed: Collection[int]
) -> None:
    """Forward connections of the allowed users, one at a time, until the listener is closed."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            if listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                return  # the listener is closed
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
                _relay_both_ways(client, server)


def enter_private_network() -> bool:
    """Move this process into a network namespace that contains only its own loopback.

    Call it before a second thread starts. It returns False, with nothing changed, if the system does not
    allow it.
    """
    if not sys.platform.startswith("linux"):
        return False
    # A namespace whose loopback cannot be started is useless, and a process cannot leave it. So a child
    # process tries first.
    child = os.fork()
    if child == 0:
        os._exit(0 if _unshare_network() else 1)
    _, status = os.waitpid(child, 0)
    return status == 0 and _unshare_network()


def _unshare_network() -> bool:
    """Enter a new network namespace and start its loopback; return whether that worked."""
    import ctypes
    import fcntl
    import struct

    unshare = ctypes.CDLL(None, use_errno=True).unshare
    uid, gid = os.getuid(), os.getgid()
    try:
        if unshare(_CLONE_NEWNET) != 0:  # only root needs no user namespace for it
            if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
                return False
            # Map this user to itself, so that its files keep their owner.
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


def _format_address(address: Sequence[object]) -> str:
    """Return an IPv4 address and its port in the format of /proc/net/tcp."""
    host, port = str(address[0]), address[1]
    number = int.from_bytes(socket.inet_aton(host), sys.byteorder)
    return f"{number:08X}:{port:04X}"


def _read_table(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    content = b""
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        content += chunk
    return content.decode("ascii", "replace")


def _relay_both_ways(client: socket.socket, server: socket.socket) -> None:
    """Copy data in both directions until both ends have closed their side."""
    for connection in (client, server):
        if connection.family != socket.AF_UNIX:
            # Without it a response could wait for a full packet, which only the next request fills.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    responses = threading.Thread(target=_copy_until_end, args=(server, client), daemon=True)
    responses.start()
    _copy_until_end(client, server)
    responses.join()


def _copy_until_end(source: socket.socket, sink: socket.socket) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    try:
        while count := source.recv_into(buffer):
            sink.sendall(buffer[:count])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
