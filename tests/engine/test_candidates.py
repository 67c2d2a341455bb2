"""Of several drafts for one target, the first that predicts it well is used, and later loads know which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import target_cycle, write_model
from benchmarks.synthetic_heads import TINY_HEADS, write_heads
from benchmarks.synthetic_targets import LayerReader
from localspec.engine.llama import OutOfMemory
from localspec.engine.pair.candidates import DraftCandidates, DraftFailed, Verdict
from localspec.engine.pair.models import MIN_CONTEXT, open_model
from localspec.errors import LoadFailed
from localspec.protocol.frames import PairFiles, SpeculationSettings
from tests.engine.drafters.test_layers import SHAPE, write_sidecar
from tests.support.pairs import N_VOCAB, expected
from tests.support.running import Load

AUTO = SpeculationSettings()
DEAD, STALE, GOOD = 0.0, 0.15, 0.9


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the model files that are opened, in order."""
    names: list[str] = []

    def record(path: str, *args: Any, **options: Any) -> Any:
        names.append(Path(path).name)
        return open_model(path, *args, **options)

    monkeypatch.setattr("localspec.engine.pair.models.open_model", record)
    return names


def write_drafts(folder: Path, named: bool = False, **rates: float) -> PairFiles:
    """Return a target with sidecars of these kinds and acceptance rates, the first as its draft."""
    target = folder / "target.gguf"
    write_model(target, SHAPE, target_cycle(N_VOCAB))
    kinds: dict[str, LayerReader] = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
    paths = {kind: folder / f"{kind}-target.gguf" for kind in rates}
    for kind, rate in rates.items():
        write_sidecar(paths[kind], kinds[kind], SHAPE, rate)
    draft, *others = map(str, paths.values())
    return PairFiles("pair", str(target), draft, other_drafts=tuple(others), draft_named=named)


def test_the_first_good_draft_is_used_and_later_loads_open_it_at_once(
    tmp_path: Path, load: Load, opened: list[str]
) -> None:
    files = write_drafts(tmp_path, eagle3=DEAD, dspark=STALE, dflash=GOOD)
    first = load(files, state_dir=str(tmp_path))
    assert opened == [
        *("target.gguf", "eagle3-target.gguf", "target.gguf", "dspark-target.gguf"),
        *("target.gguf", "dflash-target.gguf"),
    ]
    opened.clear()
    again = load(files, state_dir=str(tmp_path))
    assert opened == ["target.gguf", "dflash-target.gguf"]
    for engine in (first, again):
        assert engine.pair.notes == [
            "The EAGLE-3 draft predicted 0% of the target's tokens in short texts: probably damaged, or "
            "made for another model.",
            first.pair.notes[1],
            "dflash-target.gguf drafts instead.",
        ]
        assert "made for another version of this model" in engine.pair.notes[1]
        assert (engine.pair.info().draft_description or "").startswith("dflash")
        assert engine.pair.drafter is not None
        assert engine.pair.drafter.kind == "dflash"
        assert engine.ask([5], 60, speculative=AUTO).tokens == expected(5, 60)


def test_a_good_draft_is_used_at_once(tmp_path: Path, load: Load, opened: list[str]) -> None:
    engine = load(write_drafts(tmp_path, eagle3=GOOD, dflash=GOOD))
    assert opened == ["target.gguf", "eagle3-target.gguf"]
    assert engine.pair.notes == []


def test_the_best_of_poor_drafts_is_used(tmp_path: Path, load: Load, opened: list[str]) -> None:
    files = write_drafts(tmp_path, eagle3=DEAD, dflash=STALE, dspark=DEAD)
    for _ in range(2):
        opened.clear()
        pair = load(files, state_dir=str(tmp_path)).pair
        assert pair.files.draft == files.other_drafts[0]
    assert opened == ["target.gguf", "dflash-target.gguf"]
    assert "dflash-target.gguf drafts instead." in pair.notes
    assert pair.notes[-1].endswith("Such drafts are used only where they pay.")


