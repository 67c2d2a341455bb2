"""The plots of a report as SVG, drawn with matplotlib, which the extra `bench` brings.

Their colours are names that the page gives a meaning, in the light, in the dark and on paper.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from localspec import installation
from localspec.cli.bench.report import Report, Round, Run
from localspec.cli.bench.summary import survival
from localspec.errors import UsageError, visible

# What matplotlib draws with, and what the page calls it.
_INK, _SOFT, _LINE, _FIRST, _SECOND = "#010203", "#040506", "#070809", "#0a0b0c", "#0d0e0f"
_NAMES = {_INK: "ink", _SOFT: "soft", _LINE: "line", _FIRST: "bar", _SECOND: "other"}
_ABOUT = {"code": _FIRST, "text": _SECOND}
_WIDE, _HIGH = (
    4.4,
    2.9,
)  # inches: on a phone a plot is nearly as wide, so that its letters stay readable
_ROW = 0.32  # inches of a row in a plot that has names
_TRACES = 4  # kinds of work whose depths are drawn
_POINTS = 10  # of each
_SEEN = 5  # drafts at a place in a pass, of which a share is drawn

# A legend that covers nothing.
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}

Draw = Callable[[Any, Report], bool]


def plots(report: Report) -> list[tuple[str, str]]:
    """Titles and SVGs; those for which nothing was measured are left out."""
    found = []
    for at, (title, draw, high) in enumerate(_PLOTS):
        if svg := _drawn(f"plot{at}", draw, report, high(report)):
            found.append((title, svg))
    return found


def check() -> None:
    """Raises UsageError: matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--html draws with matplotlib, which is not installed; run: "
            f"{installation.add_extra('bench')}"
        )


def _drawn(name: str, draw: Draw, report: Report, high: float) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDE, high), layout="constrained")
        axes = figure.subplots()
        if not draw(axes, report):
            return ""
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(written.getvalue(), name)


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


