"""The other drafts of a pair: what lies beside its target and fits, and which of it drafts in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import TINY_DRAFT, TINY_TARGET, target_cycle, write_model
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import TINY_HEADS, write_heads
from localspec.config import Config
from localspec.daemon.pairs.views import rank_drafts_for
from localspec.paths import Paths
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import AddRequest
from localspec.registry.header.fit import FreeMemory
from localspec.registry.registry import Registry, add_local_pair
from tests.support.daemons import Home, RunningDaemon

CYCLE = target_cycle(TINY_TARGET.n_vocab)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Paths(*[tmp_path / "home"] * 5), lambda _: False, lambda: FreeMemory(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a target, a draft model and sidecars, of which two fit."""
    write_model(tmp_path / "target.gguf", TINY_TARGET, CYCLE)
    write_model(tmp_path / "small.gguf", TINY_DRAFT, CYCLE)
    write_eagle(tmp_path / "eagle3-a.gguf", TINY_TARGET, CYCLE)
    write_eagle(tmp_path / "eagle3-deep.gguf", TINY_TARGET, CYCLE, layers=(0, 1, 7))
    write_block(tmp_path / "dflash-a.gguf", TINY_TARGET, CYCLE)
    (tmp_path / "dspark-a.gguf").write_bytes(b"no model")
    return tmp_path


def resolve(registry: Registry, name: str) -> tuple[str | None, list[str], bool]:
    """Return the names of the draft and of the other drafts, and whether the draft was named."""
    files: PairFiles = registry.resolve(name)
    draft = Path(files.draft).name if files.draft else None
    return draft, [Path(other).name for other in files.other_drafts], files.draft_named


def test_sidecars_that_fit_are_the_other_drafts_of_a_lone_target(
    registry: Registry, folder: Path
) -> None:
    target = str(folder / "target.gguf")
    assert resolve(registry, target) == ("dflash-a.gguf", ["eagle3-a.gguf"], False)
    (folder / "dflash-a.gguf").unlink()
    assert resolve(registry, target) == ("eagle3-a.gguf", [], False)
    (folder / "eagle3-a.gguf").write_bytes(b"no model")
    assert resolve(registry, target) == (None, [], False)


def test_a_name_of_two_files_has_no_other_drafts(registry: Registry, folder: Path) -> None:
    name = f"{folder / 'target.gguf'},{folder / 'small.gguf'}"
    assert resolve(registry, name) == ("small.gguf", [], False)


def test_own_heads_and_sidecars_are_drafts_of_one_target(
    registry: Registry, tmp_path: Path
) -> None:
    write_heads(tmp_path / "target.gguf", architecture="qwen35")
    write_eagle(tmp_path / "eagle3-a.gguf", TINY_HEADS, CYCLE)
    assert resolve(registry, str(tmp_path / "target.gguf")) == (None, ["eagle3-a.gguf"], False)
    add(registry, tmp_path, "mine", draft=str(tmp_path / "eagle3-a.gguf"))
    assert resolve(registry, "mine") == ("eagle3-a.gguf", ["target.gguf"], True)


def add(registry: Registry, folder: Path, name: str, **options: Any) -> None:
    add_local_pair(registry, AddRequest(name, str(folder / "target.gguf"), **options))


def test_a_pair_knows_whether_its_draft_was_named(registry: Registry, folder: Path) -> None:
    add(registry, folder, "found")
    add(registry, folder, "named", draft=str(folder / "eagle3-a.gguf"))
    add(registry, folder, "model", draft=str(folder / "small.gguf"))
    add(registry, folder, "none", no_draft=True)
    resolved = {name: resolve(registry, name) for name in ("found", "named", "model", "none")}
    assert resolved == {
        "found": ("dflash-a.gguf", ["eagle3-a.gguf"], False),
        "named": ("eagle3-a.gguf", ["dflash-a.gguf"], True),
        "model": ("small.gguf", ["dflash-a.gguf", "eagle3-a.gguf"], True),
        "none": (None, [], False),
    }
    write_model(folder / "target.gguf", TINY_TARGET, CYCLE, seed=3)
    assert resolve(registry, "found") == resolved["found"]  # also after a file has changed


def test_the_drafts_of_a_pair_are_listed_wherever_they_lie(
    registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder / "nobody"))
    (folder / "elsewhere").mkdir()
    small = (folder / "small.gguf").rename(folder / "elsewhere" / "small.gguf")

    def list_drafts(name: str) -> list[str]:
        pair = registry.resolve(name)
        report = rank_drafts_for(registry, pair, [], Config(), None, lambda _: None)
        return [view.name for view in report.drafts or [] if view.matched]

    assert list_drafts("builtin") == ["draft.gguf"]
    target = str(folder / "target.gguf")
    beside = ["dflash-a.gguf", "eagle3-a.gguf"]
    assert list_drafts(target) == beside
    assert list_drafts(f"{target},{small}") == ["small.gguf"]
    add(registry, folder, "model", draft=str(small))
    assert list_drafts("model") == [*beside, "small.gguf"]


def test_status_shows_the_draft_that_is_used(home: Home, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    write_model(target, TINY_TARGET, CYCLE)
    write_block(tmp_path / "dflash-a.gguf", TINY_TARGET, CYCLE, 0.0)
    write_eagle(tmp_path / "eagle3-a.gguf", TINY_TARGET, CYCLE, 0.9)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    for _ in range(2):
        daemon = RunningDaemon(home)
        speculative = {"depth": 3, "kind": "eagle3"}
        answer = home.chat("a b c", **fields, model=str(target), speculative=speculative)
        assert answer.json["localspec"]["speculation"]["accepted"] > 20
        (pair,) = home.status()["pairs"]
        assert pair["draft"].startswith("eagle3")
        assert pair["note"].endswith(
            "The block draft predicted 0% of the target's tokens in short texts: probably damaged, or "
            "made for another model. eagle3-a.gguf drafts instead."
        )
        daemon.stop()
