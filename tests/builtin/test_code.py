"""Tests of holes in code, for training and for evaluation."""

from __future__ import annotations

import random
from pathlib import Path

from builtin_pair.code import Code, SourceFile, is_held_out, line_hole, lines_within
from builtin_pair.evaluate import Agreement
from builtin_pair.holes import Gap, code_lines, load_gap, parses

LINES = ["def f(x):\n", '    """Say\n', "    if it is.\n", '    """\n', "    return x + 1\n"]


def test_a_line_hole_starts_after_the_indentation() -> None:
    hole = line_hole(LINES, 4)
    assert (hole.middle, hole.suffix) == ("return x + 1", "\n")
    assert hole.prefix.endswith('"""\n    ')


def test_every_hole_puts_the_file_together_again() -> None:
    source = Code([SourceFile("shutil.py", tuple(LINES * 30))])
    rng = random.Random(0)
    text = "".join(LINES * 31)
    for _ in range(200):
        hole = source.hole(rng)
        assert hole.prefix + hole.middle + hole.suffix in text


def test_reach_widens_the_context_of_a_hole() -> None:
    source = Code([SourceFile("shutil.py", tuple(LINES * 100))])

    def longest(reach: float) -> int:
        rng = random.Random(0)
        holes = [source.hole(rng, reach) for _ in range(200)]
        return max(len(hole.prefix) for hole in holes)

    assert longest(1.0) <= 600 < 1500 < longest(3.5)


def test_a_gap_is_a_line_in_as_much_of_its_file_as_asked(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("".join(LINES * 100), encoding="utf-8")
    gap = Gap("m.py", 250, "return x + 1")
    near, wide = (load_gap(gap, tmp_path, reach) for reach in (1.0, 2.0))
    assert near is not None
    assert wide is not None
    assert near[1].middle == wide[1].middle == gap.text
    assert wide[1].prefix.endswith(near[1].prefix)
    assert 450 < len(near[1].prefix) <= 504 < 950 < len(wide[1].prefix) <= 1004
    assert len(near[1].suffix) <= 301 < 550 < len(wide[1].suffix) <= 601
    assert load_gap(Gap("m.py", 250, "return x"), tmp_path) is None


def test_held_out_files_are_not_trained_on() -> None:
    names = [f"module{n}.py" for n in range(200)]
    trained = {f.name for f in Code([SourceFile(n, tuple(LINES)) for n in names]).files}
    assert trained == {name for name in names if not is_held_out(name)}
    assert 5 < len(names) - len(trained) < 60


def test_prose_in_strings_is_no_code_line() -> None:
    padding = ["import os\n"] * 5
    gaps = list(code_lines(SourceFile("m.py", tuple(padding + LINES))))
    assert [gap.text for gap in gaps] == ["def f(x):", "return x + 1"]


def test_a_filled_file_either_parses_or_not() -> None:
    assert parses(LINES, 4, "return x")
    assert not parses(LINES, 4, "return (")


def test_acceptance_replays_rounds_of_fixed_depth() -> None:
    agreement = Agreement([[True, True, False, True, True, True, True]])
    # Round 1 drafts 3 and accepts 2, the third comes from the target; round 2 accepts 3; one token remains.
    assert agreement.accepted_of_drafted(3) == 5 / 6
    assert agreement.rate() == 6 / 7


def test_lines_are_counted_while_they_fit() -> None:
    assert lines_within(LINES, len(LINES[0]) + len(LINES[1])) == 2
    assert lines_within(LINES, 3) == 0
    assert lines_within(LINES, 10_000) == len(LINES)