def test_a_dead_draft_alone_is_named_and_the_text_itself_drafts(tmp_path: Path, load: Load) -> None:
    engine = load(write_drafts(tmp_path, eagle3=DEAD))
    (note,) = engine.pair.notes
    assert "damaged, or made for another model" in note
    prompt = [*expected(5, 60)] * 2
    done = engine.ask(prompt, 60, speculative=AUTO).done
    # Whether a trial of the draft is made depends on what passes cost beside other programs.
    assert done.speculation.kind in ("ngram", None) or done.speculation.drafted <= 8


@pytest.mark.parametrize(("rate", "used"), [(STALE, "eagle3"), (DEAD, "dflash")])
def test_a_named_draft_is_replaced_only_if_it_is_dead(
    tmp_path: Path, load: Load, rate: float, used: str
) -> None:
    pair = load(write_drafts(tmp_path, named=True, eagle3=rate, dflash=GOOD)).pair
    assert pair.drafter is not None
    assert pair.drafter.kind == used
    assert ("dflash-target.gguf drafts instead." in pair.notes) == (used == "dflash")


@pytest.mark.parametrize("own", [DEAD, GOOD])
def test_own_heads_and_a_sidecar_replace_each_other(tmp_path: Path, load: Load, own: float) -> None:
    target = write_heads(tmp_path / "target.gguf", acceptance=own, architecture="qwen35")
    rate = DEAD if own == GOOD else GOOD
    sidecar = write_sidecar(tmp_path / "eagle3-target.gguf", "eagle3", TINY_HEADS, rate)
    paths = str(target), str(sidecar)
    draft, other = (paths[1], paths[0]) if own == GOOD else (None, paths[1])
    pair = load(PairFiles("pair", paths[0], draft, other_drafts=(other,))).pair
    assert pair.drafter is not None
    assert pair.drafter.kind == ("mtp" if own == GOOD else "eagle3")
    name = "Its own MTP heads draft" if own == GOOD else "eagle3-target.gguf drafts"
    assert f"{name} instead." in pair.notes
    assert pair.notes[0].startswith("The EAGLE-3 draft" if own == GOOD else "The MTP heads")


@pytest.mark.parametrize("fault", ["vanished", "cut off", "no model", "not finite", "wrong layers"])
def test_a_broken_candidate_is_left_out(tmp_path: Path, load: Load, fault: str) -> None:
    files = write_drafts(tmp_path, eagle3=DEAD, dflash=GOOD, dspark=GOOD)
    broken = Path(files.other_drafts[0])
    if fault == "vanished":
        broken.unlink()
    elif fault == "no model":
        broken.write_bytes(b"no model")
    elif fault == "cut off":
        broken.write_bytes(broken.read_bytes()[:-5000])
    elif fault == "not finite":
        spoil(broken)
    else:
        write_sidecar(broken, "dflash", SHAPE, layers=(0, 9))
    pair = load(files, state_dir=str(tmp_path)).pair
    assert pair.files.draft == files.other_drafts[1]
    assert pair.notes[-1] == "dspark-target.gguf drafts instead."


def spoil(path: Path) -> None:
    """Fill the output matrix of a model with NaN."""
    import gguf

    reader = gguf.GGUFReader(path, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "output.weight")
    tensor.data[:] = np.nan
    reader.data.flush()


