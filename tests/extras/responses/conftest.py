"""One daemon and OpenAI's client for each file of tests about Responses."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.daemons import Home, scripted_home
from tests.support.official_clients import KNOWS_TOOLS, openai_client


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Run a daemon with the scripted engine and a template that supports tools."""
    with scripted_home("--template", KNOWS_TOOLS) as home:
        yield home


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[openai.OpenAI]:
    with openai_client(home) as client:
        yield client
