"""Socket options by which a connection notices that the link to the other machine is cut.

A cut link sends no message, and a busy server may be silent for minutes, so silence alone proves nothing.
Keep-alive probes are answered by the other operating system and not by its server, and sent data has to be
acknowledged. If neither happens for half a minute, the connection ends.
"""

from __future__ import annotations

import socket

# Each operating system has some of these options.
_OPTIONS = {
    "TCP_KEEPIDLE": 10,  # seconds
    "TCP_KEEPALIVE": 10,  # seconds; the name of TCP_KEEPIDLE on macOS
    "TCP_KEEPINTVL": 5,  # seconds
    "TCP_KEEPCNT": 4,  # probes
    "TCP_USER_TIMEOUT": 30_000,  # milliseconds
}


def noticing_cuts() -> list[tuple[int, int, int]]:
    """Return the options for a TCP socket, as arguments of `setsockopt`."""
    numbers = {name: getattr(socket, name, None) for name in _OPTIONS}
    supported = [
        (socket.IPPROTO_TCP, number, _OPTIONS[name]) for name, number in numbers.items() if number
    ]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *supported]
