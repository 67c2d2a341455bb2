"""The daemon's own socket."""

from __future__ import annotations

import os
import stat

import pytest

from localspec.daemon.http import sockets
from localspec.errors import AlreadyRunning, UnsafePath
from tests.support.daemons import Home


def test_the_socket_is_0600_whatever_the_umask_and_the_umask_stays(home: Home) -> None:
    before = os.umask(0)
    try:
        with sockets.bind(home.root / "s"):
            assert stat.S_IMODE((home.root / "s").stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_what_is_no_socket_is_never_removed(home: Home) -> None:
    (home.root / "file").write_text("precious")
    (home.root / "link").symlink_to(home.root / "file")
    for name in ("file", "link"):
        with pytest.raises(UnsafePath, match="not a socket"):
            sockets.bind(home.root / name)
    assert (home.root / "file").read_text() == "precious"


def test_a_socket_that_somebody_answers_on_is_not_taken(home: Home) -> None:
    path = home.root / "s"
    with sockets.bind(path) as first:
        first.listen()
        with pytest.raises(AlreadyRunning):
            sockets.bind(path)
