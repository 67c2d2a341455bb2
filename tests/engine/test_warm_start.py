"""The warm start measures a draft model before its first answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from llama_cpp import LLAMA_VOCAB_TYPE_SPM

from benchmarks.synthetic_heads import Architecture
from benchmarks.synthetic_targets import LayerReader
from localspec.engine.llama import Vocab
from localspec.engine.pair import profile
from localspec.engine.speculation.acceptance import GRID, Calibration
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.warm_start import _tokenize_texts
from localspec.protocol.frames import PairFiles, SpeculationSettings
from tests.engine.drafters.test_layers import write_pair
from tests.support.heads import Target, cycle_heads
from tests.support.pairs import contextual_pair, cycle_pair, expected, target_alone
from tests.support.running import Running, drafting

AUTO = SpeculationSettings()


def get_calibration(engine: Running) -> Calibration:
    return engine.pair.learned.calibrations.answers["draft"]


def expected_rate(calibration: Calibration) -> float:
    """Return the expected acceptance rate of a new text."""
    return float(calibration.prior @ GRID)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, PairFiles]:
    folder = tmp_path_factory.mktemp("warm")
    return {rate: cycle_pair(folder / str(rate), rate) for rate in (0.0, 0.4, 0.95)}


def test_better_draft_models_have_a_higher_expected_rate(
    pairs: dict[float, PairFiles], load: Callable[..., Running]
) -> None:
    rates = {rate: expected_rate(get_calibration(load(files))) for rate, files in pairs.items()}
    assert rates[0.0] < 0.3 < rates[0.4] < expected_rate(Calibration()) < rates[0.95]


def write_files(folder: Path, kind: Target | LayerReader, acceptance: float) -> PairFiles:
    """Write a target with heads or a sidecar of this kind."""
    if kind == "eagle3" or kind == "dflash" or kind == "dflash2" or kind == "dspark":
        return write_pair(folder, kind, acceptance=acceptance)
    return cycle_heads(folder, acceptance, kind)


@pytest.mark.parametrize(
    "kind", ["glm4moe", "qwen35", "glm4moe apart", "eagle3", "dflash", "dflash2", "dspark"]
)
def test_better_heads_and_sidecars_have_a_higher_expected_rate(
    tmp_path: Path, load: Callable[..., Running], kind: Target | LayerReader
) -> None:
    """Not those of gemma4, which read a cache that holds no text yet."""
    rates = {}
    for rate in (0.0, 0.4, 0.95):
        learned = load(write_files(tmp_path / str(rate), kind, rate)).pair.learned
        is_mtp = kind in get_args(Architecture) or kind.endswith("apart")
        drafter = "mtp" if is_mtp else "eagle3" if kind == "eagle3" else "dflash"
        rates[rate] = expected_rate(learned.calibrations.answers[drafter])
    assert rates[0.0] < 0.3 < rates[0.4] < expected_rate(Calibration()) < rates[0.95]


@pytest.mark.parametrize("kind", ["glm4moe apart", "eagle3", "dflash"])
def test_dead_and_stale_sidecars_are_named_at_every_load(
    tmp_path: Path, load: Callable[..., Running], kind: Target | LayerReader
) -> None:
    notes = {}
    for rate in (0.0, 0.15, 0.9):
        files = write_files(tmp_path / str(rate), kind, rate)
        state = str(tmp_path / f"state {rate}")
        first = load(files, state_dir=state)
        first.pair.save()
        again = load(files, state_dir=state)
        assert first.pair.notes == again.pair.notes
        notes[rate] = " ".join(again.pair.notes)
        answer = again.ask([5], 60, speculative=AUTO)
        assert answer.tokens == expected(5, 60)
    assert "damaged, or made for another model" in notes[0.0]
    assert "made for another version of this model" in notes[0.15]
    assert notes[0.9] == ""


def test_useless_draft_model_is_not_used_in_the_first_answer(
    pairs: dict[float, PairFiles], load: Callable[..., Running]
) -> None:
    """The draft model does not read the prompt either; a hopeful calibration is the control."""
    prompt = [5, *expected(5, 63)]
    warm, hopeful = load(pairs[0.0]), load(pairs[0.0])
    hopeful.pair.learned.calibrations.answers["draft"] = Calibration()
    for engine in (warm, hopeful):
        # At these costs a hopeful draft model is tried.
        table = CostTable({1: 20.0, 2: 28.0, 16: 140.0})
        engine.pair.shared.costs = engine.pair.learned.costs.target = table
    answers = [engine.ask(prompt, speculative=drafting(None)) for engine in (warm, hopeful)]
    drafted = [answer.done.speculation.drafted for answer in answers]
    assert drafted[0] == 0 < drafted[1]
    assert answers[0].tokens == answers[1].tokens == expected(prompt[-1], 24)


def test_warm_start_leaves_nothing_in_the_caches(
    tmp_path: Path, load: Callable[..., Running]
) -> None:
    """Any remaining cell would change the text of this pair."""
    files = contextual_pair(tmp_path / "pair")
    prompt = list(range(3, 40))
    answers = [
        load(pair_files).ask(prompt, speculative=AUTO)
        for pair_files in (files, target_alone(files))
    ]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].started is not None
    assert answers[0].started.cached_tokens == 0


def test_warm_start_runs_once(
    pairs: dict[float, PairFiles], load: Callable[..., Running], tmp_path: Path
) -> None:
    original = load(pairs[0.4], state_dir=str(tmp_path))
    checked = get_calibration(original).count.sum()
    assert checked > 0
    original.pair.save()
    reloaded = load(pairs[0.4], state_dir=str(tmp_path))
    assert get_calibration(reloaded).count.sum() == checked
    assert expected_rate(get_calibration(reloaded)) == pytest.approx(
        expected_rate(get_calibration(original))
    )


def test_slow_target_skips_the_warm_start(
    pairs: dict[float, PairFiles], load: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "BUDGET_S", 1e-6)
    assert get_calibration(load(pairs[0.0])).is_unused


@pytest.mark.parametrize(("bytes_", "texts"), [(["<0x09>", "<0x0A>"], 2), ([], 0)])
def test_vocabulary_without_all_bytes_is_not_tried(bytes_: list[str], texts: int) -> None:
    """llama.cpp would end the process at each load."""

    class Pieces(Vocab):
        def __init__(self) -> None:
            self.kind = LLAMA_VOCAB_TYPE_SPM
            self._all: list[str] = ["<unk>", *bytes_, *"abcdefgh"]
            self.size = len(self._all)

        def text(self, token: int) -> str:
            return self._all[token]

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            return [1] * len(text)

    assert len(_tokenize_texts(Pieces(), 64)) == texts
