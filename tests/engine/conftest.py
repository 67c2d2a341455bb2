"""Loaded pairs for the engine's tests, each made once per run."""

from __future__ import annotations

import os

# Other processes want these cores too: threads that spin at a barrier would starve. Read by the
# OpenMP library when llama_cpp loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from localspec.engine import llama
from localspec.engine.sampling import guide
from localspec.protocol.frames import PairFiles
from tests.support.pairs import contextual_pair, cycle_pair
from tests.support.running import Running, running

llama.initialise()
# A round waits as long as it takes for a grammar, however busy the machine is: what is drafted depends on it.
guide.ROUND_WAIT_S = 60.0
# Real passes on a busy machine have no deadline, and a failure is printed with its example.
settings.register_profile(
    "engine",
    max_examples=50,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("engine")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all synthetic models of this run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def cycle_files(models: Path) -> PairFiles:
    """A pair whose text is known; three of four drafts are right."""
    return cycle_pair(models / "cycle", 0.75)


@pytest.fixture(scope="session")
def contextual_files(models: Path) -> PairFiles:
    """A pair whose text depends on every token before."""
    return contextual_pair(models / "contextual")


@pytest.fixture(scope="session")
def cycle(cycle_files: PairFiles) -> Iterator[Running]:
    """One engine for every test that leaves nothing behind but cached prefixes."""
    with running(cycle_files) as engine:
        yield engine


@pytest.fixture(scope="session")
def contextual(contextual_files: PairFiles) -> Iterator[Running]:
    """As `cycle`, of the pair whose text depends on its context."""
    with running(contextual_files) as engine:
        yield engine


@pytest.fixture
def load() -> Iterator[Callable[..., Running]]:
    """Load a pair with settings of one's own; closed after the test."""
    with ExitStack() as stack:

        def make(files: PairFiles, **settings: Any) -> Running:
            return stack.enter_context(running(files, **settings))

        yield make
