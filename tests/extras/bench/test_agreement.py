"""`localspec bench` and an engine driven step by step get the same requests, and differences are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import localspec
from benchmarks.measuring import agreement
from localspec.extras.bench.prompts import Prompt, Work
from localspec.extras.bench.report import Mode, Run

BUILTIN = Path(localspec.__file__).parent / "builtin"
WORK = Work("prose", "text", [Prompt("a")] * 3)


def make_runs(plain: float, drafted: float, drift: list[float]) -> list[Run]:
    """Return the runs of three prompts, while the machine's speed drifts."""
    result = []
    for index, slowdown in enumerate(drift):
        modes: list[tuple[Mode, float]] = [("plain", plain), ("speculative", drafted)]
        for mode, rate in modes:
            ms = 1e3 * 100 * slowdown / rate
            result.append(
                Run("prose", index, 0, mode, "greedy", 101, 5, 1.0, ms + 1, ms, 1e5 / ms, "")
            )
    return result


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(0.8, 1.25), st.floats(0.8, 1.25), st.lists(st.floats(0.3, 3), min_size=3, max_size=3)
)
def test_agreement_follows_the_rates_however_the_machine_drifts(
    capsys: pytest.CaptureFixture[str], plain: float, drafted: float, drift: list[float]
) -> None:
    differences = [abs(plain - 1), abs(drafted - 1)]
    # At the bound itself, rounding decides.
    assume(all(abs(difference - agreement.CLOSE) > 1e-6 for difference in differences))
    measured = make_runs(100 * plain, 150 * plain * drafted, drift), make_runs(100, 150, drift)
    code = agreement._report_agreement(measured, [WORK])
    assert code == (max(differences) > agreement.CLOSE)
    assert capsys.readouterr().out.count("holds") == sum(
        difference <= agreement.CLOSE for difference in differences
    )


def test_both_sides_get_the_same_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shipped pair, both sides report as many tokens, however long they take."""
    all_chats = agreement._chats  # of a kind of work, of which one is enough
    monkeypatch.setattr(agreement, "_chats", lambda work: all_chats(work)[:1])
    agreement.compare([BUILTIN / "target.gguf", BUILTIN / "draft.gguf"], 8, 1, 1024)
    output = capsys.readouterr().out
    counts = [line.split()[1] for line in output.splitlines() if " tokens, " in line]
    assert len(counts) == 2
    assert counts[0] == counts[1]
