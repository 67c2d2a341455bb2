"""What is learned in idle time from answers that the draft model did not draft."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.engine.pair.profile import MAX_QUIET_NOISE, PassTimes, measure_passes
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.drafters.draft_model import ModelDrafter
from localspec.engine.speculation.hindsight import COMPARED_TOKENS, MAX_PASSES, MAX_WAITING
from localspec.protocol.frames import PairFiles, Shutdown, SpeculationSettings
from tests.engine.drafters.test_layers import contextual_files
from tests.engine.test_warm_start import expected_rate
from tests.engine.test_worker import Child
from tests.support.heads import contextual_heads
from tests.support.pairs import contextual_pair, cycle_pair, expected
from tests.support.patience import PATIENCE
from tests.support.recurrent import lfm2_pair
from tests.support.running import PLAIN, Running, drafting, running

AUTO = SpeculationSettings()


@pytest.fixture
def hesitant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Yield a pair with a good draft of which little is expected, and which is not used."""
    monkeypatch.setattr(ModelDrafter, "offer", lambda *_: None)
    monkeypatch.setattr(ModelDrafter, "probe", lambda *_: False)
    with running(cycle_pair(tmp_path, 0.95), n_ctx=512) as engine:
        engine.pair.learned.calibrations.answers["draft"] = Calibration(0.05)
        engine.pair.learned.noise = 0.0
        yield engine


def calibration_of(engine: Running, priority: str = "chat") -> Calibration:
    return engine.pair.learned.calibrations.select(priority)["draft"]


def use_idle_time(engine: Running) -> int:
    """Let the engine do all that it does in idle time. Return the number of passes."""
    count = 0
    while engine.engine.has_idle_work:
        engine.engine.interruption.clear()
        engine.engine.use_idle_time()
        count += 1
    return count


def test_a_draft_that_is_better_than_expected_is_noticed_without_being_used(
    hesitant: Running,
) -> None:
    before = expected_rate(calibration_of(hesitant))
    for first in range(3):
        assert hesitant.ask([first], 100, speculative=AUTO).tokens == expected(first, 100)
        assert use_idle_time(hesitant) == MAX_PASSES
    assert calibration_of(hesitant).count.sum() == 3 * MAX_PASSES * COMPARED_TOKENS
    assert before < 0.3 < 0.6 < expected_rate(calibration_of(hesitant))
    assert all(slot.n_past_draft == 0 for slot in hesitant.pair.shared.slots)
    # What the passes have read is gone: answers with drafts are those without.
    drafted = hesitant.ask([7], 40, speculative=drafting(4))
    assert drafted.tokens == expected(7, 40)


@pytest.mark.parametrize("speculative", [PLAIN, drafting(4), drafting(kind="ngram", depth=2)])
def test_nothing_is_learned_from_requests_that_leave_no_choice(
    hesitant: Running, speculative: SpeculationSettings
) -> None:
    hesitant.ask([3], 60, speculative=speculative)
    assert not hesitant.engine.has_idle_work


def test_short_answers_and_forgotten_ones_are_not_read(hesitant: Running) -> None:
    hesitant.ask([3], COMPARED_TOKENS - 1, speculative=AUTO)
    assert not hesitant.engine.has_idle_work
    hesitant.ask([3], 60, speculative=AUTO)
    hesitant.engine.forget("another conversation")
    assert not hesitant.engine.has_idle_work


def test_a_new_request_ends_the_pass_which_is_made_another_time(hesitant: Running) -> None:
    hesitant.ask([3], COMPARED_TOKENS, speculative=AUTO)
    hesitant.engine.interruption.request_came()
    hesitant.engine.use_idle_time()
    assert hesitant.engine.has_idle_work
    assert calibration_of(hesitant).is_unused
    # The draft's own passes are not stopped by what has stopped this one.
    assert hesitant.ask([5], 30, speculative=drafting(4)).tokens == expected(5, 30)
    assert use_idle_time(hesitant) == 1
    assert calibration_of(hesitant).count.sum() >= COMPARED_TOKENS


def test_only_the_newest_answers_wait(hesitant: Running) -> None:
    for first in range(2 * MAX_WAITING):
        hesitant.ask([first], 2 * COMPARED_TOKENS, speculative=AUTO)
    assert use_idle_time(hesitant) == MAX_WAITING


