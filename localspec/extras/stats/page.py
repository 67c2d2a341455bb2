"""Statistics of saved answers as one HTML page.

The page needs nothing else: no script, no font, no network.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from localspec.cli.terminal import layout, render
from localspec.errors import visible
from localspec.extras.stats.figures import COLUMNS, Series, merged, notes, series, summary, tables

_MAX_BARS = 90  # in a chart, which makes each 3 pixels wide on a phone
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --line: #d0d7de;
  --bar: #2f6f9f; --none: #eaeef2 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0f1419;
  --line: #30363d; --bar: #6cb0e0; --none: #1c232b } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem; max-width: 72rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .25rem 0 } .soft, figcaption, footer, th { color: var(--soft) }
figure { margin: 1.25rem 0; break-inside: avoid }
figcaption { display: flex; justify-content: space-between; flex-wrap: wrap; gap: 0 1rem }
figcaption b { color: var(--ink) }
.chart { display: flex; align-items: end; height: 6rem; gap: 1px; border-bottom: 1px solid var(--line) }
.chart i { flex: 1; min-width: 1px; background: var(--bar); border-radius: 2px 2px 0 0;
  print-color-adjust: exact; -webkit-print-color-adjust: exact }
.chart i.none { height: 3px; background: var(--none) }
table { width: 100%; table-layout: fixed; border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top } th { font-weight: 500; font-size: .85rem }
tr { break-inside: avoid } th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere;
  width: 25% }
footer { margin-top: 2rem; font-size: .9rem }
@media (max-width: 40rem) {
  thead { display: none } tr, td { display: block } tr { padding: .5rem 0;
  border-bottom: 1px solid var(--line) } td, td:first-child { border: 0; padding: .1rem 0; width: auto }
  td:first-child { font-weight: 600 } td:not(:first-child) { display: flex;
  justify-content: space-between } td:not(:first-child)::before { content: attr(data-name);
  color: var(--soft) } td:empty { display: none } }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --bar: #555;
  --none: #ddd } body { max-width: none; padding: 0; font-size: 10pt } h2 { break-after: avoid } }
"""


def page(statistics: dict[str, Any]) -> str:
    """Return the whole document."""
    title = "localspec statistics" + (f": {statistics['pair']}" if statistics["pair"] else "")
    heading, *sentences = summary(statistics)
    body = [f"<h1>{as_html(title)}</h1>", f"<p>{as_html(heading)}</p>"]
    body += [f"<p>{as_html(sentence)}</p>" for sentence in sentences]
    if statistics["total"]["answers"]:
        if len(statistics["by_day"]) > 1:  # a chart of a single day says nothing
            body.append(_draw_charts(statistics["by_day"]))
        body += [_section(*group) for group in tables(statistics)]
    body.append("<footer>")
    body += [f"<p>{as_html(sentence)}</p>" for sentence in notes(statistics)]
    when = time.strftime("%Y-%m-%d %H:%M")
    span = f"{statistics['since']} to {statistics['until']}"
    body.append(f"<p>{as_html(span)}; written {when}.</p></footer>")
    return document(title, body)


def document(title: str, body: Sequence[str], style: str = "") -> str:
    """Return a whole page. `body` is HTML already, and `style` follows the style of every page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{as_html(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def as_html(text: str) -> str:
    """Escape text for HTML, including control characters."""
    return escape(visible(text, lines=False))


def _draw_charts(days: list[dict[str, Any]]) -> str:
    groups, size = merged(days, _MAX_BARS)
    per = "per day" if size == 1 else f"per {size} days"
    return "\n".join(
        _draw_chart(plotted, [day["name"] for day in groups], per) for plotted in series(groups)
    )


def _draw_chart(plotted: Series, names: list[str], per: str) -> str:
    bars = []
    for value, text, name in zip(plotted.values, plotted.shown, names, strict=True):
        height = 100 * value / (plotted.most or 1) if value else 0
        attribute = f'style="height:{max(height, 2):.1f}%"' if value is not None else 'class="none"'
        label = text if value is not None else "none"
        bars.append(f'<i {attribute} title="{as_html(name)}: {label}"></i>')
    return (
        f"<figure><figcaption><b>{plotted.name} {per}</b><span>{plotted.range}</span></figcaption>"
        f'<div class="chart" role="img" aria-label="{plotted.name} {per}: {plotted.range}">'
        f"{''.join(bars)}</div><figcaption><span>{as_html(names[0])}</span><span>{as_html(names[-1])}</span>"
        "</figcaption></figure>"
    )


def _section(head: str, rows: list[tuple[str, list[str]]]) -> str:
    return f"<h2>By {head.lower()}</h2>\n{table((head, *COLUMNS), [[name, *cells] for name, cells in rows])}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. On a phone each row becomes a block with the headings beside its cells."""
    names = [as_html(name.capitalize()) for name in heads]
    lines = []
    for row_name, *cells in rows:
        cells_html = "".join(
            f'<td data-name="{name}">{as_html(cell)}</td>'
            for name, cell in zip(names[1:], cells, strict=True)
        )
        lines.append(f"<tr><td>{as_html(row_name)}</td>{cells_html}</tr>")
    header = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        f"<table><thead><tr>{header}</tr></thead>\n<tbody>" + "\n".join(lines) + "</tbody></table>"
    )


# ------------------------------------------------------------------------ text
# Tables and small plots of saved answers, on a terminal or in a pipe.


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
