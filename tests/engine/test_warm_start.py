"""What is expected of a draft model before its first answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llama_cpp import LLAMA_VOCAB_TYPE_SPM

from localspec.engine.llama import Vocab
from localspec.engine.pair import profile
from localspec.engine.speculation.acceptance import GRID, Calibration
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.warm_start import _tokenize_texts
from localspec.protocol.frames import PairFiles, SpeculationSettings
from tests.support.pairs import contextual_pair, cycle_pair, expected, target_alone
from tests.support.running import Running, drafting

AUTO = SpeculationSettings()


def of(engine: Running) -> Calibration:
    return engine.pair.learned.calibrations["draft"]


def hope(calibration: Calibration) -> float:
    """The rate expected of a text."""
    return float(calibration.prior @ GRID)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, PairFiles]:
    folder = tmp_path_factory.mktemp("warm")
    return {rate: cycle_pair(folder / str(rate), rate) for rate in (0.0, 0.4, 0.95)}


def test_the_better_a_draft_model_is_the_more_is_expected_of_it(
    pairs: dict[float, PairFiles], load: Callable[..., Running]
) -> None:
    found = {rate: hope(of(load(files))) for rate, files in pairs.items()}
    assert found[0.0] < 0.3 < found[0.4] < hope(Calibration()) < found[0.95]


def test_the_first_answer_is_spared_drafts_that_are_never_right(
    pairs: dict[float, PairFiles], load: Callable[..., Running]
) -> None:
    """Its prompt is not read by the draft model either. What was expected on trust is the control."""
    prompt = [5, *expected(5, 63)]
    warm, hopeful = load(pairs[0.0]), load(pairs[0.0])
    hopeful.pair.learned.calibrations["draft"] = Calibration()
    for engine in (warm, hopeful):
        table = CostTable({1: 20.0, 2: 28.0, 16: 140.0})  # at which a hopeful one is tried
        engine.pair.shared.costs = engine.pair.learned.costs.target = table
    answers = [each.ask(prompt, speculative=drafting(None)) for each in (warm, hopeful)]
    drafted = [answer.done.speculation.drafted for answer in answers]
    assert drafted[0] == 0 < drafted[1]
    assert answers[0].tokens == answers[1].tokens == expected(prompt[-1], 24)


def test_nothing_of_the_texts_stays(tmp_path: Path, load: Callable[..., Running]) -> None:
    """Every cell that was left would change what this pair writes."""
    files = contextual_pair(tmp_path / "pair")
    prompt = list(range(3, 40))
    answers = [load(each).ask(prompt, speculative=AUTO) for each in (files, target_alone(files))]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].started is not None
    assert answers[0].started.cached_tokens == 0


def test_it_is_done_once(
    pairs: dict[float, PairFiles], load: Callable[..., Running], tmp_path: Path
) -> None:
    first = load(pairs[0.4], state_dir=str(tmp_path))
    checked = of(first).count.sum()
    assert checked > 0
    first.pair.save()
    again = load(pairs[0.4], state_dir=str(tmp_path))
    assert of(again).count.sum() == checked
    assert hope(of(again)) == pytest.approx(hope(of(first)))


def test_a_slow_target_is_not_waited_for(
    pairs: dict[float, PairFiles], load: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "BUDGET_S", 1e-6)
    assert of(load(pairs[0.0])).is_unused


@pytest.mark.parametrize(("bytes_", "texts"), [(["<0x09>", "<0x0A>"], 2), ([], 0)])
def test_a_vocabulary_that_not_all_text_can_be_read_with_is_not_tried(
    bytes_: list[str], texts: int
) -> None:
    """llama.cpp would end the process, at each load."""

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
