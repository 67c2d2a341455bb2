"""A report as one HTML page with charts that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles

from localspec.cli.html import draw_chart, escape_html, render_document, table
from localspec.cli.terminal.figures import format_share
from localspec.extras.bench import text
from localspec.extras.bench.report import Report, Round, Run, Workload
from localspec.extras.bench.summary import acceptance_by_position
from localspec.extras.bench.text import format_estimate, format_interval

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


_MAX_TRACES = 4  # kinds of work whose depths are drawn
_POINTS_PER_TRACE = 10
_MIN_DRAFTS = 5  # drafts at a position in a pass, below which their acceptance is not drawn
_QUANTILES = 20  # bars of a distribution


def draw_plots(report: Report) -> list[str]:
    """Return figures of HTML. Those for which nothing was measured are left out."""
    return [figure for draw in _PLOTS for figure in draw(report)]


def _draw_speed_ups(report: Report) -> Iterator[str]:
    """Draw the speed-up of each kind of work at temperature 0, with its interval as text."""
    rows = [
        (work.name, estimate)
        for work in report.workloads
        if work.sampling == "greedy" and (estimate := work.speed_up or work.latency)
    ]
    highest = max((estimate.value for _, estimate in rows), default=0.0)
    bars = []
    for name, estimate in rows:
        interval = format_interval(estimate)
        label = format_estimate(estimate) + (f" ({interval})" if interval else "")
        width = 60 * estimate.value / highest  # per cent, beside which the text has room
        bars.append(
            f'<dt>{escape_html(name)}</dt><dd><i style="width:{width:.1f}%"></i>{label}</dd>'
        )
    if bars:
        known = [bool(format_interval(estimate)) for _, estimate in rows]
        where = (
            ", with 95% intervals"
            if all(known)
            else ", with 95% intervals where the answers are enough"
        )
        title = f"Speed-up by kind of work{where * any(known)}"
        yield f'<figure><figcaption><b>{title}</b></figcaption><dl class="bars">{"".join(bars)}</dl></figure>'


def _draw_costs(report: Report) -> Iterator[str]:
    """Draw the milliseconds of a pass by its width."""
    costs = report.costs
    tables = [] if costs is None else [("target", costs.target_ms), ("draft", costs.draft_ms)]
    for name, costs_ms in tables:
        widths = {
            f"{width} token{'s' * (width > 1)}": costs_ms[width] for width in sorted(costs_ms)
        }
        yield from _draw(
            f"What a pass of the {name} costs, by its width", widths, "{:.3g} ms".format
        )


def _draw_survival(report: Report) -> Iterator[str]:
    """Draw the fraction of drafts that were accepted, by their position in a pass."""
    kinds = {work.name: work.about for work in report.workloads}
    for kind in ("code", "text"):
        runs = [run for run in _runs_with_drafts(report) if kinds[run.workload] == kind]
        rates = acceptance_by_position([each for run in runs for each in run.rounds], _MIN_DRAFTS)
        places = {f"place {place}": rate for place, rate in enumerate(rates, 1)}
        yield from _draw(
            f"Drafts accepted in {kind}, by their place in a pass", places, format_share
        )


def _draw_depths(report: Report) -> Iterator[str]:
    """Draw the drafts of each pass over the answer, for the kinds of work that drafted most."""
    best: dict[str, Run] = {}
    for run in sorted(_runs_with_drafts(report), key=lambda run: run.drafted):
        if run.rounds:
            best[run.workload] = run
    for run in sorted(best.values(), key=lambda run: -run.drafted)[:_MAX_TRACES]:
        edges, values = group_depths(run.rounds)
        parts = {f"up to token {end}": mean for end, mean in zip(edges[1:], values, strict=True)}
        yield from _draw(f"Drafts in a pass over an answer: {run.workload}", parts, "{:.1f}".format)


def group_depths(rounds: Sequence[Round]) -> tuple[list[int], list[float]]:
    """Group passes into points that can be drawn.

    Returns:
        The edges of the points in generated tokens, and the mean depth of each.
    """
    size = max(len(rounds) // _POINTS_PER_TRACE, 1)
    edges, means = [0], list[float]()
    for start in range(0, len(rounds), size):
        group = rounds[start : start + size]
        passes = sum(max(item.tokens - item.accepted, 1) for item in group)
        edges.append(edges[-1] + sum(item.tokens for item in group))
        means.append(sum(item.drafted for item in group) / passes)
    return edges, means


def _draw_latencies(report: Report) -> Iterator[str]:
    """Draw the milliseconds within which a share of the tokens came."""
    for mode in ("plain", "speculative"):
        runs = [run for run in report.runs if run.mode == mode and run.sampling == "greedy"]
        arrivals = [arrival for run in runs for arrival in run.arrivals]
        times = [each.ms / each.tokens for each in arrivals for _ in range(each.tokens)]
        limits = quantiles(times, n=_QUANTILES, method="inclusive") if len(times) > 1 else []
        shares = [format_share(number / _QUANTILES) for number in range(1, _QUANTILES)]
        within = {f"{share} of tokens": ms for share, ms in zip(shares, limits, strict=False)}
        yield from _draw(f"Time within which tokens came, {mode}", within, "{:.3g} ms".format)


def _draw(title: str, values: dict[str, float], form: Callable[[float], str]) -> Iterator[str]:
    """Draw values by their names as bars; nothing if there are none."""
    if values:
        low, high = form(min(values.values())), form(max(values.values()))
        bars = [(name, value, form(value)) for name, value in values.items()]
        yield draw_chart(title, bars, low if low == high else f"{low} to {high}")


def _runs_with_drafts(report: Report) -> list[Run]:
    runs = [run for run in report.runs if run.mode == "speculative" and run.sampling == "greedy"]
    return [run for run in runs if run.drafted]


_PLOTS = (_draw_speed_ups, _draw_costs, _draw_survival, _draw_depths, _draw_latencies)
