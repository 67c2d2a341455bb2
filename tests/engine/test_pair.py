"""Loading a pair: what is refused, what is freed, and what a damaged profile cannot do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import Shape, target_cycle, vocabulary, write_model, write_pair
from localspec.engine.llama import Context, ContextSettings, Model, NoKvSlot
from localspec.engine.pair import exact
from localspec.engine.pair import load as pair_load
from localspec.engine.pair import models as pair_models
from localspec.engine.pair.profile import PassTimes
from localspec.engine.speculation.drafters.draft_model import DraftModel
from localspec.engine.speculation.warm_start import Agreement
from localspec.errors import LoadFailed
from localspec.protocol.frames import PairFiles
from localspec.protocol.settings import (
    CPU_PASS_ROWS,
    MAX_FEW_SEQUENCES,
    SHORT_CONTEXT_TOKENS,
)
from tests.support.pairs import BOS, expected, target_alone
from tests.support.running import Load, drafting, running, skip_on

Opened = list[Model | Context]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Record every model and context that a pair opens, including those that are lost."""
    objects: Opened = []
    for kind in (Model, Context):

        def init(self: Any, *args: Any, original: Any = kind.__init__, **more: Any) -> None:
            objects.append(self)
            original(self, *args, **more)

        monkeypatch.setattr(kind, "__init__", init)
    return objects


@pytest.fixture
def other_vocabulary(tmp_path: Path) -> str:
    """Write a draft with other words under the same ids."""
    words = [f"o{at}" for at in range(507)] + vocabulary(512)[-5:]
    shape = Shape(1, 64, 64, 4, 512)
    return str(write_model(tmp_path / "other.gguf", shape, target_cycle(512), tokens=words))


def test_a_load_that_fails_frees_what_it_had_loaded(
    opened: Opened, contextual_files: PairFiles, other_vocabulary: str, tmp_path: Path
) -> None:
    """Gigabytes would remain in the worker otherwise."""
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + b"\xff" * 1000)
    for draft in (other_vocabulary, str(garbage), "/nowhere"):
        with pytest.raises(LoadFailed), running(PairFiles("p", contextual_files.target, draft)):
            pass
    wrong = {"type_kv": "q8_0", "flash_attention": "off"}
    with pytest.raises(LoadFailed), running(contextual_files, **wrong):
        pass
    assert len(opened) > 6
    assert not any(entry.handle for entry in opened)


def test_a_pair_that_is_closed_holds_nothing(opened: Opened, contextual_files: PairFiles) -> None:
    with running(contextual_files) as engine:
        engine.ask([1, 2, 3], 4, exact=True)
        assert sum(bool(entry.handle) for entry in opened) == 5
    assert len(opened) == 5  # two models; contexts for target, draft and the exact lane
    assert not any(entry.handle for entry in opened)


def test_exact_mode_is_refused_if_rows_differ_at_every_width(
    opened: Opened, cycle_files: PairFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "passes_self_test", lambda *_: False)
    with running(cycle_files) as engine:
        for _ in range(2):
            refused = engine.ask([BOS, 7], 5, exact=True).failed
            assert (refused.code, refused.param) == ("invalid_request", "exact")
            assert "no pass width gives the same logits in every row" in refused.message
        assert sum(bool(entry.handle) for entry in opened) == 4
        assert len(opened) == 5  # the context of the exact lane was tried once
        assert engine.ask([BOS, 7], 20).tokens == expected(7, 20)


def test_other_vocabularies_are_named(contextual_files: PairFiles, other_vocabulary: str) -> None:
    differs = r"token 0 is .* in the target and 'o0' in the draft; the draft knows"
    files = PairFiles("p", contextual_files.target, other_vocabulary)
    with pytest.raises(LoadFailed, match=differs), running(files):
        pass


@pytest.mark.parametrize("n_batch", [64, 128])
@pytest.mark.parametrize("parallel", [1, 4])
def test_small_batches_do_not_change_answers(
    cycle_files: PairFiles, load: Load, n_batch: int, parallel: int
) -> None:
    engine = load(cycle_files, n_batch=n_batch, parallel=parallel)
    ids = [engine.start([BOS, first], 30, speculative=drafting(64)) for first in range(4)]
    engine.finish()
    for first, request in enumerate(ids):
        assert engine.answers[request].tokens == expected(first, 30)


def test_the_context_is_no_larger_than_in_training(cycle_files: PairFiles, load: Load) -> None:
    assert load(cycle_files, n_ctx=1_000_000).pair.n_ctx == 2048


