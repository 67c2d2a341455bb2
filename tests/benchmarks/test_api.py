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
    hostile,
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
from tests.support.extras import needs
from tests.support.patience import PATIENCE

SMALL = (
    "--size tiny --length 100 --turns 2 --requests 5 --tokens 400 --lengths 40 90 --arriving 200 "
    "--stream 1000 --keystrokes 6 --cold 3"
).split()


@needs("editors")
@pytest.mark.slow
def test_every_part_runs_with_right_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    parts = "conversation clients prefill gaps editor ghost reissue".split()
    arguments = [*parts, *SMALL, "--repetitions", "1", "--acceptance", "0.7", "--clients", "2"]
    assert main([*arguments, "--work", str(tmp_path), "--json", str(out)]) == 0
    stored = json.loads(out.read_text())
    # Each turn reads 40 new tokens and the last generated one; the rest is in the cache.
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
    assert len(typed) == (5 if shutil.which("vim") else 0)  # the first key is not counted
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
    result = json.loads(out.read_text())["several"]
    cells = {(cell["editor"], cell["chat"]): cell for cell in result["cells"]}
    assert result["loads"] == 0
    assert [*sorted(cells)] == [("", True), (several.SECOND, False), (several.SECOND, True)]
    assert [len(cells[kind]["first_ms"]) for kind in sorted(cells)] == [0, 2, 2]
    assert all(cell["speed"] > 0 for cell in cells.values() if cell["chat"])
    assert "loads of pairs meanwhile: 0" in capsys.readouterr().out


def make_cell(
    editor: str, chat: bool, first: Sequence[float], speed: float | None = None
) -> several.Cell:
    return several.Cell(True, 0, editor, chat, first, speed, 20.0 if chat else None, 0)


def test_an_editor_beside_a_chat_may_wait_one_pass_longer() -> None:
    cells = [
        make_cell("", True, [], 40.0),
        make_cell("second pair", False, [100.0, 90.0, 200.0]),
        make_cell("second pair", True, [140.0, 120.0, 300.0], 30.0),
    ]
    label = "first token p{} on the second pair beside a chat, less a pass / alone"
    assert judged_values(several.verdicts(cells, 1)) == {
        label.format(50): (1.2, True),
        label.format(95): (1.4, False),
        "loads of pairs meanwhile": (1, False),
    }
    assert several.kept_speed_share(cells, True, "second pair") == 0.75


def make_turn(ours: float, theirs: float | None) -> Turn:
    return Turn(3000, 41, ours, ours - 1, theirs, True)


def judged_values(verdicts: Sequence[Verdict]) -> dict[str, tuple[float, bool]]:
    return {verdict.what: (round(verdict.value, 3), verdict.holds) for verdict in verdicts}


def test_a_turn_may_begin_slightly_later_than_the_peers() -> None:
    turns = [make_turn(130.0, 100.0), make_turn(110.0, 100.0), make_turn(115.0, 100.0)]
    label = "first token of the next turn / llama-server's"
    assert judged_values(conversation.verdicts(turns)) == {label: (1.15, True)}
    assert conversation.verdicts([make_turn(130.0, None)]) == []


def test_slots_that_stay_busy_are_reported() -> None:
    typed = reissue.Reissued(200, 20.0, None, True, 3, 9.0)
    assert judged_values(reissue.verdicts(typed)) == {
        "slots busy after the last keystroke": (1, False)
    }


def make_joint(setting: str, speed: float, first_ms: float) -> Joint:
    return Joint(setting, 0, 128, True, speed, first_ms=first_ms)


def test_the_worst_number_of_clients_is_judged() -> None:
    single = [make_joint("plain", 10, 10), make_joint("3", 8, 10), make_joint("auto", 9.9, 12)]
    single += [make_joint("server plain", 10, 10), make_joint("server 3", 12, 10)]
    four = [make_joint("plain", 20, 40), make_joint("3", 30, 40), make_joint("auto", 24, 40)]
    four += [make_joint("server plain", 21, 20), make_joint("server 3", 20, 40)]
    judged = clients.verdicts([Cell("0.4", 1, single), Cell("0.4", 4, four)])
    assert judged_values(judged) == {
        "auto/plain, α = 0.4 with 1": (0.99, True),
        "auto/best, α = 0.4 with 4": (0.8, False),
        "plain/llama-server, α = 0.4 with 4": (0.952, False),
        "slowest first token/llama-server, α = 0.4 with 4": (2.0, False),
        "all clients/one that decodes plainly, α = 0.4 with 4": (2.4, True),
    }
    alone = judged_values(clients.verdicts([Cell("0.4", 1, single[:3])]))
    assert set(alone) == {"auto/plain, α = 0.4 with 1", "auto/best, α = 0.4 with 1"}


