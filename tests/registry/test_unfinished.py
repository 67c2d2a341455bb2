"""Unfinished pulls survive the daemon, and no secret is stored with them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from localspec.errors import NotFound
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.hub.repository import Reference
from localspec.registry.pulls import running
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.running import Pulls
from localspec.registry.pulls.targets import PullTarget, UnfinishedPulls
from tests.registry.pulling import SIZE, Rig, create_pulls
from tests.support.daemons import wait_for
from tests.support.hub import TestHub
from tests.support.patience import PATIENCE

PAIR = CataloguePair(summary="s", target=HubFile(repo="a/b", file="c.gguf"))


def make_target(name: str, **options: object) -> PullTarget:
    return PullTarget(name=name, target=Reference(repo="a/b"), **options)  # type: ignore[arg-type]


def test_stored_targets_are_read_back_and_dropped_ones_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pulls.json"
    unfinished = UnfinishedPulls(path)
    assert unfinished.all() == ()
    assert not unfinished.drop("x")
    unfinished.keep(make_target("x"))
    unfinished.keep(
        make_target("y", pair=PAIR, decided=True, asked="a/b", files=("aa", "bb"), limit_rate=7)
    )
    unfinished.keep(make_target("x", files=("cc",)))
    restored = UnfinishedPulls(path)
    assert [target.name for target in restored.all()] == ["y", "x"]
    assert restored.all()[0].pair == PAIR
    assert restored.files() == {"aa", "bb", "cc"}
    assert restored.drop("y")
    assert restored.drop("x")
    assert not path.exists()
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("damage", [b"", b"{", b'{"pulls": 3}', b'{"version": 9, "pulls": []}'])
def test_a_broken_file_counts_as_empty_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "pulls.json"
    path.write_bytes(damage)
    unfinished = UnfinishedPulls(path)
    assert (unfinished.all(), unfinished.files()) == ((), frozenset())
    unfinished.keep(make_target("x"))
    assert [target.name for target in unfinished.all()] == ["x"]


@pytest.mark.parametrize(
    ("endpoint", "stored_endpoint"),
    [
        ("", ""),
        ("https://hub.example/path", "https://hub.example/path"),
        ("https://me:canary@hub.example:8080/p?key=canary#canary", "https://hub.example:8080/p"),
    ],
)
def test_an_endpoint_is_stored_without_its_secrets(
    tmp_path: Path, endpoint: str, stored_endpoint: str
) -> None:
    unfinished = UnfinishedPulls(tmp_path / "pulls.json")
    unfinished.keep(make_target("x", endpoint=endpoint))
    assert unfinished.all()[0].endpoint == stored_endpoint
    assert b"canary" not in (tmp_path / "pulls.json").read_bytes()


def test_an_unwritable_folder_does_not_stop_a_pull(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    unfinished = UnfinishedPulls(tmp_path / "state" / "pulls.json")
    unfinished.keep(make_target("x"))
    assert unfinished.all() == ()


def test_no_target_of_concurrent_pulls_is_lost(tmp_path: Path) -> None:
    unfinished = UnfinishedPulls(tmp_path / "pulls.json")
    threads = [
        threading.Thread(target=unfinished.keep, args=(make_target(f"p{number}"),))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {target.name for target in unfinished.all()} == {f"p{number}" for number in range(16)}


def start_slow_pull(pulls: Pulls, hub: TestHub, pair: CataloguePair) -> None:
    hub.rate = 1.5e6
    pulls.start(PullTarget(name="p", pair=pair))
    wait_for(lambda: pulls.get("p").state.done > 200_000, "some bytes")


def test_closing_twice_interrupts_pulls_that_resume_later(rig: Rig, tmp_path: Path) -> None:
    unfinished = UnfinishedPulls(tmp_path / "pulls.json")
    pulls = create_pulls(rig.puller, unfinished)
    start_slow_pull(pulls, rig.hub, rig.pair)
    assert unfinished.files()
    pulls.close(timeout=0)
    pulls.close()
    state = pulls.get("p").state
    assert (state.state, state.code) == ("interrupted", "pull_cancelled")
    assert "resumes when the daemon starts again" in state.message
    rig.hub.rate = 0
    restored = create_pulls(rig.puller, UnfinishedPulls(tmp_path / "pulls.json"))
    assert restored.get("p").wait(PATIENCE)
    assert restored.get("p").state.state == "done"
    assert rig.hub.sent < 1.25 * SIZE
    assert unfinished.all() == ()


def test_a_cancelled_pull_does_not_resume(rig: Rig, tmp_path: Path) -> None:
    unfinished = UnfinishedPulls(tmp_path / "pulls.json")
    pulls = create_pulls(rig.puller, unfinished)
    start_slow_pull(pulls, rig.hub, rig.pair)
    pulls.get("p").cancel()
    pulls.close()
    assert pulls.get("p").state.state == "cancelled"
    assert unfinished.all() == ()


def test_a_temporary_failure_keeps_its_target(rig: Rig, tmp_path: Path) -> None:
    """A permanent failure is reported and forgotten."""
    unfinished = UnfinishedPulls(tmp_path / "pulls.json")
    pulls = create_pulls(rig.puller, unfinished)
    start_slow_pull(pulls, rig.hub, rig.pair)
    for entry in rig.hub.files.values():
        entry.faults.statuses = [(503, "0.01")] * 200
        entry.faults.close_after = [0] * 50
    assert pulls.get("p").wait(PATIENCE)
    assert pulls.get("p").state.code == "hub_unreachable"
    target = pulls.find_target("p")
    assert target
    assert target.pair == rig.pair
    for entry in rig.hub.files.values():
        entry.faults.statuses, entry.faults.close_after, entry.faults.portal = [], [], False
    rig.hub.rate = 0
    rig.hub.replace("own/target", "target.gguf", b"nothing")
    pull = pulls.start(target)
    assert pull.wait(PATIENCE)
    assert (pull.state.state, pull.state.code) == ("failed", "bad_gguf")
    assert pulls.find_target("p") is None


def test_only_the_latest_finished_pulls_are_remembered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_MAX_LISTED_PULLS", 3)
    pulls = create_pulls(rig.puller)
    start_slow_pull(pulls, rig.hub, rig.pair)  # a running pull is never forgotten
    rig.hub.rate = 100.0  # slow enough to outlast all others
    for number in range(4):  # the hub has no such repository
        pulls.start(make_target(f"gone{number}", pair=PAIR)).wait(PATIENCE)
    names = [state.name for state in pulls.states()]
    assert names == ["p", "gone2", "gone3"]
    assert pulls.get("gone3").state.state == "failed"
    with pytest.raises(NotFound, match="no pull of 'gone0'"):
        pulls.get("gone0")
    pulls.close()


def test_a_pull_that_ended_is_listed_for_some_time(
    puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = create_pulls(puller)
    pull = pulls.start(PullTarget(name="a", target=Reference(repo="own/none")))
    assert pull.wait(PATIENCE)
    (state,) = pulls.states()
    assert (state.name, state.state) == ("a", "failed")
    monkeypatch.setattr(running, "_ENDED_LISTED_S", 0.0)
    assert pulls.states() == ()


def test_a_pull_is_found_by_the_text_of_its_reference(puller: Puller) -> None:
    pulls = create_pulls(puller)
    pulls.start(make_target("c", pair=PAIR)).wait(PATIENCE)
    assert pulls.find("c") is pulls.get("c")
    with pytest.raises(NotFound):
        pulls.find("https://example.org/not a repository")
