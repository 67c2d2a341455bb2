"""Loaded pairs, each created once per run: fixtures for a conftest to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest
from hypothesis import HealthCheck, settings

from localspec.engine import llama
from localspec.engine.llama import model as library
from localspec.engine.sampling import guide
from localspec.protocol.frames import PairFiles
from tests.support.pairs import contextual_pair, cycle_pair
from tests.support.running import Running, running

llama.initialise()
# A round waits for its grammar however busy the machine is, since the drafts depend on it.
guide.ROUND_WAIT_S = 60.0
# Real passes on a busy machine have no deadline, and the example database is off.
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
    """Return the folder of all synthetic models of this run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def cycle_files(models: Path) -> PairFiles:
    """Write a pair whose text is known, with three of four drafts right."""
    return cycle_pair(models / "cycle", 0.75)


@pytest.fixture(scope="session")
def contextual_files(models: Path) -> PairFiles:
    """Write a pair whose text depends on every token before."""
    return contextual_pair(models / "contextual")


@pytest.fixture(scope="session")
def cycle(cycle_files: PairFiles) -> Iterator[Running]:
    """Share one engine between all tests that leave nothing behind but cached prefixes."""
    with running(cycle_files) as engine:
        yield engine


@pytest.fixture(scope="session")
def contextual(contextual_files: PairFiles) -> Iterator[Running]:
    """Share one engine with the pair whose text depends on its context."""
    with running(contextual_files) as engine:
        yield engine


@pytest.fixture
def load() -> Iterator[Callable[..., Running]]:
    """Load pairs with the settings of a test, and close them after it."""
    with ExitStack() as stack:

        def make(files: PairFiles, **settings: Any) -> Running:
            return stack.enter_context(running(files, **settings))

        yield make


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Collect the log lines of llama.cpp, which the engine reads as well."""
    lines: list[str] = []

    @C.llama_log_callback  # type: ignore[untyped-decorator] # the binding has no types
    def note(level: int, text: bytes, _user: object) -> None:
        lines.append(text.decode("utf-8", "replace"))
        library.on_log(level, text, None)

    C.llama_log_set(note, None)
    yield lines
    C.llama_log_set(library.on_log, None)
