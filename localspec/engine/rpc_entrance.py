"""Which processes can reach an RPC worker on the loopback interface, set up before llama.cpp is loaded."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from functools import partial

from localspec import relay

_BACKLOG = 16
_POLL_INTERVAL_S = 0.05


class Entrance:
    """A port of the machine's loopback interface, held by a process that moved to a private network."""

    def __init__(self, listener: socket.socket, tables: relay.SocketTables) -> None:
        self._listener = listener
        self._tables = tables

    def open(self, host: str, port: int) -> None:
        """Forward this user's connections to this process's server, as soon as it listens."""
        connect = partial(socket.create_connection, (host, port))

        def forward() -> None:
            while True:
                with contextlib.suppress(OSError), connect():
                    break
                time.sleep(_POLL_INTERVAL_S)
            relay.forward(self._listener, connect, self._tables, {0, os.getuid()})

        threading.Thread(target=forward, daemon=True).start()


def open_entrance(host: str, port: int) -> Entrance | None:
    """Take the port and move this process to a private network.

    Returns None if the server has to listen by itself: on an address that other machines reach, or, with a
    warning, if this system does not allow the move. Ends the process if the port is taken.
    """
    if not ipaddress.IPv4Address(host).is_loopback:
        return None
    try:
        listener = socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        sys.stderr.write(f"Error: {host}:{port} cannot be served on ({error.strerror}).\n")
        sys.exit(1)
    tables = relay.SocketTables()
    if tables.available and relay.enter_private_network():
        return Entrance(listener, tables)
    listener.close()
    tables.close()
    sys.stderr.write(
        f"DANGER: every user of this machine can reach {host}:{port}, and with it take over this account. "
        "This system does not let localspec close it to them.\n"
    )
    sys.stderr.flush()
    return None
