"""`localspec bench` beside an engine that is stepped: both are asked the same, and what differs is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import localspec
from benchmarks.measuring import agreement
from localspec.extras.bench.prompts import Prompt, Work
from localspec.extras.bench.report import Mode, Run

BUILTIN = Path(localspec.__file__).parent / "builtin"
WORK = Work("prose", "text", [Prompt("a")] * 3)


def runs(plain: float, drafted: float, drift: list[float]) -> list[Run]:
    """Of three prompts, while the machine's speed drifts."""
    found = []
    for at, slower in enumerate(drift):
        modes: list[tuple[Mode, float]] = [("plain", plain), ("speculative", drafted)]
        for mode, rate in modes:
            ms = 1e3 * 100 * slower / rate
            found.append(Run("prose", at, 0, mode, "greedy", 101, 5, 1.0, ms + 1, ms, 1e5 / ms, ""))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(0.8, 1.25),
    st.floats(0.8, 1.25),
    st.lists(st.floats(0.3, 3), min_size=3, max_size=3),
)
def test_they_agree_as_far_as_their_rates_do_however_the_machine_drifts(
    capsys: pytest.CaptureFixture[str], plain: float, drafted: float, drift: list[float]
) -> None:
    both = runs(100 * plain, 150 * plain * drafted, drift), runs(100, 150, drift)
    code = agreement._report_agreement(both, [WORK])
    apart = max(abs(plain - 1), abs(drafted - 1))
    if abs(apart - agreement.CLOSE) > 1e-6:
        assert code == (apart > agreement.CLOSE)
    assert capsys.readouterr().out.count("holds") == sum(
        abs(each - 1) <= agreement.CLOSE for each in (plain, drafted)
    )


def test_both_are_asked_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped pair: as many tokens on both sides, whatever time they take on this machine."""
    agreement.compare([BUILTIN / "target.gguf", BUILTIN / "draft.gguf"], 8, 1, 1024)
    told = capsys.readouterr().out
    counts = [line.split()[1] for line in told.splitlines() if " tokens, " in line]
    assert len(counts) == 2
    assert counts[0] == counts[1]