def _for_a_page(svg: str, name: str) -> str:
    """The element alone, as wide as its place, with ids of its own and the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font(?:-family)?: [^;\"]*'[^;\"]*(?=[;\"])", _font, svg)
    for colour, named in _NAMES.items():
        svg = svg.replace(colour, f"var(--{named})")
    return svg


def _font(found: re.Match[str]) -> str:
    size = re.search(r"[\d.]+px", found[0])
    return f"font: {size[0] if size else '9px'} system-ui, sans-serif"


# ------------------------------------------------------------------ what is drawn


def _speed_ups(axes: Any, report: Report) -> bool:
    """By work, with intervals; left of 1 is slower."""
    rows = [
        (each, found)
        for each in report.workloads
        if each.sampling == "greedy" and (found := each.speed_up or each.latency)
    ]
    if not rows:
        return False
    for about, colour in _ABOUT.items():
        if any(each.about == about for each, _ in rows):
            axes.plot([], [], "o-", color=colour, label=about, markersize=5, linewidth=2)
    for at, (each, found) in enumerate(reversed(rows)):
        colour = _ABOUT[each.about]
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [at, at], color=colour, linewidth=2)
        axes.plot(found.value, at, "o", color=colour, markersize=5)
    axes.axvline(1, color=_SOFT, linewidth=1)
    # An interval of few answers may be so wide that the others would be points.
    ends = [min(found.high or found.value, 2 * found.value) for _, found in rows]
    axes.set_xlim(0, 1.05 * max(*ends, 1.2))
    names = [visible(each.name, lines=False).replace("$", r"\$") for each, _ in reversed(rows)]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("times the speed of plain decoding")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55 / _per_work(report)), ncols=2)
    return True


def _costs(axes: Any, report: Report) -> bool:
    """What a pass costs by its width."""
    if report.costs is None:
        return False
    tables = (report.costs.target_ms, "target", _FIRST), (report.costs.draft_ms, "draft", _SECOND)
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


def _survival(axes: Any, report: Report) -> bool:
    """The share of drafts that were accepted, by their place in a pass."""
    about = {each.name: each.about for each in report.workloads}
    drawn = False
    for kind, colour in _ABOUT.items():
        some = [run for run in _drafted(report) if about[run.workload] == kind]
        shares = survival(_rounds(some), _SEEN)
        if shares:
            places = range(1, len(shares) + 1)
            axes.plot(places, shares, "o-", color=colour, label=kind, markersize=4, linewidth=1.5)
            drawn = True
    if drawn:
        axes.set_ylim(0, 1.05)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("place of the draft in its pass")
        axes.set_ylabel("accepted")
        axes.legend(**_BELOW)
    return drawn


def _depths(axes: Any, report: Report) -> bool:
    """Drafts of each pass while an answer is written, of the work that drafted most: one above another, for
    lines that cross would hide each other.
    """
    best: dict[str, Run] = {}
    for run in sorted(_drafted(report), key=lambda run: run.drafted):
        if run.rounds:
            best[run.workload] = run
    chosen = sorted(best.values(), key=lambda run: -run.drafted)[:_TRACES]
    about = {each.name: each.about for each in report.workloads}
    traces = [(run, *depths(run.rounds)) for run in reversed(chosen)]
    high = max((max(values) for *_, values in traces), default=0.0)
    if not high:
        return False
    names, floors = [], [at * high * 1.25 for at in range(len(traces))]
    for (run, edges, values), floor in zip(traces, floors, strict=True):
        colour = _ABOUT[about[run.workload]]
        above = [floor + value for value in values]
        axes.stairs(above, edges, baseline=floor, fill=True, color=colour)
        name = visible(run.workload, lines=False).replace("$", r"\$")
        names.append(f"{name}\nup to {max(values):.1f}")
    axes.set_yticks(floors, names, verticalalignment="bottom")
    axes.set_ylim(0, floors[-1] + high * 1.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens written")
    return True


def depths(rounds: Sequence[Round]) -> tuple[list[int], list[float]]:
    """Where so many passes begin and end that each can be seen, in tokens written, and their mean depth."""
    each = max(len(rounds) // _POINTS, 1)
    edges, means = [0], list[float]()
    for start in range(0, len(rounds), each):
        some = rounds[start : start + each]
        passes = sum(max(one.tokens - one.accepted, 1) for one in some)
        edges.append(edges[-1] + sum(one.tokens for one in some))
        means.append(sum(one.drafted for one in some) / passes)
    return edges, means


def _latencies(axes: Any, report: Report) -> bool:
    """How long each token took, as the share of tokens that came so soon."""
    drawn = False
    for mode, colour in (("plain", _SECOND), ("speculative", _FIRST)):
        runs = [run for run in report.runs if run.mode == mode and run.sampling == "greedy"]
        came = [one for run in runs for one in run.arrivals]
        each = sorted(one.ms / one.tokens for one in came for _ in range(one.tokens))
        if len(each) > 1:
            shares = [(at + 1) / len(each) for at in range(len(each))]
            axes.step(each, shares, where="post", color=colour, label=mode, linewidth=1.5)
            most = each[int(0.99 * (len(each) - 1))]
            axes.set_xlim(0, max(most * 1.1, axes.get_xlim()[1] if drawn else 0))
            drawn = True
    if drawn:
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("milliseconds per token")
        axes.set_ylabel("share of tokens")
        axes.legend(loc="lower right")
    return drawn


def _drafted(report: Report) -> list[Run]:
    runs = [run for run in report.runs if run.mode == "speculative" and run.sampling == "greedy"]
    return [run for run in runs if run.drafted]


def _rounds(runs: Sequence[Run]) -> list[Round]:
    return [each for run in runs for each in run.rounds]


def _usual(_: Report) -> float:
    return _HIGH


def _per_work(report: Report) -> float:
    names = sum(each.sampling == "greedy" for each in report.workloads)
    return max(0.8 + _ROW * names, _HIGH / 2)


_PLOTS: tuple[tuple[str, Draw, Callable[[Report], float]], ...] = (
    ("Speed-up by kind of work, with 95% intervals", _speed_ups, _per_work),
    ("What a pass costs, by its width", _costs, _usual),
    ("Drafts accepted, by their place in a pass", _survival, _usual),
    ("Depth over time: drafts in a pass", _depths, _usual),
    ("Time per token", _latencies, _usual),
)