def test_memory_that_holds_no_other_candidate_leaves_the_first(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_drafts(tmp_path, eagle3=DEAD, dflash=GOOD)

    def open_some(path: str, *args: Any, **options: Any) -> Any:
        if path in files.other_drafts:
            raise OutOfMemory("Memory is full.")
        return open_model(path, *args, **options)

    monkeypatch.setattr("localspec.engine.pair.models.open_model", open_some)
    pair = load(files, n_ctx=4 * MIN_CONTEXT).pair
    assert pair.files.draft == files.draft
    assert pair.n_ctx == SHAPE.n_ctx  # nothing is reduced for a draft that is not used
    assert pair.notes[0] == "Memory does not hold dflash-target.gguf."


def test_without_any_draft_or_target_the_load_fails(
    tmp_path: Path, load: Load, opened: list[str]
) -> None:
    files = write_drafts(tmp_path, eagle3=GOOD, dflash=GOOD)
    for draft in (files.draft, *files.other_drafts):
        Path(str(draft)).write_bytes(b"no model")
    with pytest.raises(LoadFailed, match="eagle3-target"):
        load(files)
    Path(files.target).write_bytes(b"no model")
    opened.clear()
    with pytest.raises(LoadFailed, match=r"target\.gguf"):
        load(files)
    assert opened == ["target.gguf"]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 3, "agreement": "high"}', "\0", None])
def test_a_damaged_or_outdated_verdict_counts_as_none(tmp_path: Path, content: str | None) -> None:
    draft, other = tmp_path / "eagle3.gguf", tmp_path / "dflash.gguf"
    for file in (tmp_path / "target.gguf", draft, other):
        file.touch()
    files = PairFiles("pair", str(tmp_path / "target.gguf"), str(draft), other_drafts=(str(other),))
    DraftCandidates(files, str(tmp_path)).record(files.draft, Verdict(0.0, "It is dead."))
    assert DraftCandidates(files, str(tmp_path)).choose() == str(other)
    (stored,) = tmp_path.glob("draft-*.json")
    if content is None:
        draft.write_bytes(b"another file")
    else:
        stored.write_text(content)
    assert DraftCandidates(files, str(tmp_path)).choose() == files.draft


_DIE = """
import os
from localspec.engine.pair.candidates import DraftCandidates
from localspec.protocol.frames import PairFiles
candidates = DraftCandidates(PairFiles("pair", "{0}/t", "{0}/a", other_drafts=("{0}/b",)), "{0}")
with candidates.trying("{0}/{1}"):
    os._exit(7)
"""


@pytest.mark.parametrize("dies", ["a", "b"])
def test_another_draft_that_ends_the_engine_is_not_tried_again(tmp_path: Path, dies: str) -> None:
    """The pair's own draft is, because the daemon sets aside a pair whose engine dies again and again."""
    for name in "tab":
        (tmp_path / name).write_text(name)
    run = subprocess.run([sys.executable, "-c", _DIE.format(tmp_path, dies)], check=False)
    assert run.returncode == 7
    paths = {name: str(tmp_path / name) for name in "tabc"}
    files = PairFiles("pair", paths["t"], paths["a"], other_drafts=(paths["b"], paths["c"]))
    candidates = DraftCandidates(files, str(tmp_path))
    assert candidates.choose() == paths["a"]
    candidates.record(paths["a"], Verdict(0.01, "It is dead."))
    assert candidates.choose() == paths["b" if dies == "a" else "c"]
    notes = candidates.describe(paths["c"], drafting=True)
    assert any("The engine ended while b was loaded" in note for note in notes) == (dies == "b")


def test_a_load_that_fails_leaves_no_mark(tmp_path: Path) -> None:
    files = write_drafts(tmp_path, eagle3=DEAD, dflash=GOOD)
    other = files.other_drafts[0]
    with pytest.raises(LoadFailed), DraftCandidates(files, str(tmp_path)).trying(other):
        raise LoadFailed("The target is damaged.")
    candidates = DraftCandidates(files, str(tmp_path))
    candidates.record(files.draft, Verdict(0.01, "It is dead."))
    assert candidates.choose() == other


def test_the_last_candidate_raises_the_error_of_the_own_draft() -> None:
    candidates = DraftCandidates(PairFiles("pair", "/t", "/a", other_drafts=("/b",)), "")
    candidates.discard("/a", DraftFailed("The first."))
    with pytest.raises(DraftFailed, match="The first"):
        candidates.discard("/b", DraftFailed("The second."))
