"""Measure an editor that drops a request at every keystroke: nothing may stay busy."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.api.asking import GREEDY, dropped
from benchmarks.api.shared import Bench, Section
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import Daemon

NAME = "reissue"
SETTLE_S = 1.0  # after the last request nothing may be busy for longer


@dataclass(frozen=True, slots=True)
class Reissued:
    """Requests that were dropped for the next, and what was left of them.

    settled_ms: until nothing ran any more after the last; None: longer than a second. correct: the last
    answer is that of the same request alone. finished: of those dropped, answered before they were.
    """

    requests: int
    interval_ms: float
    settled_ms: float | None
    correct: bool
    finished: int
    last_first_ms: float


_CODE = "import os\n\n\ndef names(folder):\n    found = []\n    for entry in os.scandir(folder):\n"
_TYPED = (
    "        if entry.is_file() and not entry.name.startswith('.'):\n            found.append(e"
)


def reissue(daemon: Daemon, count: int, interval: float) -> Reissued:
    """`/infill` at each keystroke, each cancelled by leaving, as llama.vim does."""

    def body(typed: int) -> dict[str, Any]:
        lines = (_CODE + _TYPED[: len(_TYPED) - (count - typed) % 40]).rsplit("\n", 1)
        return {
            "input_prefix": lines[0] + "\n",
            "input_suffix": "\n    return sorted(found)\n",
            "prompt": lines[1],
            "n_predict": 48,
            **GREEDY,
        }

    alone = str(daemon.post("/infill", {**body(count), "cache_prompt": False})["content"])
    if daemon.settle(SETTLE_S) is None:
        raise BenchError("The daemon does not come to rest before the requests.")
    before = daemon.get("/localspec/status")["counts"]
    for typed in range(count):
        dropped(daemon, "/infill", body(typed), interval)
    last = daemon.stream("/infill", body(count))
    settled = daemon.settle(SETTLE_S)
    after = daemon.get("/localspec/status")["counts"]
    cancelled = after["cancelled"] + after["failed"] - before["cancelled"] - before["failed"]
    return Reissued(
        count,
        interval * 1e3,
        None if settled is None else settled * 1e3,
        last.text == alone,
        count - cancelled,
        last.first_s * 1e3,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(NAME).add_argument
    add("--requests", type=positive, default=200, help="cancelled and reissued (200)")
    add("--interval", type=float, default=20.0, help="milliseconds between them (20)")


def measure(bench: Bench) -> Section:
    options = bench.options
    with Daemon(pair="builtin", threads=bench.threads) as daemon:
        say("an editor types, and drops each request for the next")
        typed = reissue(daemon, options.requests, options.interval / 1e3)
    return Section(_report(typed), verdicts(typed), int(not typed.correct), asdict(typed))


def verdicts(typed: Reissued) -> list[Verdict]:
    """Whether all came to rest."""
    busy = int(typed.settled_ms is None)
    return [Verdict("slots busy after the last keystroke", busy, 0, at_least=False)]


def _report(typed: Reissued) -> str:
    settled = "more than a second" if typed.settled_ms is None else f"{typed.settled_ms:.0f} ms"
    return (
        f"An editor drops each request for the next: {typed.requests} requests, one every "
        f"{typed.interval_ms:g} ms, {typed.finished} answered before they were dropped; the last "
        f"one's first text after {typed.last_first_ms:.1f} ms, all at rest after {settled}.\n"
    )
