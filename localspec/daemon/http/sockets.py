"""Unix sockets: the daemon's own, a check whether a daemon answers, and sockets of a service manager.

A service manager passes sockets with environment variables (sd_listen_fds(3), sd_notify(3)). Without them
that part does nothing. This module imports little: if many daemons start at once, those that do not get the
lock end before they load a web server.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
from pathlib import Path

from localspec.errors import AlreadyRunning, UnsafePath, UsageError
from localspec.paths import check_socket_path, open_file

# How long a daemon that is starting or draining may hold the lock without listening: 10 s for
# running answers, 5 s for requests that hang, 10 s for an engine that saves its state or hangs.
HANDOVER_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.02


class Lock:
    """The lock that decides which daemon may run, on a file, until `release` or the end of the process.

    A pid file would not do, because pids are reused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # O_NOFOLLOW, because with a link somebody could choose which file we truncate.
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            message = f"The lock file {path} cannot be opened ({error.strerror}); remove it."
            raise UnsafePath(message) from error

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Only `stop` of an unresponsive daemon needs the pid, so a full disk does not matter.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
        return True

    def release(self) -> None:
        os.close(self._descriptor)


def acquire(path: Path, socket: Path | None, patience: float = HANDOVER_TIMEOUT_S) -> Lock:
    """Acquire and return the daemon's lock.

    `socket` is None if systemd holds it, because systemd accepts connections without a daemon.

    Raises:
        AlreadyRunning: Another daemon holds the lock and answers on `socket`, or has held it for
            `patience` seconds without answering.
    """
    lock = Lock(path)
    deadline = time.monotonic() + patience
    while not lock.try_acquire():
        if socket and accepts_connections(socket):
            lock.release()
            raise AlreadyRunning("A daemon is already running; see: localspec status")
        if time.monotonic() > deadline:
            lock.release()
            raise AlreadyRunning(
                f"Another daemon holds {path} and has not responded for {patience:.0f} s; to stop "
                "it: localspec stop"
            )
        time.sleep(_POLL_INTERVAL_S)
    return lock


log = logging.getLogger("localspec.listener")
_manager_log = logging.getLogger("localspec.systemd")

_CONNECT_TIMEOUT_S = 5.0  # a connection has to wait while the backlog is full
_FIRST_DESCRIPTOR = 3  # of those that a service manager passes


def bind(path: Path) -> socket.socket:
    """Listen on `path`, 0600 in a 0700 directory. A socket on which nobody answers is replaced.

    Raises:
        AlreadyRunning: Another program answers there, although we hold the lock.
        UnsafePath: The path is too long, or the file there is not a socket.
    """
    check_socket_path(path)
    _remove_stale_socket(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_mask = os.umask(0o177)  # uvicorn's `uds` option would let every user connect
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise UnsafePath(f"Cannot listen on {path}: {error.strerror}.") from error
    finally:
        os.umask(previous_mask)
    return listening


def _remove_stale_socket(path: Path) -> None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise UnsafePath(f"{path} is not a socket; remove it and try again.")
    if accepts_connections(path):
        raise AlreadyRunning(f"Another program is listening on {path}.")
    log.info("replacing the stale socket %s", path)
    path.unlink(missing_ok=True)


def accepts_connections(path: Path) -> bool:
    """Return whether a connection to `path` is accepted, or at least not refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return False
        except OSError:
            return True
    return True


def has_inherited_sockets() -> bool:
    """Return whether a service manager passed sockets to this process, which then owns no path."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def take_inherited_sockets() -> list[socket.socket]:
    """Return the sockets that a service manager passed, once.

    The variables are removed and the sockets closed in children, so that no child process uses them.

    Raises:
        UsageError: One of them is not a listening Unix stream socket.
    """
    is_for_us = has_inherited_sockets()
    count = os.environ.pop("LISTEN_FDS", "0")
    os.environ.pop("LISTEN_PID", None)
    os.environ.pop("LISTEN_FDNAMES", None)
    if not is_for_us or not count.isdecimal():
        return []
    return [
        _take_socket(descriptor)
        for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))
    ]


def _take_socket(descriptor: int) -> socket.socket:
    try:
        inherited = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        if (
            inherited.family == socket.AF_UNIX
            and inherited.type == socket.SOCK_STREAM
            and inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            return inherited
    except OSError as error:
        raise UsageError(
            f"File descriptor {descriptor}, passed by the service manager, cannot be used: "
            f"{error.strerror}."
        ) from error
    raise UsageError(
        f"File descriptor {descriptor}, passed by the service manager, is not a listening "
        "Unix stream socket; for TCP, set `listen` in config.toml."
    )


def notify(*states: str) -> None:
    """Send states such as "READY=1" to the service manager. A failure is only logged."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract name of Linux
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto("\n".join(states).encode(), address)
    except OSError as error:
        _manager_log.warning("the service manager could not be told: %s", error)
