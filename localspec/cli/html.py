"""Pages of HTML: the document around their parts, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from localspec.errors import replace_control_characters

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


def render_document(title: str, body: Sequence[str], style: str = "") -> str:
    """Return a whole page. `body` is HTML already, and `style` follows the style of every page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape_html(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def escape_html(text: str) -> str:
    """Escape text for HTML, including control characters."""
    return escape(replace_control_characters(text, lines=False))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. On a phone each row becomes a block with the headings beside its cells."""
    names = [escape_html(name.capitalize()) for name in heads]
    lines = []
    for row_name, *cells in rows:
        named = zip(names[1:], cells, strict=True)
        html = "".join(f'<td data-name="{name}">{escape_html(cell)}</td>' for name, cell in named)
        lines.append(f"<tr><td>{escape_html(row_name)}</td>{html}</tr>")
    header = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "\n".join(lines)
    return f"<table><thead><tr>{header}</tr></thead>\n<tbody>{body}</tbody></table>"


def draw_chart(title: str, bars: Sequence[tuple[str, float | None, str]], span: str) -> str:
    """Return a figure with a bar for each name, value and text of the value; None is a day without one.

    `span` is the range of the values as text.
    """
    highest = max((value for _, value, _ in bars if value is not None), default=0.0) or 1
    shapes = []
    for name, value, text in bars:
        height = max(100 * value / highest if value else 0, 2)
        attribute = 'class="none"' if value is None else f'style="height:{height:.1f}%"'
        label = "none" if value is None else text
        shapes.append(f'<i {attribute} title="{escape_html(name)}: {label}"></i>')
    label, first, last = map(escape_html, (title, bars[0][0], bars[-1][0]))
    return (
        f"<figure><figcaption><b>{label}</b><span>{span}</span></figcaption>"
        f'<div class="chart" role="img" aria-label="{label}: {span}">{"".join(shapes)}</div>'
        f"<figcaption><span>{first}</span><span>{last}</span></figcaption></figure>"
    )
