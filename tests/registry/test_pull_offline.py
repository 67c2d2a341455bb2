"""Without a network, a pull uses complete files of the Hugging Face cache, and notes that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.errors import HubError, Unreachable
from localspec.registry.catalogue import CataloguePair
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.offline import resolve_in_cache
from localspec.registry.pulls.pull import FROM_CACHE, Puller
from tests.registry.pulling import DRAFT, TARGET, flip_byte
from tests.support.gguf_files import sha256
from tests.support.programs import COMMIT, in_hub
from tests.support.pulling import PullingHome, pulling_home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PullingHome]:
    with pulling_home(tmp_path) as home:
        home.environment["HF_HUB_OFFLINE"] = "1"
        yield home


def fill_cache(home: PullingHome, *roles: str) -> list[Path]:
    files = dict(zip(("target", "draft"), home.files, strict=True))
    cache = home.root / "hf" / "hub"
    return [
        in_hub(cache, f"own/{role}", f"{role}.gguf", files[role].read_bytes()) for role in roles
    ]


def test_offline_a_pair_comes_from_the_cache(home: PullingHome) -> None:
    fill_cache(home, "target", "draft")
    run = home.run("pull", "tiny")
    assert run.returncode == 0, run.stderr
    assert f"note: {FROM_CACHE}" in run.stdout
    assert home.hub.requests == []
    description = home.run("show", "tiny").stdout
    assert f"own/target at {COMMIT[:12]}" in description
    assert home.run("verify", "tiny").returncode == 0
    assert home.run("ask", "-m", "tiny", "-n", "4", "hi").returncode == 0


def test_offline_a_repository_comes_from_the_cache(home: PullingHome) -> None:
    fill_cache(home, "target", "draft")
    output = home.must_run("pull", "own/target", "--draft", "own/draft")
    assert "own-target is installed" in output
    assert home.hub.requests == []
    assert "HF_HUB_OFFLINE is set" in home.refused("pull", "own/elsewhere")


def test_offline_incomplete_or_damaged_files_are_not_used(home: PullingHome) -> None:
    fill_cache(home, "target")
    assert "HF_HUB_OFFLINE is set" in home.refused("pull", "tiny")
    (draft,) = fill_cache(home, "draft")
    flip_byte(draft.resolve())
    run = home.run("pull", "tiny")
    assert (run.returncode, "HF_HUB_OFFLINE is set" in run.stderr) == (1, True)
    names = [pair["name"] for pair in json.loads(home.run("list", "--json").stdout)["pairs"]]
    assert names == ["builtin"]
    assert home.hub.requests == []


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, puller: Puller) -> Puller:
    """Return a puller whose hub cannot be reached."""
    return replace(puller, hub=Hub("http://127.0.0.1:9", stall=1.0))


def test_the_cache_replaces_an_unreachable_hub(
    alone: Puller, pair: CataloguePair, tmp_path: Path
) -> None:
    cache = tmp_path / "hf-cache"
    with pytest.raises(Unreachable):
        alone.pull("p", pair)
    in_hub(cache, "own/target", "target.gguf", TARGET)
    with pytest.raises(HubError):
        alone.pull("p", pair)
    in_hub(cache, "own/draft", "draft.gguf", DRAFT)
    record = alone.pull("p", pair)
    assert FROM_CACHE in record.notes
    assert record.target.revision == COMMIT


def test_only_a_complete_cached_file_with_its_hash_resolves(tmp_path: Path) -> None:
    cache = tmp_path / "hf-cache"
    link = in_hub(cache, "a/b", "deep/x.gguf", TARGET)
    resolved = resolve_in_cache("a/b", "deep/x.gguf")
    assert resolved is not None
    assert (resolved.sha256, resolved.size, resolved.commit) == (
        sha256(TARGET),
        len(TARGET),
        COMMIT,
    )
    assert resolve_in_cache("a/b", "deep/x.gguf", COMMIT) == resolved
    for repo, file, revision in (
        ("a/b", "x.gguf", "main"),
        ("a/c", "deep/x.gguf", "main"),
        ("a/b", "deep/x.gguf", "other"),
        ("../b", "deep/x.gguf", "main"),
    ):
        assert resolve_in_cache(repo, file, revision) is None
    link.resolve().unlink()
    assert resolve_in_cache("a/b", "deep/x.gguf") is None