@pytest.mark.parametrize(
    "changes",
    [
        {"calibration": []},
        {"calibration": "text"},
        {"calibration": {"draft": [1]}},
        {"exact_width": 3000},
        {"exact_width": -1},
        {"exact_width": True},
        {"overhead_ms": -5.0},
        {"overhead_ms": "x"},
        {"target_ms": []},
        {"draft_ms": {"1": -1}},
    ],
)
def test_a_damaged_profile_does_not_keep_a_pair_from_loading(
    cycle_files: PairFiles, load: Load, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with running(cycle_files, state_dir=str(tmp_path)):
        pass
    (stored,) = tmp_path.glob("profile-*.json")
    content = json.loads(stored.read_text(encoding="utf-8"))
    stored.write_text(json.dumps({**content, **changes}), encoding="utf-8")
    engine = load(cycle_files, state_dir=str(tmp_path))
    answer = engine.ask([BOS, 7], 20, speculative=drafting(3), exact=True)
    assert answer.tokens == expected(7, 20)
    assert engine.pair.learned.costs.overhead_ms > 0


def test_learned_values_are_restored_by_the_next_load(
    cycle_files: PairFiles, load: Load, tmp_path: Path
) -> None:
    with running(cycle_files, state_dir=str(tmp_path)) as engine:
        engine.ask([BOS, 7], 200, speculative=drafting(4))
        engine.ask([BOS, 7], 5, exact=True)
        engine.ask([BOS] * 400, 2)
        reading = engine.pair.shared.reading.expected
        width = engine.pair.exact.width
        learned = engine.pair.learned.calibrations.answers["draft"]
    reloaded = load(cycle_files, state_dir=str(tmp_path))
    known = reloaded.pair.learned.calibrations.answers["draft"]
    assert known.count.sum() == learned.count.sum() > 0
    assert reloaded.pair.exact.width == width
    restored = reloaded.pair.shared.reading.expected
    assert restored.range_seconds(0, 400) == pytest.approx(reading.range_seconds(0, 400))
    # Costs are stored separately for other files or settings.
    with running(target_alone(cycle_files), state_dir=str(tmp_path)):
        pass
    assert len(list(tmp_path.glob("profile-*.json"))) == 2


def test_a_disturbed_profile_is_measured_again_in_idle_time_alone(
    cycle_files: PairFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, pass_ms = [0.7], [5.0]

    def measure(run: object, widths: Iterable[int], *_: object, **__: object) -> PassTimes:
        return PassTimes(dict.fromkeys(widths, pass_ms[0]), noise[0])

    monkeypatch.setattr("localspec.engine.pair.profile.measure_passes", measure)

    def load_costs() -> tuple[float, float]:
        """Return the costs of a pass of width 1 by target and draft after a load."""
        with running(cycle_files, state_dir=str(tmp_path)) as engine:
            costs = engine.pair.learned.costs
            assert costs.draft is not None
            loaded = costs.target.ms(1), costs.draft.ms(1)
            engine.pair.measure_again(None, time.perf_counter)
            return loaded

    assert load_costs() == (5.0, 5.0)  # a disturbed profile is better than none
    pass_ms[0], noise[0] = 2.0, 0.8
    assert load_costs() == (5.0, 5.0)
    noise[0] = 0.01
    assert load_costs() == (5.0, 5.0)
    pass_ms[0], noise[0] = 3.0, 0.02
    assert load_costs() == load_costs() == (2.0, 2.0)


def test_full_draft_context_during_the_load_is_an_error(
    cycle_files: PairFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lane holds anything yet, so nothing can be freed for the draft model."""
    attempts: list[bool] = []

    def start(_target: object, _batch: object, model: DraftModel, *_: object) -> Agreement:
        def decode(_batch: object) -> None:
            attempts.append(True)
            raise NoKvSlot("full")

        with monkeypatch.context() as patch:
            patch.setattr(model.context, "decode", decode)
            with pytest.raises(NoKvSlot):
                model.compare_predictions([BOS, 7], [7])
        return Agreement()

    monkeypatch.setattr(pair_load, "warm_start", start)
    with running(cycle_files) as engine:
        assert attempts == [True]
        assert engine.ask([BOS, 7], 5).tokens == expected(7, 5)


LONG = SHORT_CONTEXT_TOKENS + 256


@skip_on("rpc", "cuda", why="a CPU alone attends without flash attention to a few long texts")
@pytest.mark.parametrize(
    ("settings", "shared", "exact"),
    [
        ({"n_ctx": LONG}, ("off", CPU_PASS_ROWS), ("auto", 256)),
        ({"n_ctx": SHORT_CONTEXT_TOKENS}, ("auto", 256), ("auto", 256)),
        ({"n_ctx": LONG, "parallel": MAX_FEW_SEQUENCES + 1}, ("auto", 256), ("auto", 256)),
        ({"n_ctx": LONG, "type_v": "q8_0"}, ("auto", 256), ("auto", 256)),
        ({"n_ctx": LONG, "flash_attention": "on"}, ("on", 256), ("on", 256)),
        ({"flash_attention": "off"}, ("off", 256), ("off", 256)),
    ],
)
def test_cpu_serves_few_long_texts_without_flash_attention(
    settings: dict[str, Any],
    shared: tuple[str, int],
    exact: tuple[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exact mode keeps its tested settings, and configured settings are respected."""
    used: list[tuple[str, int]] = []
    shape = Shape(1, 64, 128, 2, 512, n_ctx=2 * SHORT_CONTEXT_TOKENS)
    target, draft = map(str, write_pair(tmp_path, shape, shape))

    class NotedContext(Context):
        def __init__(self, model: Model, settings: ContextSettings) -> None:
            used.append((settings.flash_attention, settings.n_ubatch))
            super().__init__(model, settings)

    monkeypatch.setattr(pair_models, "Context", NotedContext)
    with running(PairFiles("long", target, draft), **settings) as engine:
        assert used == [shared, shared]  # target and draft
        plain = engine.ask([3, 1, 4], 8)
        exact_answer = engine.ask([3, 1, 4], 8, exact=True)
        assert used[2:] == [exact]
        assert exact_answer.tokens == plain.tokens
