"""`scripts/bench api` from end to end on the smallest pair, without llama-server; times mean nothing here."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmarks
import localspec
from benchmarks.api import (
    clients,
    conversation,
    editor,
    gaps,
    ghost,
    main,
    prefill,
    recorded,
    reissue,
    several,
)
from benchmarks.api.asking import joint_speed
from benchmarks.api.clients import Cell, Joint
from benchmarks.api.command import report
from benchmarks.api.conversation import Turn
from benchmarks.api.prefill import Speeds
from benchmarks.api.shared import Section, in_turns, percentile
from benchmarks.measuring.report import Verdict
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import timed

SMALL = (
    "--size tiny --length 100 --turns 2 --requests 5 --tokens 400 --lengths 40 90 --arriving 200 "
    "--stream 1000 --keystrokes 6 --cold 3"
).split()


@pytest.mark.slow
def test_every_part_runs_and_every_answer_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    parts = "conversation clients prefill gaps editor ghost reissue".split()
    arguments = [*parts, *SMALL, "--repetitions", "1", "--acceptance", "0.7", "--clients", "2"]
    assert main([*arguments, "--work", str(tmp_path), "--json", str(out)]) == 0
    stored = json.loads(out.read_text())
    # 40 new tokens of each turn, and the last written one; the rest was in the cache.
    turns = stored["conversation"]
    assert [(turn["prompt"], turn["read"]) for turn in turns] == [(156, 41), (212, 41)]
    assert stored["reissue"]["requests"] == 5
    assert stored["reissue"]["settled_ms"] is not None
    [cell] = stored["clients"]
    drafted = {run["setting"]: run["drafted"] for run in cell["runs"]}
    assert set(drafted) == {"plain", "3", "auto"}
    assert drafted["plain"] == 0 < drafted["3"]
    assert {run["length"] for run in stored["prefill"]["runs"]} == {40, 90}
    [gap] = stored["gaps"]
    assert (gap["length"], gap["correct"]) == (200, True)
    assert gap["longest"] > 0
    kinds = [key["kind"] for key in stored["editor"]["ours"]["keys"]]
    assert kinds[0] == "first"
    assert len(kinds) == 7
    typed = stored["ghost"].get("ours", [])
    assert len(typed) == (5 if shutil.which("vim") else 0)  # the first key is nobody's figure
    assert all(0 < key["ms"] < 30_000 for key in typed if key["what"] == "shown")
    assert "outputs that left the right text: 0" in capsys.readouterr().out


@pytest.mark.slow
def test_an_editor_and_a_chat_are_measured_alone_and_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(localspec.__file__).parent / "builtin"
    models = ["--model", str(shipped / "target.gguf"), "--draft", str(shipped / "draft.gguf")]
    small = "--no-shipped --repetitions 1 --pauses 2 --burst 3 --answer 60 --alone 0.2".split()
    out = tmp_path / "out.json"
    assert main(["several", *models, *small, "--work", str(tmp_path), "--json", str(out)]) == 0
    found = json.loads(out.read_text())["several"]
    cells = {(cell["editor"], cell["chat"]): cell for cell in found["cells"]}
    assert found["loads"] == 0
    assert [*sorted(cells)] == [("", True), (several.SECOND, False), (several.SECOND, True)]
    assert [len(cells[kind]["first_ms"]) for kind in sorted(cells)] == [0, 2, 2]
    assert all(cell["speed"] > 0 for cell in cells.values() if cell["chat"])
    assert "loads of pairs meanwhile: 0" in capsys.readouterr().out


def cell(
    editor: str, chat: bool, first: Sequence[float], speed: float | None = None
) -> several.Cell:
    return several.Cell(True, 0, editor, chat, first, speed, 20.0 if chat else None, 0)


def test_an_editor_may_wait_a_little_longer_and_a_pass_beside_a_chat() -> None:
    found = [
        cell("", True, [], 40.0),
        cell("second pair", False, [100.0, 90.0, 200.0]),
        cell("second pair", True, [140.0, 120.0, 300.0], 30.0),
    ]
    what = "first token p{} on the second pair beside a chat, less a pass / alone"
    assert held(several.verdicts(found, 1)) == {
        what.format(50): (1.2, True),
        what.format(95): (1.4, False),
        "loads of pairs meanwhile": (1, False),
    }
    assert several.kept_speed_share(found, True, "second pair") == 0.75


def turn(ours: float, theirs: float | None) -> Turn:
    return Turn(3000, 41, ours, ours - 1, theirs, True)


def held(verdicts: Sequence[Verdict]) -> dict[str, tuple[float, bool]]:
    return {each.what: (round(each.value, 3), each.holds) for each in verdicts}


def test_a_turn_may_begin_a_little_later_than_the_peers() -> None:
    turns = [turn(130.0, 100.0), turn(110.0, 100.0), turn(115.0, 100.0)]
    what = "first token of the next turn / llama-server's"
    assert held(conversation.verdicts(turns)) == {what: (1.15, True)}
    assert conversation.verdicts([turn(130.0, None)]) == []


def test_what_stays_busy_is_said() -> None:
    typed = reissue.Reissued(200, 20.0, None, True, 3, 9.0)
    assert held(reissue.verdicts(typed)) == {"slots busy after the last keystroke": (1, False)}


def joint(setting: str, speed: float, first_ms: float) -> Joint:
    return Joint(setting, 0, 128, True, speed, first_ms=first_ms)


def test_of_all_numbers_of_clients_the_worst_is_judged() -> None:
    one = [joint("plain", 10, 10), joint("3", 8, 10), joint("auto", 9.9, 12)]
    one += [joint("server plain", 10, 10), joint("server 3", 12, 10)]
    four = [joint("plain", 20, 40), joint("3", 30, 40), joint("auto", 24, 40)]
    four += [joint("server plain", 21, 20), joint("server 3", 20, 40)]
    found = clients.verdicts([Cell("0.4", 1, one), Cell("0.4", 4, four)])
    assert held(found) == {
        "auto/plain, α = 0.4 with 1": (0.99, True),
        "auto/best, α = 0.4 with 4": (0.8, False),
        "plain/llama-server, α = 0.4 with 4": (0.952, False),
        "slowest first token/llama-server, α = 0.4 with 4": (2.0, False),
        "all clients/one that decodes plainly, α = 0.4 with 4": (2.4, True),
    }
    alone = held(clients.verdicts([Cell("0.4", 1, one[:3])]))
    assert set(alone) == {"auto/plain, α = 0.4 with 1", "auto/best, α = 0.4 with 1"}


def test_prompts_are_judged_by_both_clocks() -> None:
    rows = [Speeds(128, 99.0, 99.0, 100.0, 100.0), Speeds(512, 97.0, 99.0, 100.0, 100.0)]
    assert [each.holds for each in prefill.verdicts(rows)] == [False, True]
    assert prefill.verdicts([Speeds(128, 99.0, 99.0, None, None)]) == []


def test_a_gap_is_looked_for_after_the_newcomer_was_sent() -> None:
    stamps = [(0.0, 1), (0.5, 2), (0.6, 3), (0.7, 4), (1.0, 5), (1.1, 6), (3.0, 70)]
    alone, longest = gaps.gaps(stamps, sent=0.75, done=1.05)
    assert (round(alone, 3), round(longest, 3)) == (0.1, 0.3)
    assert round(gaps.gaps(stamps, sent=0.75, done=1.2)[1], 3) == 1.9
    for sent in (-1.0, 4.0):
        with pytest.raises(BenchError):
            gaps.gaps(stamps, sent, 5.0)


def test_the_longest_gap_is_judged_beyond_an_ordinary_one() -> None:
    found = [
        gaps.Gap(True, 500, 0, 20.0, 240.0, 900.0, 9, True),
        gaps.Gap(True, 4000, 0, 20.0, 290.0, 9000.0, 9, True),
        gaps.Gap(False, 4000, 0, 20.0, 2900.0, 9000.0, 9, True),
    ]
    what = "longest gap of a stream beyond an ordinary one, ms, 4000 tokens arriving"
    assert held(gaps.verdicts(found)) == {what: (270.0, False)}


def replayed(first_ms: Sequence[float], read: int) -> editor.Replayed:
    keys = [editor.Key(at, recorded.KEY, ms, read, 0, True, "x") for at, ms in enumerate(first_ms)]
    cold = editor.Key(0, recorded.FIRST, 9999.0, 9999, 0, True, "x")  # nobody waits for it twice
    return editor.Replayed([cold, *keys], (), 0)


def test_suggestions_on_the_screen_are_judged_where_both_had_to_be_asked() -> None:
    ours = [ghost.Key(ghost.SHOWN, ms, "x") for ms in (10.0, 20.0, 60.0)]
    ours += [ghost.Key(ghost.KEPT, 0.1, "x"), ghost.Key(ghost.NOTHING, 500.0, "")]
    theirs = [ghost.Key(ghost.SHOWN, ms, "x") for ms in (40.0, 40.0, 50.0)]
    assert held(ghost.verdicts(ours, theirs)) == {
        "key to suggestion p50 in an editor / llama-server's": (0.5, True),
        "key to suggestion p95 in an editor / llama-server's": (1.2, False),
    }
    assert ghost.verdicts(ours, []) == []


def test_an_editor_is_judged_beside_the_peer() -> None:
    ours, theirs = replayed([8.0] * 19 + [30.0], 100), replayed([10.0] * 20, 200)
    assert held(editor.verdicts(ours, theirs, editor.Same(6, 4, 1, 2, 0))) == {
        "first token p50 of an editor / llama-server's": (0.8, True),
        "first token p95 of an editor / llama-server's": (0.8, True),
        "tokens read per key of an editor / llama-server's": (0.5, True),
        "answers that differ from a cold request's by more than a near tie, cache exact": (
            1,
            False,
        ),
    }
    assert editor.verdicts(ours, None, editor.Same()) == []


def scored(*tokens: tuple[str, float]) -> list[dict[str, Any]]:
    """`completion_probabilities`: each token, and how much likelier it is than the next one."""
    return [
        {"token": token, "top_logprobs": [{"logprob": -0.5}, {"logprob": -0.5 - ahead}]}
        for token, ahead in tokens
    ]


def test_how_near_a_tie_was_is_told_where_two_answers_part() -> None:
    tokens = scored((" a", 5.0), (" b", 0.125), (" c", 3.0))
    assert editor.parting(tokens, " a x") == pytest.approx(0.125)
    assert editor.parting(tokens, "") == pytest.approx(5.0)
    assert editor.parting(tokens, " a b c d") == pytest.approx(
        3.0
    )  # it ends, and the other goes on
    assert editor.parting(tokens, " a b c") == math.inf
    assert editor.parting([], " a") == math.inf


def test_a_recorded_session_is_the_same_for_the_same_seed() -> None:
    one = recorded.session(120, 2, random.Random(7))
    assert one == recorded.session(120, 2, random.Random(7))
    assert one != recorded.session(120, 2, random.Random(8))
    waited = [step for step in one if step.kind in recorded.KINDS]
    assert len(waited) == 120
    warm = [step for step in one if step.kind == recorded.WARM_UP]
    assert [len(step.fields["input_extra"]) for step in warm] == [1, 2, 2, 2]  # the ring rotates
    assert warm[1].fields["input_extra"][0] != warm[2].fields["input_extra"][0]
    typed = [step.fields["prompt"] for step in waited if step.kind == recorded.KEY]
    assert sum(b.startswith(a) and len(b) == len(a) + 1 for a, b in itertools.pairwise(typed)) > 60
    silent = recorded.session(120, 2, random.Random(7), warm_ups=False)
    assert silent == [step for step in one if step.kind != recorded.WARM_UP]


def test_what_was_missed_is_in_the_report() -> None:
    missed = Verdict("so much", 0.5, 1.0)
    said = report(["a note"], {"part": Section("a table\n", [missed], 2, None)})
    assert said.startswith("# API\n\n- a note\n\na table\n\n- so much: 0.500 (must be ≥ 1): MISSED")
    assert said.endswith("outputs that left the right text: 2\n")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[int], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


def test_every_kind_has_its_turn_in_every_repetition() -> None:
    turns = list(in_turns("abc", 5, random.Random(0)))
    assert [repetition for repetition, _ in turns] == [n for n in range(5) for _ in "abc"]
    orders = {"".join(kind for at, kind in turns if at == n) for n in range(5)}
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(orders) > 1


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


def test_a_benchmark_that_is_ended_leaves_no_server_behind() -> None:
    program = str(Path(benchmarks.__file__).parent)
    command = [sys.executable, program, "api", "reissue", "--requests", "999", "--interval", "999"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stderr is not None
        assert any("an editor types" in line for line in running.stderr)
        ps = ["ps", "-o", "pid=", "--ppid", str(running.pid)]
        [daemon] = map(int, subprocess.check_output(ps, text=True).split())
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--llama-server", "/nowhere/llama-server"],
        ["--model", "/nowhere/model.gguf"],
        ["--acceptance", "1.5"],
        ["--tokens", "0"],
        ["--clients", "x"],
    ],
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
