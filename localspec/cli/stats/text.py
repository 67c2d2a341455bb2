"""Tables and small plots of kept answers, on a terminal or in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from localspec.cli.stats.figures import COLUMNS, Series, merged, notes, series, summary, tables
from localspec.cli.terminal import layout, render

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_ROOM = 80  # where there is no terminal
_BESIDE = 32  # cells: a plot's name and its range
_MOST = 60  # marks in a plot


def show(found: dict[str, Any]) -> None:
    for sentence in summary(found):
        render.line(sentence)
    if found["total"]["answers"]:
        for head, rows in tables(found):
            render.line("")
            render.table([[head, *COLUMNS], *([name, *cells] for name, cells in rows)])
        if len(found["by_day"]) > 1:  # of one day a plot says nothing
            render.line("")
            _plots(found["by_day"])
    render.line("")
    for sentence in notes(found):
        render.line(sentence)


def _plots(days: list[dict[str, Any]]) -> None:
    room = (layout.width(sys.stdout) or _ROOM) - _BESIDE
    shown, each = merged(days, min(room, _MOST))
    bars = _BARS if _draws_blocks() else _ASCII
    plotted = series(shown)
    render.fields([(one.name, f"{sparkline(one, bars)}  {one.range}") for one in plotted])
    per = "day" if each == 1 else f"{each} days"
    render.line(f"One mark per {per}, from {days[0]['name']} to {days[-1]['name']}.")


def _draws_blocks() -> bool:
    utf = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")
    return utf and os.environ.get("TERM") != "dumb"


def sparkline(plotted: Series, bars: Sequence[str]) -> str:
    """A mark for each value, from 0 to the largest; a blank where there is none."""
    top = plotted.most or 1.0
    return "".join(
        " " if value is None else bars[min(int(value / top * len(bars)), len(bars) - 1)]
        for value in plotted.values
    )
