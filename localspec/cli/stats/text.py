"""Tables and small plots of saved answers, on a terminal or in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from localspec.cli.stats.figures import COLUMNS, Series, merged, notes, series, summary, tables
from localspec.cli.terminal import layout, render

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_DEFAULT_COLUMNS = 80  # if there is no terminal
_LABEL_COLUMNS = 32  # for a plot's name and its range
_MAX_MARKS = 60  # in a plot


def show(statistics: dict[str, Any]) -> None:
    """Print the sentences, tables and plots."""
    for sentence in summary(statistics):
        render.line(sentence)
    if statistics["total"]["answers"]:
        for heading, rows in tables(statistics):
            render.line("")
            render.table([[heading, *COLUMNS], *([name, *cells] for name, cells in rows)])
        if len(statistics["by_day"]) > 1:  # a plot of a single day says nothing
            render.line("")
            _print_plots(statistics["by_day"])
    render.line("")
    for sentence in notes(statistics):
        render.line(sentence)


def _print_plots(days: list[dict[str, Any]]) -> None:
    columns = (layout.width(sys.stdout) or _DEFAULT_COLUMNS) - _LABEL_COLUMNS
    groups, size = merged(days, min(columns, _MAX_MARKS))
    bars = _BARS if _supports_blocks() else _ASCII
    plotted = series(groups)
    render.fields([(item.name, f"{sparkline(item, bars)}  {item.range}") for item in plotted])
    per = "day" if size == 1 else f"{size} days"
    render.line(f"One mark per {per}, from {days[0]['name']} to {days[-1]['name']}.")


def _supports_blocks() -> bool:
    utf = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")
    return utf and os.environ.get("TERM") != "dumb"


def sparkline(plotted: Series, bars: Sequence[str]) -> str:
    """Return a mark for each value, from 0 to the largest; a blank if there is no value."""
    top = plotted.most or 1.0
    return "".join(
        " " if value is None else bars[min(int(value / top * len(bars)), len(bars) - 1)]
        for value in plotted.values
    )
