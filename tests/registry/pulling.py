"""The pair that the pull tests put on their hub, and what pulls it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from localspec.errors import ModelNotFound
from localspec.registry.catalogue import CataloguePair
from localspec.registry.pulls.messages import Job
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.running import Pulls
from localspec.registry.pulls.targets import PullTarget, UnfinishedPulls
from localspec.registry.store import integrity
from localspec.registry.store.store import Record, Store
from tests.support.gguf_files import model
from tests.support.hub import Faults, TestHub

TARGET = model(filler=3 << 20, seed=1).data()
DRAFT = model(layers=1, filler=1 << 20, seed=2).data()
SIZE = len(TARGET) + len(DRAFT)


@dataclass
class Rig:
    """A hub with a matched pair, the faults of its target, and a puller with its store."""

    hub: TestHub
    faults: Faults
    puller: Puller
    pair: CataloguePair

    @property
    def store(self) -> Store:
        return self.puller.store

    def pull(self) -> Record:
        return self.puller.pull("p", self.pair)

    def assert_installed(self, name: str = "p") -> None:
        record = integrity.ensure_ready(self.store, name)
        assert record.draft is not None
        assert self.store.model_path(record.target).read_bytes() == TARGET
        assert self.store.model_path(record.draft).read_bytes() == DRAFT

    def assert_absent(self, name: str = "p") -> None:
        with pytest.raises(ModelNotFound):
            self.store.get(name)


def create_pulls(puller: Puller, unfinished: UnfinishedPulls | None = None) -> Pulls:
    """Return pulls with the store, hub and tuning of a puller, for pairs that need no catalogue."""

    def make_job(target: PullTarget) -> Job:
        return Job(target=target, store=str(puller.store.root), tuning=puller.tuning)

    unfinished = unfinished or UnfinishedPulls(puller.store.root / "pulls.json")
    pulls = Pulls(make_job, unfinished)
    pulls.resume()
    return pulls


def flip_byte(path: Path) -> None:
    """Damage a file without changing its size."""
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
