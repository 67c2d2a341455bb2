"""What a connection to another machine is told, so that a link that was cut without a word ends it.

Nothing says that it was, and whoever is at the other end may be minutes in answering. So the other system is
asked whether it is there, which a busy server knows nothing of, and has to confirm what it was sent: half a
minute of neither ends the connection.
"""

from __future__ import annotations

import socket

# Each system has some of these names.
_TOLD = {
    "TCP_KEEPIDLE": 10,  # seconds
    "TCP_KEEPALIVE": 10,  # as macOS calls that
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 30_000,  # milliseconds
}


def noticing_cuts() -> list[tuple[int, int, int]]:
    """Options of a TCP socket, as `setsockopt` takes them."""
    here = {name: getattr(socket, name, None) for name in _TOLD}
    told = [(socket.IPPROTO_TCP, option, _TOLD[name]) for name, option in here.items() if option]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *told]
