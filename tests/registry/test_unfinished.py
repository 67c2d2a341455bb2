"""What is wanted survives the daemon, and nothing secret with it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from localspec.registry.catalogue import Pair, Weights
from localspec.registry.repository import Reference
from localspec.registry.unfinished import Unfinished
from localspec.registry.wanted import Wanted

PAIR = Pair(summary="s", target=Weights(repo="a/b", file="c.gguf"))


def wanted(name: str, **more: object) -> Wanted:
    return Wanted(name=name, target=Reference(repo="a/b"), **more)  # type: ignore[arg-type]


def test_what_is_kept_is_read_back_and_what_is_dropped_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pulls.json"
    kept = Unfinished(path)
    assert kept.all() == ()
    assert not kept.drop("x")
    kept.keep(wanted("x"))
    kept.keep(wanted("y", pair=PAIR, decided=True, asked="a/b", files=("aa", "bb"), limit_rate=7))
    kept.keep(wanted("x", files=("cc",)))
    again = Unfinished(path)
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
    kept = Unfinished(path)
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
    kept = Unfinished(tmp_path / "pulls.json")
    kept.keep(wanted("x", endpoint=endpoint))
    assert kept.all()[0].endpoint == shown
    assert b"canary" not in (tmp_path / "pulls.json").read_bytes()


def test_a_folder_that_cannot_be_written_stops_no_pull(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    kept = Unfinished(tmp_path / "state" / "pulls.json")
    kept.keep(wanted("x"))
    assert kept.all() == ()


def test_many_pulls_at_once_lose_none(tmp_path: Path) -> None:
    kept = Unfinished(tmp_path / "pulls.json")
    threads = [
        threading.Thread(target=kept.keep, args=(wanted(f"p{number}"),)) for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.name for each in kept.all()} == {f"p{number}" for number in range(16)}
