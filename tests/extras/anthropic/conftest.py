"""One daemon and Anthropic's client for each file of tests about Messages."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.support.daemons import Home, scripted_home
from tests.support.official_clients import KNOWS_TOOLS, anthropic_client


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Run a daemon with the scripted engine and a template that supports tools."""
    with scripted_home("--template", KNOWS_TOOLS) as home:
        yield home


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(home) as client:
        yield client
