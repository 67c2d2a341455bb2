"""Start the daemon for a client that found none, and replace a daemon of another version.

This module is imported only in those cases: `ask` with a running daemon never needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import localspec
from localspec import errors, paths
from localspec.client import transport

# Start-up takes 0.4 s; the remaining time is for a machine that is busy compiling.
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.01


def start(socket_path: str, arguments: Sequence[str] = ()) -> bool:
    """Start the daemon and return when it listens. If several clients call this, one of them starts it.

    `arguments` go to the daemon. Return False if a daemon was running already: it got none of them. Raises
    NoDaemon if the daemon ended (the message gives its reason) or did not listen in time, and UnsafePath if
    the runtime folder is not private to this user.
    """
    locations = paths.default_paths()
    paths.make_private_directory(locations.runtime)
    deadline = time.monotonic() + START_TIMEOUT_S
    with _start_lock(locations.runtime / "start.lock", deadline):
        if listens(socket_path):
            return False
        _spawn(socket_path, locations, deadline, arguments)
    return True


def replace(socket_path: str, *, allowed: bool) -> None:
    """End an idle daemon of another version and start one of ours, if that is `allowed`.

    Raises:
        VersionMismatch: The daemon is busy, or replacing it is not allowed. Nothing was done.
    """
    status = _request_any_version(socket_path, "GET", "/localspec/status")
    daemon_version, client_version = status.get("version"), localspec.__version__
    busy = any(status.get(key) for key in ("running", "waiting", "pulls"))
    if busy or not allowed:
        raise errors.VersionMismatch(
            f"The running daemon is localspec {daemon_version}, but this is {client_version}; it is busy or "
            "cannot be restarted from here. Once it is idle: localspec stop && localspec "
            "start"
        )
    with until_gone():
        _request_any_version(socket_path, "POST", "/localspec/shutdown")
    start(socket_path)


def end_unresponsive() -> str:
    """End the daemon that holds the lock but accepts no clients: one that is ending already, or hangs.

    Return what became of it, as a predicate, and "" if there is none.
    """
    lock = paths.default_paths().lock
    with _opened(lock) as descriptor:
        if descriptor is None:
            return ""
        for signal_number, ended in ((signal.SIGTERM, ""), (signal.SIGKILL, "has stopped")):
            if _is_free(descriptor):
                return ended
            # The lock is held, so the pid in it is its holder's and no other process's.
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(paths.read_file(lock)), signal_number)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while not _is_free(descriptor) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
        return "did not respond and was killed" if _is_free(descriptor) else ""


def is_lock_held(lock: Path) -> bool:
    """Return whether a daemon still holds the lock: it removes its socket a moment earlier."""
    with _opened(lock) as descriptor:
        return descriptor is not None and not _is_free(descriptor)


@contextlib.contextmanager
def _opened(lock: Path) -> Iterator[int | None]:
    try:
        descriptor = paths.open_file(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


@contextlib.contextmanager
def until_gone() -> Iterator[None]:
    """Wait after the block, which asks the daemon to end, until that daemon has released its lock.

    A daemon releases the lock last. A listening socket proves nothing: it may be systemd's, which would start
    another daemon. A held lock proves as little: another daemon may hold it already. So the wait ends when
    the process that held the lock at first does not hold it any more. Raises Unavailable if the daemon holds
    the lock after STOP_TIMEOUT_S.
    """
    from localspec.client import api

    lock = paths.default_paths().lock
    old_holder = _read_holder(lock)
    yield
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while is_lock_held(lock) and _read_holder(lock) == old_holder:
        if time.monotonic() > deadline:
            message = f"The daemon did not stop within {STOP_TIMEOUT_S:.0f} seconds."
            raise errors.Unavailable(message)
        time.sleep(POLL_INTERVAL_S)
    api.Client.daemon_version = None


def _read_holder(lock: Path) -> bytes:
    """Return what the last daemon that got the lock wrote into it: its pid, or nothing."""
    with contextlib.suppress(OSError):
        return paths.read_file(lock)
    return b""


def listens(socket_path: str) -> bool:
    """Return whether a daemon accepts connections on the socket."""
    try:
        transport.Connection(socket_path, timeout=5.0).close()
    except errors.NoDaemon:
        return False
    return True


def _request_any_version(socket_path: str, method: str, target: str) -> dict[str, object]:
    """Send a request without the version header. These two endpoints answer clients of every version."""
    import json

    connection = transport.Connection(socket_path, timeout=10.0)
    try:
        decoded = json.loads(connection.request(method, target).read())
    except ValueError as error:
        raise errors.BadResponse("The daemon's answer is not valid JSON.") from error
    finally:
        connection.close()
    return decoded if isinstance(decoded, dict) else {}


@contextlib.contextmanager
def _start_lock(lock: Path, deadline: float) -> Iterator[None]:
    """Hold the lock that lets one client start the daemon. The daemon's own lock decides which one runs."""
    try:
        descriptor = paths.open_file(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        reason = f"cannot be opened ({error.strerror}); remove it."
        raise errors.UnsafePath(f"The lock file {lock} {reason}") from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise errors.NoDaemon(
                        f"Another client has been starting the daemon for {START_TIMEOUT_S:.0f} s."
                    ) from None
                time.sleep(POLL_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)


def _spawn(
    socket_path: str, locations: paths.Paths, deadline: float, arguments: Sequence[str]
) -> None:
    """Start a detached daemon and wait until it listens.

    Raises NoDaemon if the daemon ended, or did not listen in time.
    """
    home = os.environ.get("LOCALSPEC_HOME")
    environment = {**os.environ, "LOCALSPEC_HOME": str(Path(home).absolute())} if home else None
    # A pipe instead of a file, because the disk may be full. It is read only if the start fails.
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "localspec.daemon", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=write_end,
        start_new_session=True,  # a Ctrl-C in this terminal must not end the daemon
        cwd="/",  # the daemon must not keep a file system mounted
        env=environment,
    )
    os.close(write_end)
    try:
        while not listens(socket_path):
            if process.poll() is not None:
                if listens(socket_path):
                    return  # another daemon held the lock and is ready now
                raise errors.NoDaemon(f"The daemon did not start: {_read_last_line(read_end)}")
            if time.monotonic() > deadline:
                raise errors.NoDaemon(
                    f"The daemon did not start listening within {START_TIMEOUT_S:.0f} s; see its log: "
                    f"{locations.log}"
                )
            time.sleep(POLL_INTERVAL_S)
    finally:
        os.close(read_end)
    # The daemon outlives this client. A return code avoids a ResourceWarning when `process` is collected.
    process.returncode = 0


def _read_last_line(read_end: int) -> str:
    output = b""
    with contextlib.suppress(BlockingIOError):  # a child of the daemon may hold the pipe open
        while data := os.read(read_end, 65536):
            output += data
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("localspec: ") if lines else "it gave no reason."
