"""An answer that writes a text anew ends where the rest certainly stays as it was."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from localspec.chat.rewriting import UNCHANGED_LINES, Rewriting

OLD = [f"line {number}" for number in range(20)]
words = st.lists(st.sampled_from(["a", "b", "", "  c", "d()"]), max_size=24)


def text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def feed(old: list[str], new: list[str], seed: int = 0, marks: tuple[str, ...] = ()) -> list[str]:
    """Return the lines that come of an answer in random pieces: what is taken of it, and the rest."""
    rng, rewriting, taken = random.Random(seed), Rewriting(text(old), marks), ""
    answer = text(new)
    while answer:
        size = rng.randrange(1, 9)
        piece, answer = answer[:size], answer[size:]
        end = rewriting.push(piece)
        if end is not None:
            taken += piece[:end]
            assert taken.endswith("\n")
            return [*taken.split("\n")[:-1], *old[rewriting.rest :]]
        taken += piece
    assert rewriting.rest is None
    return taken.split("\n")[:-1]


def test_a_changed_line_ends_the_answer_after_enough_lines() -> None:
    new = [*OLD[:3], "changed", *OLD[4:]]
    rewriting = Rewriting(text(OLD))
    end = rewriting.push(text(new))
    assert end == len(text(new[: 4 + UNCHANGED_LINES]))
    assert rewriting.rest == 4 + UNCHANGED_LINES


def test_an_unchanged_text_is_written_to_its_end() -> None:
    assert Rewriting(text(OLD)).push(text(OLD)) is None


def test_lines_that_come_or_go_are_found() -> None:
    for new in ([*OLD[:3], "new", "more", *OLD[3:]], [*OLD[:3], *OLD[7:]], ["new", *OLD], OLD[2:]):
        for seed in range(20):
            assert feed(OLD, new, seed) == new
            marked = [line.replace("9", "<|cursor|>9") for line in new]
            assert feed(OLD, marked, seed, ("<|cursor|>",))[10:] == new[10:]


def test_blank_or_repeated_lines_prove_nothing() -> None:
    for old in (["a", *[""] * 15, "b"], ["a", *["same"] * 15, "b"]):
        new = ["x", *old[1:-1], "y"]
        assert Rewriting(text(old)).push(text(new)) is None


@given(words, words, st.integers(0, 9))
def test_however_an_answer_is_cut_its_result_is_the_same(
    old: list[str], new: list[str], seed: int
) -> None:
    whole = feed(old, new)
    assert feed(old, new, seed) == whole
    # What is taken of the answer is the model's own text, and what follows is the old text's end.
    same = next(
        (n for n, pair in enumerate(zip(whole, new, strict=False)) if pair[0] != pair[1]), 0
    )
    assert not same or whole[same:] == old[len(old) - len(whole[same:]) :]
