"""Statistics of saved answers: as one HTML page, or as tables and small plots on a terminal or in a pipe.

The HTML page needs nothing else: no script, no font, no network.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from localspec.cli.html import draw_chart, escape_html, render_document, table
from localspec.cli.terminal import layout, render
from localspec.extras.stats.figures import (
    CLIENT_COLUMNS,
    COLUMNS,
    Series,
    client_rows,
    group_tables,
    make_series,
    merge_days,
    note_sentences,
    summary_sentences,
)

_MAX_BARS = 90  # in a chart, which makes each 3 pixels wide on a phone


def render_page(statistics: dict[str, Any]) -> str:
    """Return the whole document."""
    title = "localspec statistics" + (f": {statistics['pair']}" if statistics["pair"] else "")
    heading, *sentences = summary_sentences(statistics)
    body = [f"<h1>{escape_html(title)}</h1>", f"<p>{escape_html(heading)}</p>"]
    body += [f"<p>{escape_html(sentence)}</p>" for sentence in sentences]
    if statistics["total"]["answers"]:
        if len(statistics["by_day"]) > 1:  # a chart of a single day says nothing
            body.append(_draw_charts(statistics["by_day"]))
        body += [_section(*group) for group in group_tables(statistics)]
    if clients := client_rows(statistics):
        body.append(f"<h2>Read ahead</h2>\n{table(CLIENT_COLUMNS, clients)}")
    body.append("<footer>")
    body += [f"<p>{escape_html(sentence)}</p>" for sentence in note_sentences(statistics)]
    when = time.strftime("%Y-%m-%d %H:%M")
    span = f"{statistics['since']} to {statistics['until']}"
    body.append(f"<p>{escape_html(span)}; written {when}.</p></footer>")
    return render_document(title, body)


def _draw_charts(days: list[dict[str, Any]]) -> str:
    groups, size = merge_days(days, _MAX_BARS)
    per = "per day" if size == 1 else f"per {size} days"
    names = [day["name"] for day in groups]
    return "\n".join(
        draw_chart(
            f"{plotted.name} {per}",
            [*zip(names, plotted.values, plotted.texts, strict=True)],
            plotted.range,
        )
        for plotted in make_series(groups)
    )


def _section(head: str, rows: list[tuple[str, list[str]]]) -> str:
    return f"<h2>By {head.lower()}</h2>\n{table((head, *COLUMNS), [[name, *cells] for name, cells in rows])}"


_BARS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_DEFAULT_COLUMNS = 80  # if there is no terminal
_LABEL_COLUMNS = 32  # for a plot's name and its range
_MAX_MARKS = 60  # in a plot


def print_statistics(statistics: dict[str, Any]) -> None:
    """Print the sentences, tables and plots."""
    for sentence in summary_sentences(statistics):
        render.line(sentence)
    if statistics["total"]["answers"]:
        for heading, rows in group_tables(statistics):
            render.line("")
            render.table([[heading, *COLUMNS], *([name, *cells] for name, cells in rows)])
        if len(statistics["by_day"]) > 1:  # a plot of a single day says nothing
            render.line("")
            _print_plots(statistics["by_day"])
    if clients := client_rows(statistics):
        render.line("")
        render.table([CLIENT_COLUMNS, *clients])
    render.line("")
    for sentence in note_sentences(statistics):
        render.line(sentence)


def _print_plots(days: list[dict[str, Any]]) -> None:
    columns = (layout.width(sys.stdout) or _DEFAULT_COLUMNS) - _LABEL_COLUMNS
    groups, size = merge_days(days, min(columns, _MAX_MARKS))
    bars = _BARS if _supports_blocks() else _ASCII
    plotted = make_series(groups)
    render.fields([(item.name, f"{sparkline(item, bars)}  {item.range}") for item in plotted])
    per = "day" if size == 1 else f"{size} days"
    render.line(f"One mark per {per}, from {days[0]['name']} to {days[-1]['name']}.")


def _supports_blocks() -> bool:
    utf = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")
    return utf and os.environ.get("TERM") != "dumb"


def sparkline(plotted: Series, bars: Sequence[str]) -> str:
    """Return a mark for each value, from 0 to the largest; a blank if there is no value."""
    top = plotted.maximum or 1.0
    return "".join(
        " " if value is None else bars[min(int(value / top * len(bars)), len(bars) - 1)]
        for value in plotted.values
    )
