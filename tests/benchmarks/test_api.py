"""`scripts/bench api` from end to end on the smallest pair, without llama-server; times mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.api import _markdown, _verdicts, main
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.api_parts import Reissued, Together, Turn, joint_speed
from benchmarks.servers.daemon import timed

SMALL = [
    "--size",
    "tiny",
    "--length",
    "100",
    "--turns",
    "2",
    "--keystrokes",
    "5",
    "--tokens",
    "400",
]


@pytest.mark.slow
def test_every_part_runs_and_every_answer_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = [*SMALL, "--repetitions", "1", "--acceptance", "0.7", "--clients", "2"]
    assert main([*arguments, "--work", str(tmp_path), "--json", str(out)]) == 0
    stored = json.loads(out.read_text())
    # 40 new tokens of each turn, and the last written one; the rest was in the cache.
    assert [(turn["prompt"], turn["read"]) for turn in stored["turns"]] == [(156, 41), (212, 41)]
    assert stored["editor"]["requests"] == 5
    assert stored["editor"]["settled_ms"] is not None
    [shared] = stored["clients"]
    assert [run["clients"] for run in shared["runs"]] == [1, 2]
    assert all(run["drafted"] == 0 for run in shared["plain"])
    assert "outputs that left the right text: 0" in capsys.readouterr().out


def turn(ours: float, theirs: float | None) -> Turn:
    return Turn(3000, 41, ours, ours - 1, theirs, True)


def test_what_must_hold_is_judged() -> None:
    from benchmarks.api import Shared

    typed = Reissued(200, 20.0, None, True, 3, 9.0)
    runs = [Together(count, 0, speed, 0, True) for count, speed in ((1, 10.0), (4, 16.0))]
    shared = Shared("0", runs, [Together(1, 0, 8.0, 0, True)])
    turns = [turn(130.0, 100.0), turn(110.0, 100.0), turn(115.0, 100.0)]
    found = {v.what: (v.value, v.holds) for v in _verdicts(turns, typed, [shared])}
    assert found == {
        "first token of the next turn / llama-server's": (1.15, True),
        "slots busy after the last keystroke": (1, False),
        "all clients / one that decodes plainly, α = 0": (2.0, True),
        "all clients / one, α = 0": (1.6, True),
    }
    report = _markdown(["a note"], [turn(130.0, None)], typed, [])
    assert "MISSED" in report
    assert "| 3000 | 41 | 130.0 | 129.0 |  |  |" in report


def test_the_first_text_is_what_is_timed() -> None:
    said = [{"content": ""}, {"content": "a"}, {"content": "b", "stop": True}]
    streamed = timed(0.0, map(json.dumps, said))
    assert (streamed.text, streamed.last["stop"]) == ("ab", True)
    assert streamed.first_s > 0
    for wrong in ([{"content": ""}], [{"error": {"message": "no"}}]):
        with pytest.raises(BenchError):
            timed(0.0, map(json.dumps, wrong))


def test_clients_are_counted_while_all_of_them_write() -> None:
    early = [(0.0, 1), (1.0, 3), (2.0, 7), (3.0, 9)]
    late = [(1.0, 1), (2.0, 2), (3.0, 4), (9.0, 20)]
    assert joint_speed([early]) == 8 / 3
    assert joint_speed([early, late]) == (6 + 3) / 2
    with pytest.raises(BenchError):
        joint_speed([early, [(4.0, 1), (5.0, 2)]])


@pytest.mark.parametrize(
    "wrong", [["--llama-server", "/nowhere/llama-server"], ["--tokens", "0"], ["--clients", "x"]]
)
def test_wrong_usage_is_said_before_anything_is_done(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--work", str(tmp_path / "work"), *wrong])
    assert stopped.value.code == 2
    assert not (tmp_path / "work").exists()


def test_a_part_that_does_not_exist_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nonsense", "--work", str(tmp_path)]) == 1
    assert "There is no part 'nonsense'" in capsys.readouterr().err