def test_prompts_are_judged_by_both_clocks() -> None:
    rows = [Speeds(128, 99.0, 99.0, 100.0, 100.0), Speeds(512, 97.0, 99.0, 100.0, 100.0)]
    assert [verdict.holds for verdict in prefill.verdicts(rows)] == [False, True]
    assert prefill.verdicts([Speeds(128, 99.0, 99.0, None, None)]) == []


def test_a_gap_is_measured_after_the_new_request_was_sent() -> None:
    stamps = [(0.0, 1), (0.5, 2), (0.6, 3), (0.7, 4), (1.0, 5), (1.1, 6), (3.0, 70)]
    alone, longest = gaps.gaps(stamps, sent=0.75, done=1.05)
    assert (round(alone, 3), round(longest, 3)) == (0.1, 0.3)
    assert round(gaps.gaps(stamps, sent=0.75, done=1.2)[1], 3) == 1.9
    for sent_at in (-1.0, 4.0):
        with pytest.raises(BenchError):
            gaps.gaps(stamps, sent_at, 5.0)


def test_hostile_requests_are_of_every_kind_and_the_same_for_a_seed() -> None:
    requests = [hostile.request(random.Random(seed)) for seed in range(150)]
    assert requests[:20] == [hostile.request(random.Random(seed)) for seed in range(20)]
    paths = {request.path.partition("?")[0] for request in requests}
    assert paths == {*hostile._BODIES, "/v1/stream"}
    bodies = [json.dumps(request.body) for request in requests]
    assert any(request.conversation for request in requests)
    for field in ("image_url", "file_data", "dry_penalty_last_n", "background"):
        assert any(f'"{field}"' in body for body in bodies)


def test_the_longest_gap_is_judged_less_an_ordinary_one() -> None:
    measured = [
        gaps.Gap(True, 500, 0, 20.0, 240.0, 900.0, 9, True),
        gaps.Gap(True, 4000, 0, 20.0, 290.0, 9000.0, 9, True),
        gaps.Gap(False, 4000, 0, 20.0, 2900.0, 9000.0, 9, True),
    ]
    label = "longest gap of a stream beyond an ordinary one, ms, 4000 tokens arriving"
    assert judged_values(gaps.verdicts(measured)) == {label: (270.0, False)}


def make_replay(first_ms: Sequence[float], read: int) -> editor.Replayed:
    keys = [
        editor.Key(index, recorded.KEY, ms, read, 0, True, "x") for index, ms in enumerate(first_ms)
    ]
    # The cold request happens once, so it must not count.
    cold = editor.Key(0, recorded.FIRST, 9999.0, 9999, 0, True, "x")
    return editor.Replayed([cold, *keys], (), 0)


def test_only_suggestions_that_both_servers_made_are_judged() -> None:
    ours = [ghost.Key(ghost.SHOWN, ms, "x") for ms in (10.0, 20.0, 60.0)]
    ours += [ghost.Key(ghost.KEPT, 0.1, "x"), ghost.Key(ghost.NOTHING, 500.0, "")]
    theirs = [ghost.Key(ghost.SHOWN, ms, "x") for ms in (40.0, 40.0, 50.0)]
    assert judged_values(ghost.verdicts(ours, theirs)) == {
        "key to suggestion p50 in an editor / llama-server's": (0.5, True),
        "key to suggestion p95 in an editor / llama-server's": (1.2, False),
    }
    assert ghost.verdicts(ours, []) == []


def test_an_editor_is_judged_against_the_peer() -> None:
    ours, theirs = make_replay([8.0] * 19 + [30.0], 100), make_replay([10.0] * 20, 200)
    assert judged_values(editor.verdicts(ours, theirs, editor.Same(6, 4, 1, 2, 0))) == {
        "first token p50 of an editor / llama-server's": (0.8, True),
        "first token p95 of an editor / llama-server's": (0.8, True),
        "tokens read per key of an editor / llama-server's": (0.5, True),
        "answers that differ from a cold request's by more than a near tie, cache exact": (
            1,
            False,
        ),
    }
    assert editor.verdicts(ours, None, editor.Same()) == []


