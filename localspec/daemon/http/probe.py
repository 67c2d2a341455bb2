"""Whether somebody answers on a socket."""

from __future__ import annotations

import socket
from pathlib import Path

_PATIENCE = 5.0  # seconds; a full backlog is not a dead daemon


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
