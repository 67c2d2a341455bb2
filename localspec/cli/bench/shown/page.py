"""A report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from localspec.cli.bench.report import Report, Workload
from localspec.cli.bench.shown import text
from localspec.cli.bench.shown.plots import plots
from localspec.cli.stats.page import as_html, document, table

_STYLE = """
:root { --other: #b35c1e } @media (prefers-color-scheme: dark) { :root { --other: #f0a35e } }
h1 { overflow-wrap: anywhere }
@media (min-width: 64rem) { table { table-layout: auto }
  td:not(:last-child) { white-space: nowrap } th:first-child, td:first-child { width: auto } }
.said { font-size: 1.25rem; margin: .5rem 0 1rem } dl { display: grid; gap: .1rem 1rem;
  grid-template-columns: max-content 1fr; margin: 0 } dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 0 2rem; align-items: start } .plots svg { width: 100%; height: auto; max-width: 34rem }
.plots figcaption b { font-weight: 600 } table.wide th:first-child { width: 16% }
@media print { :root { --other: #999 } .plots { grid-template-columns: 1fr 1fr }
  table { font-size: 8.5pt; table-layout: auto } th { font-size: 7.5pt } th, td { padding: .2rem .25rem }
  td:not(:first-child, :last-child) { white-space: nowrap } }
"""


def page(report: Report) -> str:
    """The whole document; see `plots.check`."""
    title = f"localspec bench: {report.pair}"
    body = [
        f"<h1>{as_html(title)}</h1>",
        f'<p class="said">{as_html(report.sentence)}</p>',
        *(f"<p>{as_html(each)}</p>" for each in text.warnings(report)),
        _facts(report),
    ]
    body.append('<div class="plots">')
    body += [_figure(name, svg) for name, svg in plots(report)]
    body.append("</div>")
    for sampling, heading in text.HEADINGS:
        if some := [each for each in report.workloads if each.sampling == sampling]:
            body += [f"<h2>{as_html(heading)}</h2>", _rows(text.table(some))]
    if report.theirs:
        body += [f"<h2>{as_html(text.beside(report))}</h2>", _rows(text.theirs(report))]
    if report.drafts:
        heading = "Drafts for this target, the best first; the rest of this page is of that one"
        body += [f"<h2>{heading}</h2>", _rows(text.ranking(report))]
    if theory := text.theories(report.workloads):
        body += [
            "<h2>By the formula, and by replay with the costs of passes here</h2>",
            _rows(theory),
        ]
    body += ["<h2>Acceptance</h2>", _rows(_acceptance(report.workloads))]
    body.append("<footer>")
    body += [f"<p>{as_html(note)}</p>" for note in text.notes(report)]
    told = f"Measured {report.when} UTC with localspec {report.localspec}. Rates are tokens per second from"
    body.append(f"<p>{as_html(told)} an answer’s first token to its last.</p></footer>")
    return document(title, body, _STYLE)


def _facts(report: Report) -> str:
    rows = "".join(
        f"<dt>{as_html(name)}</dt><dd>{as_html(value)}</dd>" for name, value in text.facts(report)
    )
    return f"<dl>{rows}</dl>"


def _figure(name: str, svg: str) -> str:
    return (
        f'<figure role="img" aria-label="{as_html(name)}"><figcaption><b>{as_html(name)}</b></figcaption>'
        f"{svg}</figure>"
    )


def _rows(rows: list[list[str]]) -> str:
    """Without columns of which nothing is known."""
    known = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    head, *rest = ([row[at] for at in known] for row in rows)
    return table(head, rest)


def _acceptance(workloads: list[Workload]) -> list[list[str]]:
    """The three definitions, which are all called acceptance rate."""
    rows = [
        [
            "WORK",
            "DRAFTED",
            "ACCEPTED",
            "OF DRAFTED TOKENS",
            "OF THE ANSWER",
            "IF ALL BEFORE WERE",
            "MEAN LENGTH",
            "SOURCES",
        ]
    ]
    for each in workloads:
        if each.sampling != "greedy" or (found := each.acceptance) is None:
            continue
        sources = ", ".join(
            f"{name} {kept} of {tried}" for name, (tried, kept) in found.sources.items()
        )
        shares = (found.of_drafted, found.of_answer, found.conditional)
        told = ["" if share is None else f"{100 * share:.0f}%" for share in shares]
        length = "" if found.mean_length is None else f"{found.mean_length:.2f}"
        rows.append(
            [each.name, f"{found.drafted:,}", f"{found.accepted:,}", *told, length, sources]
        )
    return rows
