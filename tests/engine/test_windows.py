"""How much of a text a draft sees is what it predicted best with, by the text's length."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.engine.cache.slot import ALL_TOKENS
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.windows import (
    MAX_COMPARED,
    MIN_COMPARED,
    WHOLE_INTERVAL,
    WINDOWS,
    WindowTable,
)


def test_a_window_is_chosen_for_texts_of_a_length_once_it_predicted_better() -> None:
    table = WindowTable()
    assert [table.list_windows(length) for length in (256, 257, 1_000_000)] == [
        [ALL_TOKENS],
        [256, ALL_TOKENS],
        [*WINDOWS, ALL_TOKENS],
    ]
    table.observe(5000, [10, 40, 20, 20], MIN_COMPARED // 2)
    assert table.choose(5000) == ALL_TOKENS  # too little is known
    table.observe(9000, [10, 40, 20, 20], MIN_COMPARED // 2)
    assert table.choose(5000) == table.choose(16_000) == 1024
    assert table.choose(4000) == table.choose(17_000) == ALL_TOKENS  # of these nothing is known
    table.observe(2000, [20, 60, 59], MIN_COMPARED)
    assert table.choose(2000) == ALL_TOKENS  # as good, and it hides nothing
    chosen = [table.choose(5000) for _ in range(4 * WHOLE_INTERVAL)]
    assert chosen.count(ALL_TOKENS) == 4  # so that it is noticed where that has become better
    for _ in range(2 * MAX_COMPARED // MIN_COMPARED):
        table.observe(5000, [0, 0, 0, MIN_COMPARED], MIN_COMPARED)
    assert table.choose(5000) == ALL_TOKENS


def test_what_was_compared_is_kept_with_the_calibration() -> None:
    calibration = Calibration()
    calibration.windows.observe(5000, [10, 90, 20, 20], MIN_COMPARED)
    kept = Calibration.from_dict(calibration.as_dict())
    assert kept.windows.choose(5000) == 1024
    assert kept.windows.as_list() == calibration.windows.as_list()


@pytest.mark.parametrize(
    "stored",
    [None, {}, [], [[0.0, 0.0]], [[5.0, "1"]] * 5, [[1.0] * (2 + at) for at in (0, 1, 2, 3, 3)]],
)
def test_a_damaged_table_is_not_used(stored: Any) -> None:
    assert WindowTable.from_list(stored).as_list() == WindowTable().as_list()
    damaged = [[1.0] * (2 + at) for at in range(5)]
    damaged[4][3] = 2.0  # more right predictions than predictions
    assert WindowTable.from_list(damaged).as_list() == WindowTable().as_list()
