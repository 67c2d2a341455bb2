"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import Home, scripted_home


@pytest.fixture(scope="module")
def warm() -> Iterator[Home]:
    """One daemon for all tests of a file that leave nothing behind."""
    with scripted_home() as home:
        yield home
