"""The pair that the pull tests put on their hub, and assertions on a store after a pull."""

from __future__ import annotations

import pytest

from localspec.errors import ModelNotFound
from localspec.registry.pulls.messages import Job
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.running import Pulls
from localspec.registry.pulls.targets import PullTarget, UnfinishedPulls
from localspec.registry.store import integrity
from localspec.registry.store.store import Store
from tests.support.gguf_files import model

TARGET = model(filler=3 << 20, seed=1).data()
DRAFT = model(layers=1, filler=1 << 20, seed=2).data()
SIZE = len(TARGET) + len(DRAFT)


def create_pulls(puller: Puller, unfinished: UnfinishedPulls | None = None) -> Pulls:
    """Return pulls with the store, hub and tuning of a puller, for pairs that need no catalogue."""

    def make_job(target: PullTarget) -> Job:
        return Job(target=target, store=str(puller.store.root), tuning=puller.tuning)

    unfinished = unfinished or UnfinishedPulls(puller.store.root / "pulls.json")
    return Pulls(make_job, unfinished)


def assert_installed(store: Store, name: str = "p") -> None:
    record = integrity.ensure_ready(store, name)
    assert record.draft is not None
    assert store.model_path(record.target).read_bytes() == TARGET
    assert store.model_path(record.draft).read_bytes() == DRAFT


def assert_absent(store: Store, name: str = "p") -> None:
    with pytest.raises(ModelNotFound):
        store.get(name)
