"""What is wanted survives the daemon, and nothing secret with it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from localspec.errors import NotFound
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.hub.repository import Reference
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.resolve import PullTarget, UnfinishedPulls
from localspec.registry.pulls.running import Pulls
from tests.registry.pulling import SIZE, pulls_of
from tests.support.daemons import wait_for
from tests.support.hub import Faults, TestHub

PAIR = CataloguePair(summary="s", target=HubFile(repo="a/b", file="c.gguf"))


def wanted(name: str, **more: object) -> PullTarget:
    return PullTarget(name=name, target=Reference(repo="a/b"), **more)  # type: ignore[arg-type]


def test_what_is_kept_is_read_back_and_what_is_dropped_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pulls.json"
    kept = UnfinishedPulls(path)
    assert kept.all() == ()
    assert not kept.drop("x")
    kept.keep(wanted("x"))
    kept.keep(wanted("y", pair=PAIR, decided=True, asked="a/b", files=("aa", "bb"), limit_rate=7))
    kept.keep(wanted("x", files=("cc",)))
    again = UnfinishedPulls(path)
    assert [each.name for each in again.all()] == ["y", "x"]
    assert again.all()[0].pair == PAIR
    assert again.files() == {"aa", "bb", "cc"}
    assert again.drop("y")
    assert again.drop("x")
    assert not path.exists()
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("damage", [b"", b"{", b'{"pulls": 3}', b'{"version": 9, "pulls": []}'])
def test_a_broken_file_is_nothing_and_written_anew(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "pulls.json"
    path.write_bytes(damage)
    kept = UnfinishedPulls(path)
    assert (kept.all(), kept.files()) == ((), frozenset())
    kept.keep(wanted("x"))
    assert [each.name for each in kept.all()] == ["x"]


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("", ""),
        ("https://hub.example/path", "https://hub.example/path"),
        ("https://me:canary@hub.example:8080/p?key=canary#canary", "https://hub.example:8080/p"),
    ],
)
def test_an_endpoint_is_kept_without_what_is_secret(
    tmp_path: Path, endpoint: str, shown: str
) -> None:
    kept = UnfinishedPulls(tmp_path / "pulls.json")
    kept.keep(wanted("x", endpoint=endpoint))
    assert kept.all()[0].endpoint == shown
    assert b"canary" not in (tmp_path / "pulls.json").read_bytes()


def test_a_folder_that_cannot_be_written_stops_no_pull(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    kept = UnfinishedPulls(tmp_path / "state" / "pulls.json")
    kept.keep(wanted("x"))
    assert kept.all() == ()


def test_many_pulls_at_once_lose_none(tmp_path: Path) -> None:
    kept = UnfinishedPulls(tmp_path / "pulls.json")
    threads = [
        threading.Thread(target=kept.keep, args=(wanted(f"p{number}"),)) for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.name for each in kept.all()} == {f"p{number}" for number in range(16)}


def begun(pulls: Pulls, hub: TestHub, pair: CataloguePair) -> None:
    hub.rate = 1.5e6
    pulls.start(PullTarget(name="p", pair=pair))
    wait_for(lambda: pulls.get("p").state.done > 200_000, "some bytes")


def test_the_end_may_be_told_twice_and_what_ends_goes_on(
    puller: Puller, hub: TestHub, faults: Faults, pair: CataloguePair, tmp_path: Path
) -> None:
    kept = UnfinishedPulls(tmp_path / "pulls.json")
    pulls = pulls_of(puller, kept)
    begun(pulls, hub, pair)
    assert kept.files()
    pulls.close(timeout=0)
    pulls.close()
    state = pulls.get("p").state
    assert (state.state, state.code) == ("interrupted", "pull_cancelled")
    assert "resumes when the daemon starts again" in state.message
    hub.rate = 0
    again = pulls_of(puller, UnfinishedPulls(tmp_path / "pulls.json"))
    assert again.get("p").wait(30)
    assert again.get("p").state.state == "done"
    assert hub.sent < 1.25 * SIZE
    assert kept.all() == ()


def test_what_was_cancelled_before_the_end_does_not_go_on(
    puller: Puller, hub: TestHub, faults: Faults, pair: CataloguePair, tmp_path: Path
) -> None:
    kept = UnfinishedPulls(tmp_path / "pulls.json")
    pulls = pulls_of(puller, kept)
    begun(pulls, hub, pair)
    pulls.get("p").cancel()
    pulls.close()
    assert pulls.get("p").state.state == "cancelled"
    assert kept.all() == ()


def test_a_failure_that_passes_is_still_wanted_by_its_name(
    puller: Puller, hub: TestHub, faults: Faults, pair: CataloguePair, tmp_path: Path
) -> None:
    """And one that does not pass is told, and forgotten."""
    kept = UnfinishedPulls(tmp_path / "pulls.json")
    pulls = pulls_of(puller, kept)
    begun(pulls, hub, pair)
    for entry in hub.files.values():
        entry.faults.statuses = [(503, "0.01")] * 200
        entry.faults.close_after = [0] * 50
    assert pulls.get("p").wait(30)
    assert pulls.get("p").state.code == "hub_unreachable"
    wanted = pulls.find_target("p")
    assert wanted
    assert wanted.pair == pair
    for entry in hub.files.values():
        entry.faults.statuses, entry.faults.close_after, entry.faults.portal = [], [], False
    hub.rate = 0
    hub.replace("own/target", "target.gguf", b"nothing")
    pull = pulls.start(wanted)
    assert pull.wait(30)
    assert (pull.state.state, pull.state.code) == ("failed", "bad_gguf")
    assert pulls.find_target("p") is None


def test_of_pulls_that_are_over_the_latest_can_be_asked_about(
    puller: Puller, hub: TestHub, faults: Faults, pair: CataloguePair
) -> None:
    pulls = pulls_of(puller)
    begun(pulls, hub, pair)  # one that is under way is never forgotten
    hub.rate = 100.0  # and this one stays so, however long the others take
    for number in range(40):  # of a repository that the hub has not
        pulls.start(wanted(f"gone{number}", pair=PAIR)).wait(30)
    names = [state.name for state in pulls.states()]
    assert names == ["p", *(f"gone{number}" for number in range(9, 40))]
    assert pulls.get("gone39").state.state == "failed"
    with pytest.raises(NotFound, match="no pull of 'gone0'"):
        pulls.get("gone0")
    pulls.close()


def test_a_pull_is_found_by_what_was_written_for_its_repository(puller: Puller) -> None:
    pulls = pulls_of(puller)
    pulls.start(wanted("c", pair=PAIR)).wait(30)
    assert pulls.find("c") is pulls.get("c")
    with pytest.raises(NotFound):
        pulls.find("https://example.org/not a repository")
