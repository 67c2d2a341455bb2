"""What a service manager hands over and wants to be told (sd_listen_fds(3), sd_notify(3)).

Both are a few variables of the environment; without them everything here does nothing.
"""

from __future__ import annotations

import logging
import os
import socket

from localspec.errors import UsageError

log = logging.getLogger("localspec.systemd")

_FIRST = 3  # the number of the first descriptor that is handed over


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
        raise UsageError(f"Descriptor {number} was handed over: {error.strerror}.") from error
    raise UsageError(
        f"Descriptor {number} was handed over and is no listening Unix stream socket; "
        "for TCP set `listen` in config.toml."
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
        log.warning("the service manager could not be told: %s", error)
