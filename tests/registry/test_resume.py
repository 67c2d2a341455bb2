"""A pull that is killed with SIGKILL many times loses next to nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localspec.registry.hub import transfer as journal_module
from localspec.registry.hub.transfer import Journal, count_written_bytes, read_written_prefix
from localspec.registry.store import integrity
from localspec.registry.store.store import Store
from tests.registry.pulling import Rig
from tests.support.gguf_files import model, sha256
from tests.support.hub import TestHub

PROGRAM = """
import sys
from pathlib import Path
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.retry import Tuning
from localspec.registry.pulls.pull import Puller
from localspec.registry.store.store import Store
pair = CataloguePair(
    summary="a test",
    target=HubFile(repo="own/target", file="target.gguf"),
    draft=HubFile(repo="own/draft", file="draft.gguf"),
)
tuning = Tuning(segment=2 << 20, sync=4 << 20)  # as many segments as a large file has
puller = Puller(Store(Path(sys.argv[1])), Hub(), tuning=tuning)
puller.pull("p", pair)
"""


def start_pull(store: Store, hub: TestHub, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process that pulls as users do, with HF_ENDPOINT set."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(store.root)],
        env=os.environ | {"HF_ENDPOINT": hub.endpoint, "NO_PROXY": "*"} | environment,
    )


def pull_through_kills(
    store: Store, hub: TestHub, megabytes: tuple[int, int], kills: int
) -> tuple[int, int]:
    """Pull, killed `kills` times at random points, and return the bytes sent and the size of the files."""
    target = model(layers=4, filler=megabytes[0] * 1_000_000, seed=1).data()
    draft = model(filler=megabytes[1] * 1_000_000, seed=2).data()
    hub.add("own/target", "target.gguf", target)
    hub.add("own/draft", "draft.gguf", draft)
    size = len(target) + len(draft)
    rng = random.Random(5)
    points = sorted(rng.uniform(0.02, 0.95) * size for _ in range(kills))
    for point in points:
        process = start_pull(store, hub)
        while hub.sent < point and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was still running"
        assert not store.listing().records, "not visible before it is complete"
    assert start_pull(store, hub).wait() == 0
    record = integrity.ensure_ready(store, "p")
    assert record.draft is not None
    for stored, data in ((record.target, target), (record.draft, draft)):
        assert sha256(store.model_path(stored).read_bytes()) == sha256(data)
    assert any(not request.range.startswith("bytes=0-") for request in hub.gets())
    return hub.sent, size


def test_five_kills_cost_next_to_nothing(rig: Rig) -> None:
    """Each kill loses bytes that were sent and not yet read, which are more on a busy machine."""
    rig.hub.rate = 15e6
    fetched, size = pull_through_kills(rig.store, rig.hub, (24, 6), kills=5)
    assert fetched < size + 5 * 1_000_000


def test_a_proxy_is_used(rig: Rig) -> None:
    """The endpoint's name cannot be resolved: only a proxy reaches it."""
    rig.hub.add("own/target", "target.gguf", model(layers=2, seed=1).data())
    rig.hub.add("own/draft", "draft.gguf", model(layers=1, seed=2).data())
    process = start_pull(
        rig.store,
        rig.hub,
        HF_ENDPOINT="http://hub.invalid",
        HTTP_PROXY=rig.hub.endpoint,
        NO_PROXY="",
    )
    assert process.wait() == 0
    assert {request.host for request in rig.hub.requests if not request.to_storage} == {
        "hub.invalid"
    }
    assert integrity.ensure_ready(rig.store, "p").draft is not None


# The journal of a part.


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "x.part"


def test_a_journal_remembers(part: Path) -> None:
    journal = Journal(part, 1000, 300)
    assert journal.segments == 4
    assert journal.span(3) == (900, 1000)
    journal.write(1, b"abc")
    journal.write(3, b"d" * 100)
    journal.close()
    assert count_written_bytes(part, 1000) == 103
    assert read_written_prefix(part, 1000) == b""
    reopened = Journal(part, 1000, 500)
    assert reopened.segment == 300, "a journal keeps its first segment size"
    assert [reopened.done(index) for index in range(4)] == [0, 3, 0, 100]
    reopened.fill(0, b"z" * 302)
    assert [reopened.done(index) for index in range(4)] == [300, 3, 0, 100]
    reopened.close()
    assert read_written_prefix(part, 1000) == b"z" * 300
    assert part.read_bytes()[298:304] == b"zzabc\0"


def test_after_a_power_cut_only_what_is_on_the_disk_counts(
    part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(part, 1000, 300)
    journal.write(0, b"a" * 100)
    journal.sync(threshold=1)
    journal.write(0, b"b" * 50)
    journal.sync(threshold=1000)
    journal.close()
    assert count_written_bytes(part, 1000) == 150
    monkeypatch.setattr(journal_module, "boot_id", lambda: b"another run of the machine")
    assert count_written_bytes(part, 1000) == 100
    reopened = Journal(part, 1000, 300)
    assert reopened.done(0) == 100
    reopened.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"LSPART01", b"x" * 200,
        journal_module._HEAD.pack(b"LSPART01", 1000, 300, b"") + b"\xff" * 64,
        journal_module._HEAD.pack(b"LSPART01", 999, 300, b"") + bytes(64),
        journal_module._HEAD.pack(b"LSPART01", 1000, 0, b"") + bytes(64),
    ],
)  # fmt: skip
def test_a_broken_journal_starts_again(part: Path, damage: bytes) -> None:
    journal = Journal(part, 1000, 300)
    journal.write(0, b"a" * 100)
    journal.close()
    part.with_suffix(".journal").write_bytes(damage)
    assert count_written_bytes(part, 1000) == 0
    reopened = Journal(part, 1000, 300)
    assert reopened.total == 0
    reopened.close()
