"""Starting the daemon for a client that found none, and replacing one of another version.

Imported only then: `ask` with a warm daemon never comes here.
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

# Start-up takes 0.4 s; the rest is for a machine that is busy compiling.
START_SECONDS = 30.0
STOP_SECONDS = 30.0
_POLL = 0.01


def start(socket_path: str, arguments: Sequence[str] = ()) -> bool:
    """Start the daemon and return when it listens. Of many clients at once, one starts it.

    `arguments` are its own; False when one was running already, which got none of them.

    Raises:
        NoDaemon: it ended or did not listen in time, with the reason it gave.
        UnsafePath: its folder is not ours alone.
    """
    locations = paths.default_paths()
    paths.private_directory(locations.runtime)
    deadline = time.monotonic() + START_SECONDS
    with _one_starter(locations.runtime / "start.lock", deadline):
        if listens(socket_path):
            return False
        _spawn(socket_path, locations, deadline, arguments)
    return True


def replace(socket_path: str, *, allowed: bool) -> None:
    """End an idle daemon of another version and start ours, where that is `allowed`.

    Raises:
        VersionMismatch: it is working for somebody, or not allowed; nothing was done.
    """
    found = _bare(socket_path, "GET", "/localspec/status")
    theirs, ours = found.get("version"), localspec.__version__
    busy = any(found.get(key) for key in ("running", "waiting", "pulls"))
    if busy or not allowed:
        raise errors.VersionMismatch(
            f"The running daemon is localspec {theirs}, but this is {ours}; it is busy or "
            "cannot be restarted from here. Once it is idle: localspec stop && localspec "
            "start"
        )
    with until_gone():
        _bare(socket_path, "POST", "/localspec/shutdown")
    start(socket_path)


def end_unresponsive() -> bool:
    """End the daemon that holds the lock although it does not answer; False when none does."""
    lock = paths.default_paths().lock
    try:
        handle = paths.open_file(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if _lockable(handle):
                return number is signal.SIGKILL
            # The lock is held, so the pid in it is its holder's and no other process's.
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(paths.read_file(lock)), number)
            deadline = time.monotonic() + STOP_SECONDS
            while not _lockable(handle) and time.monotonic() < deadline:
                time.sleep(_POLL)
        return _lockable(handle)
    finally:
        os.close(handle)


def held(lock: Path) -> bool:
    """Whether a daemon still has the lock: it lets the socket go a moment earlier."""
    try:
        handle = paths.open_file(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _lockable(handle)
    finally:
        os.close(handle)


def _lockable(handle: int) -> bool:
    """Whether nobody holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(handle, fcntl.LOCK_UN)
    return True


@contextlib.contextmanager
def until_gone() -> Iterator[None]:
    """A daemon is told to end inside; afterwards it does not hold the lock, which goes last.

    Whether somebody listens proves nothing: that may be systemd, which would start another daemon. And
    whether somebody holds the lock proves as little: that may be another daemon already.

    Raises:
        Unavailable: it holds it after STOP_SECONDS.
    """
    lock = paths.default_paths().lock
    holder = _holder(lock)
    yield
    deadline = time.monotonic() + STOP_SECONDS
    while held(lock) and _holder(lock) == holder:
        if time.monotonic() > deadline:
            raise errors.Unavailable(f"The daemon did not stop within {STOP_SECONDS:.0f} seconds.")
        time.sleep(_POLL)


def _holder(lock: Path) -> bytes:
    """What the last daemon that got the lock has written into it: its pid, or nothing."""
    with contextlib.suppress(OSError):
        return paths.read_file(lock)
    return b""


def listens(socket_path: str) -> bool:
    """Whether a daemon accepts connections on the socket."""
    try:
        transport.Connection(socket_path, timeout=5.0).close()
    except errors.NoDaemon:
        return False
    return True


def _bare(socket_path: str, method: str, target: str) -> dict[str, object]:
    """A request without the version header: these two endpoints answer every version."""
    import json

    connection = transport.Connection(socket_path, timeout=10.0)
    try:
        value = json.loads(connection.request(method, target).read())
    except ValueError as error:
        raise errors.BadResponse("The daemon's answer is not valid JSON.") from error
    finally:
        connection.close()
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _one_starter(lock: Path, deadline: float) -> Iterator[None]:
    """Hold the starters' lock; the daemon's own lock still decides who may run."""
    try:
        handle = paths.open_file(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        raise errors.UnsafePath(
            f"The lock file {lock} cannot be opened ({error.strerror}); remove it."
        ) from error
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise errors.NoDaemon(
                        f"Another client has been starting the daemon for {START_SECONDS:.0f} s."
                    ) from None
                time.sleep(_POLL)
        yield
    finally:
        os.close(handle)


def _spawn(
    socket_path: str, locations: paths.Paths, deadline: float, arguments: Sequence[str]
) -> None:
    """Start a detached daemon and wait for its socket."""
    home = os.environ.get("LOCALSPEC_HOME")
    environment = {**os.environ, "LOCALSPEC_HOME": str(Path(home).absolute())} if home else None
    # A pipe: no disk that may be full, and after the start nobody reads what the daemon says there.
    said, theirs = os.pipe()
    os.set_blocking(said, False)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "localspec.daemon", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,  # a Ctrl-C in this terminal is not for the daemon
        cwd="/",  # no file system kept busy
        env=environment,
    )
    os.close(theirs)
    try:
        _wait(process, socket_path, locations, deadline, said)
    finally:
        os.close(said)


def _wait(
    process: subprocess.Popen[bytes],
    socket_path: str,
    locations: paths.Paths,
    deadline: float,
    said: int,
) -> None:
    """Until the daemon listens.

    Raises:
        NoDaemon: it ended, or does not listen in time.
    """
    while not listens(socket_path):
        if process.poll() is not None:
            if listens(socket_path):
                return  # another daemon held the lock and is ready now
            raise errors.NoDaemon(f"The daemon did not start: {_reason(said)}")
        if time.monotonic() > deadline:
            raise errors.NoDaemon(
                f"The daemon did not start listening within {START_SECONDS:.0f} s; see its log: "
                f"{locations.log}"
            )
        time.sleep(_POLL)
    process.returncode = 0  # detached on purpose: no ResourceWarning when `process` is collected


def _reason(said: int) -> str:
    """The last line the daemon wrote before it ended."""
    written = b""
    with contextlib.suppress(BlockingIOError):  # somebody has its end of the pipe still
        while data := os.read(said, 65536):
            written += data
    lines = written.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("localspec: ") if lines else "it gave no reason."
