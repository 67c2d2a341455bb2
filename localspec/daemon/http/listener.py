"""The daemon's Unix socket: 0600 in a 0700 directory."""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path

from localspec.daemon.http import probe
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
