"""Fixtures for all tests: a home of its own, and a running daemon."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.daemons import Home, RunningDaemon, real_home, scripted_home, temporary_home
from tests.support.exploration import EXPLORES, FACTOR

# A suite that was started in the background inherits an ignored SIGINT, and so would every process that it
# starts: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# numpy's threads spin while they wait for each other. With as many test processes as cores, a training took
# fifty times as long. Test modules import numpy after this file.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# llama.cpp's threads spin as well. Its OpenMP library reads this when it is loaded, here and in each engine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without compiled files, each of some thousand processes would compile half of the package when it starts.
# That is half of the suite's time, and seconds for a daemon on a busy machine.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The time of an example depends on the machine. Whether the suite passes must not depend on chance, so it
# draws the same examples in each run; `scripts/test explore` draws others.
settings.register_profile("suite", deadline=None, database=None, derandomize=not EXPLORES)
settings.load_profile("suite")


# The fast tier, `scripts/test quick`: all that computes in the test's own process, as its module's imports
# show, and three modules with a scripted engine, a real one and hostile texts.
PROBES = {
    "tests.daemon.test_forms",
    "tests.daemon.test_real_engine",
    "tests.engine.test_containment",
}
# What a module takes from these starts processes or loads a model.
STARTING = {
    f"tests.support.{name}"
    for name in (
        *("callers", "daemons", "editors", "engines", "followers", "many", "programs", "proxies"),
        *("rpc", "running", "shells", "terminal", "two_hosts", "upstreams", "users"),
    )
}


def is_quick(item: pytest.Item) -> bool:
    """Return whether a test belongs to the fast tier."""
    module = item.module  # type: ignore[attr-defined]
    if module.__name__ in PROBES:
        return True
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    places = {fixture.func.__module__ for each in fixtures for fixture in each} - {__name__}
    # A conftest further down starts what a module need not name.
    values = dict(vars(module))
    for place in places:
        values |= vars(sys.modules[place]) if place.endswith("conftest") else {}
    starts = STARTING & {getattr(value, "__module__", "") for value in values.values()}
    return not (starts or "subprocess" in vars(module) or item.get_closest_marker("slow"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the fast tier, and have each property draw `FACTOR` times as many examples as it says."""
    if "LOCALSPEC_TEST_QUICK" in os.environ:
        selected: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            selected[is_quick(item)].append(item)
        config.hook.pytest_deselected(items=selected[False])
        items[:] = selected[True]
    for item in items if EXPLORES else []:
        if item.get_closest_marker("hypothesis"):
            function = item.obj  # type: ignore[attr-defined]
            usual = function._hypothesis_internal_use_settings
            more = settings(usual, max_examples=FACTOR * usual.max_examples)
            function._hypothesis_internal_use_settings = more


def pytest_collection_finish() -> None:
    """Exempt what was collected from garbage collection: a search takes half a second with it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def released_memory() -> Iterator[None]:
    """Give memory back to the system after each module.

    glibc keeps what models and contexts have freed: 400 MB after one module, and 2.9 GB after a suite.
    """
    yield
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture
def home() -> Iterator[Home]:
    """Yield a folder of its own for everything that localspec stores."""
    with temporary_home() as temporary:
        yield temporary


@pytest.fixture
def daemon(home: Home) -> RunningDaemon:
    """Run a daemon with the scripted engine."""
    return home.start()


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


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    """As `api`, with the real engine and the pair that comes with it."""
    with real_home() as home:
        yield home
