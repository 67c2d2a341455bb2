"""Fixtures for a hub, a store and a puller, isolated from the machine's own caches and proxies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.retry import RetryPolicy, Tuning
from localspec.registry.pulls.pull import Puller
from localspec.registry.store.store import Store
from tests.registry.pulling import DRAFT, TARGET, Rig
from tests.support.hub import Faults, TestHub

# Small segments and short waits keep the tests quick; large files behave the same.
QUICK = Tuning(
    connections=3,
    segment=256 << 10,
    sync=1 << 20,
    stall_s=1.0,
    retry_policy=RetryPolicy(tries=4, first_pause_s=0.01, longest_pause_s=0.05),
)


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture
def hub() -> Iterator[TestHub]:
    with TestHub().running() as hub:
        yield hub


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def puller(hub: TestHub, store: Store, monkeypatch: pytest.MonkeyPatch) -> Puller:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)  # for pulls that are processes
    return Puller(store, Hub(hub.endpoint, stall=1.0), QUICK)


@pytest.fixture
def pair() -> CataloguePair:
    """Return the pair whose files the tests put on their hub."""
    return CataloguePair(
        summary="a test",
        licence="MIT",
        target=HubFile(repo="own/target", file="target.gguf"),
        draft=HubFile(repo="own/draft", file="draft.gguf"),
    )


@pytest.fixture
def faults(hub: TestHub) -> Faults:
    """Put a matched pair on the hub, and return the faults of its target."""
    hub.add("own/draft", "draft.gguf", DRAFT)
    return hub.add("own/target", "target.gguf", TARGET)


@pytest.fixture
def rig(hub: TestHub, faults: Faults, puller: Puller, pair: CataloguePair) -> Rig:
    return Rig(hub, faults, puller, pair)
