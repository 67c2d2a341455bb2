"""Unix sockets: listening on the daemon's own, whether somebody answers, what a service manager hands over.

The manager's side are a few variables of the environment (sd_listen_fds(3), sd_notify(3)); without
them that part does nothing. Imports little: whoever loses the race for the lock needs it too.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path

from localspec.errors import AlreadyRunning, UnsafePath, UsageError
from localspec.paths import check_socket_path

log = logging.getLogger("localspec.listener")
_manager_log = logging.getLogger("localspec.systemd")

_PATIENCE = 5.0  # seconds; a full backlog is not a dead daemon
_FIRST = 3  # the number of the first descriptor that is handed over


def bind(path: Path) -> socket.socket:
    """Listen on `path`, 0600 in a 0700 directory; a socket nobody answers on is replaced.

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
    if answers(path):
        raise AlreadyRunning(f"Another program is listening on {path}.")
    log.info("replacing the stale socket %s", path)
    path.unlink(missing_ok=True)


def answers(path: Path) -> bool:
    """Whether a connection to `path` is taken, or at least not refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PATIENCE)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return False
        except OSError:
            return True
    return True


def handed_over() -> bool:
    """Whether sockets were handed to this process; it then owns none of their paths."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def listening_sockets() -> list[socket.socket]:
    """The sockets handed over, once: children do not inherit them, or the news of them.

    Raises:
        UsageError: one of them is no listening Unix stream socket.
    """
    ours = handed_over()
    count = os.environ.pop("LISTEN_FDS", "0")
    os.environ.pop("LISTEN_PID", None)
    os.environ.pop("LISTEN_FDNAMES", None)
    if not ours or not count.isdigit():
        return []
    return [_taken(number) for number in range(_FIRST, _FIRST + int(count))]


def _taken(number: int) -> socket.socket:
    try:
        handed = socket.socket(fileno=number)
        os.set_inheritable(number, False)
        if (
            handed.family == socket.AF_UNIX
            and handed.type == socket.SOCK_STREAM
            and handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            return handed
    except OSError as error:
        raise UsageError(
            f"File descriptor {number}, passed by the service manager, cannot be used: "
            f"{error.strerror}."
        ) from error
    raise UsageError(
        f"File descriptor {number}, passed by the service manager, is not a listening "
        "Unix stream socket; for TCP, set `listen` in config.toml."
    )


def notify(*states: str) -> None:
    """Tell the service manager, for example "READY=1"; a failure is logged and no more."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # Linux's abstract names
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto("\n".join(states).encode(), address)
    except OSError as error:
        _manager_log.warning("the service manager could not be told: %s", error)
