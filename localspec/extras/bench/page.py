"""A report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from localspec.cli.html import escape_html, render_document, table
from localspec.extras.bench import text
from localspec.extras.bench.plots import draw_plots
from localspec.extras.bench.report import Report, Workload

_STYLE = """
h1 { overflow-wrap: anywhere }
@media (min-width: 64rem) { table { table-layout: auto }
  td:not(:last-child) { white-space: nowrap } th:first-child, td:first-child { width: auto } }
.said { font-size: 1.25rem; margin: .5rem 0 1rem } dl { display: grid; gap: .1rem 1rem;
  grid-template-columns: max-content 1fr; margin: 0 } dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 0 2rem; align-items: start } .plots figcaption b { font-weight: 600 }
.bars i { display: inline-block; height: .7em; margin-right: .5rem; background: var(--bar);
  print-color-adjust: exact; -webkit-print-color-adjust: exact }
@media print { .plots { grid-template-columns: 1fr 1fr }
  table { font-size: 8.5pt; table-layout: auto } th { font-size: 7.5pt } th, td { padding: .2rem .25rem }
  td:not(:first-child, :last-child) { white-space: nowrap } }
"""


def render_page(report: Report) -> str:
    """Return the whole document."""
    title = f"localspec bench: {report.pair}"
    body = [
        f"<h1>{escape_html(title)}</h1>",
        f'<p class="said">{escape_html(report.sentence)}</p>',
        *(f"<p>{escape_html(warning)}</p>" for warning in text.list_warnings(report)),
    ]
    facts = (map(escape_html, fact) for fact in text.list_facts(report))
    body.append(f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in facts)}</dl>")
    body += ['<div class="plots">', *draw_plots(report), "</div>"]
    for sampling, heading in text.HEADINGS:
        if works := [work for work in report.workloads if work.sampling == sampling]:
            body += [f"<h2>{escape_html(heading)}</h2>", _known_columns(text.workload_table(works))]
    if theirs := text.theirs_rows(report):
        body += [f"<h2>{escape_html(text.theirs_heading(report))}</h2>", _known_columns(theirs)]
    if ranking := text.ranking_rows(report):
        heading = "Drafts for this target, the best first; the rest of this page is of that one"
        body += [f"<h2>{heading}</h2>", _known_columns(ranking)]
    if theory := text.theory_rows(report.workloads):
        body += [
            "<h2>By the formula, and by replay with the costs of passes here</h2>",
            _known_columns(theory),
        ]
    body += ["<h2>Acceptance</h2>", _known_columns(_acceptance_rows(report.workloads))]
    body.append("<footer>")
    body += [f"<p>{escape_html(note)}</p>" for note in text.list_notes(report)]
    footer = f"Measured {report.when} UTC with localspec {report.localspec}. Rates are tokens per second from"
    body.append(f"<p>{escape_html(footer)} an answer’s first token to its last.</p></footer>")
    return render_document(title, body, _STYLE)


def _known_columns(rows: list[list[str]]) -> str:
    """Return a table without the columns that are empty in all rows."""
    columns = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    header, *cells = ([row[column] for column in columns] for row in rows)
    return table(header, cells)


def _acceptance_rows(workloads: list[Workload]) -> list[list[str]]:
    """Return the rows for the three definitions that are all called acceptance rate."""
    rows = [
        [
            *("WORK", "DRAFTED", "ACCEPTED", "OF DRAFTED TOKENS", "OF THE ANSWER"),
            *("IF ALL BEFORE WERE", "MEAN LENGTH", "SOURCES"),
        ]
    ]
    for work in workloads:
        if work.sampling != "greedy" or (acceptance := work.acceptance) is None:
            continue
        counts = (
            f"{name} {accepted} of {drafted}"
            for name, (drafted, accepted) in acceptance.sources.items()
        )
        rates = (acceptance.of_drafted, acceptance.of_answer, acceptance.conditional)
        rows.append(
            [
                work.name,
                f"{acceptance.drafted:,}",
                f"{acceptance.accepted:,}",
                *(text.format_known(rate, lambda share: f"{100 * share:.0f}%") for rate in rates),
                text.format_known(acceptance.mean_length, "{:.2f}".format),
                ", ".join(counts),
            ]
        )
    return rows
