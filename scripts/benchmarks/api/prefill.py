"""How fast prompts are read, beside llama-server."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.api.asking import COLD
from benchmarks.api.shared import Bench, Section, in_turns, number, tokens_of_code, worst
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, table
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running

NAME = "prefill"
LIMIT = 0.98  # of llama-server's prompt tokens per second
WARM = 512  # tokens of the prompt that nobody times, at most
_WRITTEN = 8  # tokens: as many as it may take until a whole character is there


@dataclass(frozen=True, slots=True)
class Read:
    """One prompt read. Tokens per second by the client's clock and by the server's own."""

    ours: bool
    length: int
    repetition: int
    client: float
    server: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Medians of one length; theirs None without llama-server."""

    length: int
    ours: float
    ours_server: float
    theirs: float | None
    theirs_server: float | None

    @property
    def ratio(self) -> float | None:
        return self.theirs and self.ours / self.theirs

    @property
    def ratio_server(self) -> float | None:
        return self.theirs_server and self.ours_server / self.theirs_server


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(NAME).add_argument
    add("--lengths", type=positive, nargs="+", default=[128, 512, 2048, 8192], metavar="TOKENS",
        help="of prompts (128 512 2048 8192)")  # fmt: skip


def measure(bench: Bench) -> Section:
    lengths = bench.options.lengths
    models = bench.target()
    context = -(-(max(lengths) + 64) // 256) * 256
    readings: list[Read] = []
    with bench.server(models, context) as server, bench.daemon(models, context, 1) as daemon:
        code = tokens_of_code(daemon, 2 * max(lengths))
        both = [True] if server is None else [True, False]
        for length in lengths:
            rng = bench.rng(NAME, length)
            for ours in both:
                _read(daemon if ours or server is None else server, code[: min(length, WARM)])
            for repetition, ours in in_turns(both, bench.options.repetitions, rng):
                start = rng.randrange(len(code) - length)
                client, own = _read(
                    daemon if ours or server is None else server, code[start : start + length]
                )
                readings.append(Read(ours, length, repetition, client, own))
                who = "" if ours else " (llama-server)"
                say(f"{length} tokens: {client:.0f} tokens/s{who}")
    rows = [_speeds(readings, length) for length in lengths]
    facts = {"target": str(models.target), "runs": [asdict(reading) for reading in readings]}
    return Section(_report(models.target.name, rows), verdicts(rows), 0, facts)


def _read(server: Daemon | Running, prompt: Sequence[int]) -> tuple[float, float]:
    """Tokens per second until the first text, by our clock; and by the server's own."""
    body = {**COLD, "prompt": prompt, "n_predict": _WRITTEN, "ignore_eos": True}
    answer = server.stream("/completion", body)
    return len(prompt) / answer.first_s, float(answer.timings["prompt_per_second"])


def _speeds(readings: Sequence[Read], length: int) -> Speeds:
    ours = [reading for reading in readings if reading.length == length and reading.ours]
    theirs = [reading for reading in readings if reading.length == length and not reading.ours]
    return Speeds(
        length,
        statistics.median(reading.client for reading in ours),
        statistics.median(reading.server for reading in ours),
        statistics.median(reading.client for reading in theirs) if theirs else None,
        statistics.median(reading.server for reading in theirs) if theirs else None,
    )


def verdicts(rows: Sequence[Speeds]) -> list[Verdict]:
    """Return the worst length, by the client's clock and by the servers' own."""
    client = {f"{row.length} tokens": row.ratio for row in rows}
    server = {f"{row.length} tokens": row.ratio_server for row in rows}
    what = "prompt tokens/s / llama-server's"
    return [
        *worst(f"{what}, until the first text", client, LIMIT),
        *worst(f"{what}, by the servers' own clocks", server, LIMIT),
    ]


def _report(name: str, rows: Sequence[Speeds]) -> str:
    header = ["prompt of tokens", "until the first text", "llama-server", "×"]
    header += ["by its own clock", "llama-server", "×"]
    lines = (
        [
            str(row.length),
            number(row.ours, ".1f"),
            number(row.theirs, ".1f"),
            number(row.ratio, ".3f"),
            number(row.ours_server, ".1f"),
            number(row.theirs_server, ".1f"),
            number(row.ratio_server, ".3f"),
        ]
        for row in rows
    )
    return f"Prompts are read by {name}, tokens/s:\n\n{table(header, lines)}"
