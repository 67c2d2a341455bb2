"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import Home, RunningDaemon, temporary_home


@pytest.fixture(scope="module")
def warm() -> Iterator[Home]:
    """One daemon with the scripted engine for all tests of a file that leave nothing behind."""
    with temporary_home() as home:
        home.use_fake()
        daemon = RunningDaemon(home)
        yield home
        daemon.stop()