def make_probabilities(*tokens: tuple[str, float]) -> list[dict[str, Any]]:
    """Return `completion_probabilities`: each token, and how much likelier it is than the next one."""
    return [
        {"token": token, "top_logprobs": [{"logprob": -0.5}, {"logprob": -0.5 - ahead}]}
        for token, ahead in tokens
    ]


def test_the_margin_where_two_answers_diverge_is_found() -> None:
    tokens = make_probabilities((" a", 5.0), (" b", 0.125), (" c", 3.0))
    assert editor.parting(tokens, " a x") == pytest.approx(0.125)
    assert editor.parting(tokens, "") == pytest.approx(5.0)
    assert editor.parting(tokens, " a b c d") == pytest.approx(
        3.0
    )  # one answer ends, the other continues
    assert editor.parting(tokens, " a b c") == math.inf
    assert editor.parting([], " a") == math.inf


def test_a_recorded_session_is_the_same_for_the_same_seed() -> None:
    session = recorded.session(120, 2, random.Random(7))
    assert session == recorded.session(120, 2, random.Random(7))
    assert session != recorded.session(120, 2, random.Random(8))
    waited = [step for step in session if step.kind in recorded.KINDS]
    assert len(waited) == 120
    warm = [step for step in session if step.kind == recorded.WARM_UP]
    assert [len(step.fields["input_extra"]) for step in warm] == [1, 2, 2, 2]  # the ring rotates
    assert warm[1].fields["input_extra"][0] != warm[2].fields["input_extra"][0]
    typed = [step.fields["prompt"] for step in waited if step.kind == recorded.KEY]
    assert sum(b.startswith(a) and len(b) == len(a) + 1 for a, b in itertools.pairwise(typed)) > 60
    silent = recorded.session(120, 2, random.Random(7), warm_ups=False)
    assert silent == [step for step in session if step.kind != recorded.WARM_UP]


def test_a_missed_limit_is_in_the_report() -> None:
    missed = Verdict("so much", 0.5, 1.0)
    text = report(["a note"], {"part": Section("a table\n", [missed], 2, None)})
    assert text.startswith("# API\n\n- a note\n\na table\n\n- so much: 0.500 (must be ≥ 1): MISSED")
    assert text.endswith("outputs that left the right text: 2\n")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_sufficient_value(values: list[int], share: float) -> None:
    result = percentile(values, share)
    assert result in values
    assert sum(value <= result for value in values) >= share * len(values) - 1e-9
    assert sum(value < result for value in values) < share * len(values)


def test_every_kind_has_its_turn_in_every_repetition() -> None:
    turns = list(in_turns("abc", 5, random.Random(0)))
    assert [repetition for repetition, _ in turns] == [n for n in range(5) for _ in "abc"]
    orders = {"".join(kind for index, kind in turns if index == n) for n in range(5)}
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(orders) > 1


def test_the_time_to_the_first_text_is_measured() -> None:
    events = [{"content": ""}, {"content": "a"}, {"content": "b", "stop": True}]
    streamed = timed(0.0, map(json.dumps, events))
    assert (streamed.text, streamed.last["stop"]) == ("ab", True)
    assert streamed.first_s > 0
    for wrong in ([{"content": ""}], [{"error": {"message": "no"}}]):
        with pytest.raises(BenchError):
            timed(0.0, map(json.dumps, wrong))


def test_joint_speed_covers_the_time_when_all_clients_write() -> None:
    early = [(0.0, 1), (1.0, 3), (2.0, 7), (3.0, 9)]
    late = [(1.0, 1), (2.0, 2), (3.0, 4), (9.0, 20)]
    assert joint_speed([early]) == 8 / 3
    assert joint_speed([early, late]) == (6 + 3) / 2
    with pytest.raises(BenchError):
        joint_speed([early, [(4.0, 1), (5.0, 2)]])


def test_a_terminated_benchmark_leaves_no_server_running() -> None:
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
        assert running.wait(PATIENCE) == 128 + signal.SIGTERM
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
def test_wrong_usage_is_reported_before_any_work(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--work", str(tmp_path / "work"), *wrong])
    assert stopped.value.code == 2
    assert not (tmp_path / "work").exists()


def test_an_unknown_part_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense", "--work", str(tmp_path)]) == 1
    assert "There is no part 'nonsense'" in capsys.readouterr().err
