"""Fixtures for everybody: a home of one's own, a running daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.support.daemons import Home, RunningDaemon, scripted_home, temporary_home

# A suite that was started in the background inherits an ignored SIGINT, and every process it starts
# would too: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's affair. Whether a change may land is not to hang on a
# draw: `.ci/run` draws the same examples each time, as Hypothesis advises for CI; other runs draw others.
settings.register_profile("suite", deadline=None, database=None, derandomize="CI" in os.environ)
settings.load_profile("suite")


@pytest.fixture
def home() -> Iterator[Home]:
    """A folder of its own for everything that localspec keeps."""
    with temporary_home() as made:
        yield made


@pytest.fixture
def start_daemon(home: Home) -> Iterator[Callable[..., RunningDaemon]]:
    """Start a daemon with the scripted engine: arguments for the engine, configuration by key."""
    started: list[RunningDaemon] = []

    def start(*engine: str, **config: object) -> RunningDaemon:
        home.use_fake(*engine, **config)
        started.append(RunningDaemon(home))
        return started[-1]

    yield start
    for daemon in started:
        daemon.stop()


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """A daemon with the scripted engine."""
    return start_daemon()


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    """One daemon for all tests of a file that leave nothing behind."""
    with scripted_home() as home:
        yield home


@pytest.fixture(scope="module")
def warm() -> Iterator[Home]:
    """As `api`, for tests of commands."""
    with scripted_home() as home:
        yield home
