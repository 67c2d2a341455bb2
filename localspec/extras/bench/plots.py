"""The plots of a report as SVG, drawn with matplotlib, which the extra `bench` installs.

matplotlib draws with fixed colours, which are replaced by CSS variables. The page defines them for
light mode, dark mode and print.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from localspec import installation
from localspec.errors import UsageError, replace_control_characters
from localspec.extras.bench.report import Estimate, Report, Round, Run, Workload
from localspec.extras.bench.summary import acceptance_by_position

# Colours that matplotlib draws with, and the CSS variables that replace them.
_INK, _SOFT, _LINE, _BAR, _OTHER = "#010203", "#040506", "#070809", "#0a0b0c", "#0d0e0f"
_CSS_VARIABLES = {_INK: "ink", _SOFT: "soft", _LINE: "line", _BAR: "bar", _OTHER: "other"}
_WORK_COLOURS = {"code": _BAR, "text": _OTHER}
# Inches. A phone shows a plot of this width nearly in its original size, so that its text is readable.
_WIDTH_IN, _HEIGHT_IN = (4.4, 2.9)
_ROW_HEIGHT_IN = 0.32  # inches of a row in a plot with one row for each kind of work
_MAX_TRACES = 4  # kinds of work whose depths are drawn
_POINTS_PER_TRACE = 10
_MIN_DRAFTS = 5  # drafts at a position in a pass, below which their acceptance is not drawn

# A legend below the plot, where it covers nothing.
_LEGEND_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}

Draw = Callable[[Any, Report], bool]


def draw_plots(report: Report) -> list[tuple[str, str]]:
    """Return titles and SVGs. Plots for which nothing was measured are left out."""
    drawings = []
    for number, (title, draw, height) in enumerate(_PLOTS):
        if svg := _draw_svg(f"plot{number}", draw, report, height(report)):
            drawings.append((title + _describe_intervals(report) * (draw is _draw_speed_ups), svg))
    return drawings


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--html draws with matplotlib, which is not installed; run: "
            f"{installation.install_extra_command('bench')}"
        )


def _draw_svg(name: str, draw: Draw, report: Report, height: float) -> str:
    """Return the SVG element alone, with unique ids and the page's width, colours and font."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
        axes = figure.subplots()
        if not draw(axes, report):
            return ""
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    for attribute in ("height", "width"):
        svg = re.sub(rf'(<svg[^>]*?) {attribute}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font(?:-family)?: [^;\"]*'[^;\"]*(?=[;\"])", _replace_font, svg)
    for colour, variable in _CSS_VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _SOFT,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def _replace_font(match: re.Match[str]) -> str:
    size = re.search(r"[\d.]+px", match[0])
    return f"font: {size[0] if size else '9px'} system-ui, sans-serif"


# ------------------------------------------------------------------ the plots


def _compared(report: Report) -> list[tuple[Workload, Estimate]]:
    """Return each kind of work at temperature 0 with its speed-up."""
    return [
        (work, estimate)
        for work in report.workloads
        if work.sampling == "greedy" and (estimate := work.speed_up or work.latency)
    ]


def _describe_intervals(report: Report) -> str:
    """Return what the title says of intervals."""
    known = [estimate.low is not None for _, estimate in _compared(report)]
    if all(known):
        return ", with 95% intervals"
    return ", with 95% intervals where the answers are enough" if any(known) else ""


def _draw_speed_ups(axes: Any, report: Report) -> bool:
    """Draw the speed-up of each kind of work with its interval; left of 1 is slower."""
    rows = _compared(report)
    if not rows:
        return False
    for about, colour in _WORK_COLOURS.items():
        if any(work.about == about for work, _ in rows):
            axes.plot([], [], "o-", color=colour, label=about, markersize=5, linewidth=2)
    for y, (work, estimate) in enumerate(reversed(rows)):
        colour = _WORK_COLOURS[work.about]
        if estimate.low is not None and estimate.high is not None:
            axes.plot([estimate.low, estimate.high], [y, y], color=colour, linewidth=2)
        axes.plot(estimate.value, y, "o", color=colour, markersize=5)
    axes.axvline(1, color=_SOFT, linewidth=1)
    # The interval of a few answers may be so wide that all others would shrink to points.
    ends = [min(estimate.high or estimate.value, 2 * estimate.value) for _, estimate in rows]
    axes.set_xlim(0, 1.05 * max(*ends, 1.2))
    axes.set_yticks(range(len(rows)), [_label(work.name) for work, _ in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("times the speed of plain decoding")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55 / _height_per_work(report)), ncols=2)
    return True


def _label(name: str) -> str:
    return replace_control_characters(name, lines=False).replace("$", r"\$")


def _draw_costs(axes: Any, report: Report) -> bool:
    """Draw the cost of a pass by its width."""
    if report.costs is None:
        return False
    tables = (report.costs.target_ms, "target", _BAR), (report.costs.draft_ms, "draft", _OTHER)
    for table, name, colour in tables:
        if table:
            widths = sorted(table)
            costs = [table[width] for width in widths]
            axes.plot(widths, costs, "o-", color=colour, label=name, markersize=3, linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in one pass")
    axes.set_ylabel("milliseconds")
    axes.legend(loc="upper left")
    return True


def _draw_survival(axes: Any, report: Report) -> bool:
    """Draw the fraction of drafts that were accepted, by their position in a pass."""
    kinds = {work.name: work.about for work in report.workloads}
    drawn = False
    for kind, colour in _WORK_COLOURS.items():
        runs = [run for run in _runs_with_drafts(report) if kinds[run.workload] == kind]
        rates = acceptance_by_position([each for run in runs for each in run.rounds], _MIN_DRAFTS)
        if rates:
            positions = range(1, len(rates) + 1)
            axes.plot(positions, rates, "o-", color=colour, label=kind, markersize=4, linewidth=1.5)
            drawn = True
    if drawn:
        axes.set_ylim(0, 1.05)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("place of the draft in its pass")
        axes.set_ylabel("accepted")
        axes.legend(**_LEGEND_BELOW)
    return drawn


def _draw_depths(axes: Any, report: Report) -> bool:
    """Draw the drafts of each pass over the answer, for the kinds of work that drafted most.

    The traces are drawn above one another, because crossing lines would hide each other.
    """
    best: dict[str, Run] = {}
    for run in sorted(_runs_with_drafts(report), key=lambda run: run.drafted):
        if run.rounds:
            best[run.workload] = run
    chosen = sorted(best.values(), key=lambda run: -run.drafted)[:_MAX_TRACES]
    kinds = {work.name: work.about for work in report.workloads}
    traces = [(run, *group_depths(run.rounds)) for run in reversed(chosen)]
    highest = max((max(values) for *_, values in traces), default=0.0)
    if not highest:
        return False
    names, floors = [], [row * highest * 1.25 for row in range(len(traces))]
    for (run, edges, values), floor in zip(traces, floors, strict=True):
        colour = _WORK_COLOURS[kinds[run.workload]]
        tops = [floor + value for value in values]
        axes.stairs(tops, edges, baseline=floor, fill=True, color=colour)
        names.append(f"{_label(run.workload)}\nup to {max(values):.1f}")
    axes.set_yticks(floors, names, verticalalignment="bottom")
    axes.set_ylim(0, floors[-1] + highest * 1.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens written")
    return True


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


def _draw_latencies(axes: Any, report: Report) -> bool:
    """Draw the time of each token, as the fraction of tokens that came at least as fast."""
    drawn = False
    for mode, colour in (("plain", _OTHER), ("speculative", _BAR)):
        runs = [run for run in report.runs if run.mode == mode and run.sampling == "greedy"]
        arrivals = [arrival for run in runs for arrival in run.arrivals]
        times = sorted(
            arrival.ms / arrival.tokens for arrival in arrivals for _ in range(arrival.tokens)
        )
        if len(times) > 1:
            fractions = [(index + 1) / len(times) for index in range(len(times))]
            axes.step(times, fractions, where="post", color=colour, label=mode, linewidth=1.5)
            percentile_99 = times[int(0.99 * (len(times) - 1))]
            axes.set_xlim(0, max(percentile_99 * 1.1, axes.get_xlim()[1] if drawn else 0))
            drawn = True
    if drawn:
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("milliseconds per token")
        axes.set_ylabel("share of tokens")
        axes.legend(loc="lower right")
    return drawn


def _runs_with_drafts(report: Report) -> list[Run]:
    runs = [run for run in report.runs if run.mode == "speculative" and run.sampling == "greedy"]
    return [run for run in runs if run.drafted]


def _height_per_work(report: Report) -> float:
    names = sum(work.sampling == "greedy" for work in report.workloads)
    return max(0.8 + _ROW_HEIGHT_IN * names, _HEIGHT_IN / 2)


_PLOTS: tuple[tuple[str, Draw, Callable[[Report], float]], ...] = (
    ("Speed-up by kind of work", _draw_speed_ups, _height_per_work),
    ("What a pass costs, by its width", _draw_costs, lambda _: _HEIGHT_IN),
    ("Drafts accepted, by their place in a pass", _draw_survival, lambda _: _HEIGHT_IN),
    ("Depth over time: drafts in a pass", _draw_depths, lambda _: _HEIGHT_IN),
    ("Time per token", _draw_latencies, lambda _: _HEIGHT_IN),
)
