"""The daemon's own socket."""

from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from localspec.daemon.http import sockets
from localspec.errors import AlreadyRunning, UnsafePath
from tests.support.daemons import Home, RunningDaemon


def test_the_socket_is_private_for_any_umask(home: Home) -> None:
    before = os.umask(0)
    try:
        with sockets.bind(home.root / "s"):
            assert stat.S_IMODE((home.root / "s").stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_other_files_are_never_removed(home: Home) -> None:
    (home.root / "file").write_text("precious")
    (home.root / "link").symlink_to(home.root / "file")
    for name in ("file", "link"):
        with pytest.raises(UnsafePath, match="not a socket"):
            sockets.bind(home.root / name)
    assert (home.root / "file").read_text() == "precious"


def test_a_socket_in_use_is_not_replaced(home: Home) -> None:
    path = home.root / "s"
    with sockets.bind(path) as first:
        first.listen()
        with pytest.raises(AlreadyRunning):
            sockets.bind(path)


BUSY_AT_FIRST = """
import os, sys, time
import uvicorn
start = uvicorn.Server.startup

async def slowly(self, sockets=None):
    await start(self, sockets)
    while os.path.exists(os.environ["LOCALSPEC_HOME"] + "/busy"):
        time.sleep(0.01)

uvicorn.Server.startup = slowly
from localspec.daemon.__main__ import main
sys.exit(main())
"""


def test_clients_wait_while_the_daemon_starts(home: Home) -> None:
    """The kernel queues connections from the first moment on."""
    home.use_fake()
    busy = home.root / "busy"
    busy.touch()
    RunningDaemon(home, program=BUSY_AT_FIRST)
    with ThreadPoolExecutor(100) as pool:
        futures = [pool.submit(home.request, "GET", "/health") for _ in range(100)]
        time.sleep(0.5)
        busy.unlink()
        assert {future.result().status for future in futures} == {200}