def test_a_failure_in_idle_time_does_no_harm(
    hesitant: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    hesitant.ask([3], COMPARED_TOKENS, speculative=AUTO)
    drafter: Any = hesitant.pair.drafter
    monkeypatch.setattr(drafter, "compare_predictions", lambda *_: 1 / 0)
    assert use_idle_time(hesitant) == 1
    assert hesitant.ask([5], 30).tokens == expected(5, 30)


def test_completions_in_editors_teach_nothing_about_answers(
    load: Callable[..., Running], tmp_path: Path
) -> None:
    files, state = cycle_pair(tmp_path / "pair", 0.4), str(tmp_path / "state")
    with running(files, state_dir=state) as engine:
        engine.ask([7], 100, speculative=drafting(2), priority="editor")
        counts = {name: calibration_of(engine, name).count.sum() for name in ("chat", "editor")}
    again = load(files, state_dir=state)
    assert counts["editor"] > counts["chat"] == calibration_of(again).count.sum()
    assert calibration_of(again, "editor").count.sum() == counts["editor"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the milliseconds and the noise that each measurement of real passes shall have."""
    shown = [5.0, 0.9]

    def measure(run: Callable[[int], None], widths: Iterable[int], *_: Any, **__: Any) -> PassTimes:
        widths = list(widths)
        measure_passes(run, widths, 0.0)
        return PassTimes(dict.fromkeys(widths, shown[0]), shown[1])

    monkeypatch.setattr("localspec.engine.pair.profile.measure_passes", measure)
    return shown


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_disturbed_measurement_is_made_again_until_one_is_quiet(
    tmp_path: Path, measured: list[float], parallel: int
) -> None:
    with running(cycle_pair(tmp_path, 0.95), parallel=parallel) as engine:
        learned, attempts = engine.pair.learned, []
        for number in range(12):
            measured[:] = [2.0, 0.01 if number == 11 else 1.0]
            assert engine.ask([number], 12, speculative=AUTO).tokens == expected(number, 12)
            attempts.append(use_idle_time(engine))
            assert learned.noise == (0.01 if number == 11 else 0.9)
        assert attempts == [1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]
        assert learned.costs.draft is not None
        assert engine.pair.shared.costs.ms(4) == learned.costs.draft.ms(4) == 2.0
        engine.ask([3], 12, speculative=AUTO)
        assert not engine.engine.has_idle_work
        assert engine.ask([7], 40, speculative=drafting(4)).tokens == expected(7, 40)


def test_a_new_request_ends_the_measurement_which_is_made_another_time(
    tmp_path: Path, measured: list[float]
) -> None:
    with running(cycle_pair(tmp_path, 0.95)) as engine:
        answer = engine.ask([3], 12, speculative=AUTO)
        measured[1] = MAX_QUIET_NOISE / 2
        engine.engine.interruption.request_came()
        engine.engine.use_idle_time()
        assert engine.pair.learned.noise == 0.9
        assert engine.engine.has_idle_work
        assert use_idle_time(engine) == 1
        assert engine.pair.learned.noise == MAX_QUIET_NOISE / 2
        again = engine.ask(answer.all_tokens, 12, speculative=drafting(4))
        assert again.started is not None
        assert again.started.cached_tokens == len(answer.all_tokens) - 1


PAIRS: dict[str, Callable[[Path], PairFiles]] = {
    "draft": contextual_pair,
    "hybrid": lfm2_pair,
    "hybrid with heads": lambda folder: contextual_heads(folder, "qwen35"),
    "sidecar in the target's cache": lambda folder: contextual_heads(folder, "gemma4"),
    "sidecar that reads layers": lambda folder: contextual_files(folder / "pair", "eagle3"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_cached_texts_are_as_good_after_a_measurement(
    tmp_path: Path, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Padding depends on what was measured, and rounding on the width.
    monkeypatch.setattr(CostTable, "choose_width", lambda _table, rows, _used: rows)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 90) for _ in range(30)] for _ in range(2)]

    def write(engine: Running, measures: bool) -> list[list[int]]:
        engine.forget()
        texts = [engine.ask(prompt, 10).all_tokens for prompt in prompts]
        if measures:
            engine.pair.learned.noise = 2.0  # whatever is measured is better
            engine.pair.measure_again(None, time.perf_counter)
            assert engine.pair.learned.noise <= 1
        answers = [engine.ask(text, 10, speculative=drafting(3, "auto")) for text in texts]
        assert all(answer.started and answer.started.cached_tokens == 39 for answer in answers)
        return [answer.all_tokens for answer in answers]

    with running(PAIRS[pair](tmp_path), n_ctx=1024, parallel=3) as engine:
        assert write(engine, measures=True) == write(engine, measures=False)


IDLE_WORKER = """
import socket, sys
from localspec.engine.interruption import Interruption
from localspec.engine.worker import Worker

class Idle:
    interruption, active, has_waiting_editor, left = Interruption(), False, False, 5

    @property
    def has_idle_work(self):
        return self.left > 0

    def use_idle_time(self):
        self.left -= 1
        print(self.left, flush=True)

    def close(self):
        print("closed", flush=True)

worker = Worker(socket.socket(fileno=int(sys.argv[2])))
worker._engine = Idle()
worker.run()
"""


def test_the_worker_uses_idle_time_and_then_waits() -> None:
    with closing(Child((sys.executable, "-c", IDLE_WORKER))) as child:
        assert child.process.stdout is not None
        assert [int(child.process.stdout.readline()) for _ in range(5)] == [4, 3, 2, 1, 0]
        child.send(Shutdown())
        assert child.process.wait(PATIENCE) == 0
        assert child.process.stdout.read() == b"closed\n"


BUSY_WORKER = IDLE_WORKER.replace(
    "print(self.left, flush=True)",
    """print(self.left, flush=True)
        stop = self.interruption.begin_pass((), 3600.0)
        while not stop:
            pass""",
)


def test_the_order_to_end_ends_the_use_of_idle_time() -> None:
    """Measuring passes takes seconds, which `localspec stop` would wait for."""
    with closing(Child((sys.executable, "-c", BUSY_WORKER))) as child:
        assert child.process.stdout is not None
        assert child.process.stdout.readline() == b"4\n"
        child.send(Shutdown())
        assert child.process.wait(PATIENCE) == 0
        assert child.process.stdout.read() == b"closed\n"
