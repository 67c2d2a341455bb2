"""The command line of `scripts/bench api`, and its report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.api import (
    clients,
    conversation,
    editor,
    gaps,
    ghost,
    isolation,
    prefill,
    reissue,
    several,
)
from benchmarks.api.shared import Bench, Section
from benchmarks.command import add_shared, positive, say
from benchmarks.load import load_report
from benchmarks.measuring.report import verdict_line
from benchmarks.measuring.workloads import SIZES, workload
from localspec.engine.pair.models import physical_cores
from localspec.errors import LocalspecError
from localspec.paths import default_paths

PARTS = {
    part.NAME: part
    for part in (conversation, clients, prefill, gaps, editor, ghost, reissue, several, isolation)
}
VERSION = 2  # of the JSON
DESCRIPTION = """What the daemon makes of the engine, by its socket.

A daemon of the benchmark's own, with nothing of yours. With --llama-server that one is measured beside
it, on the same files. Run it on a quiet machine."""


def main(arguments: list[str]) -> int:
    """Run it. 0: done (what was missed is in the report); 1: a wrong output or a failure; 2: usage."""
    options = _parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _leave)  # through every `with`: no server stays behind
    try:
        return _measure(options)
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/bench api",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    add("--size", choices=["big", "half", "quick", "tiny"], default="big",
        help="of the synthetic pairs (big)")  # fmt: skip
    add("--acceptance", type=_acceptance, nargs="+", default=["0.95", "0.8", "0.4", "0"], metavar="α",
        help="of the pairs for `clients` (0.95 0.8 0.4 0); other parts take the first")  # fmt: skip
    add("--repetitions", type=positive, default=3, help="of which medians are taken (3)")
    add("--model", type=_file, metavar="FILE",
        help="for `prefill`, `gaps`, `editor`, `several`: this GGUF, not the synthetic pair")  # fmt: skip
    add("--draft", type=_file, metavar="FILE", help="with --model: its draft")
    add_shared(parser)
    for part in PARTS.values():
        part.add_options(parser)
    return parser


def _acceptance(text: str) -> str:
    try:
        return workload(text).name
    except ValueError:
        what = f"{text!r} is neither a rate from 0 to 1, nor HIGH/LOW, nor bursty"
        raise argparse.ArgumentTypeError(what) from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def _measure(options: argparse.Namespace) -> int:
    names = options.parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        raise LocalspecError(f"There is no part '{min(unknown)}'; they are {', '.join(PARTS)}.")
    sizes = SIZES[options.size]
    work = Path(options.work or default_paths().cache / "bench").absolute()
    bench = Bench(options, sizes, options.threads or physical_cores(), work)
    before = load_report()
    say(before)
    sections = {name: part.measure(bench) for name, part in PARTS.items() if name in names}
    notes = [
        f"{platform.machine()}, {os.cpu_count()} cores, {bench.threads} threads; synthetic pair "
        f"{sizes.name}: target {sizes.target}, draft {sizes.draft}",
        f"before: {before}",
        f"after: {load_report()}",
    ]
    sys.stdout.write(report(notes, sections))
    if options.json is not None:
        options.json.write_text(
            json.dumps(_facts(notes, sections), indent=1) + "\n", encoding="utf-8"
        )
    return 1 if any(section.wrong for section in sections.values()) else 0


def report(notes: Sequence[str], sections: Mapping[str, Section]) -> str:
    """All of it as Markdown: what was found, what must hold, and how much was wrong."""
    parts = ["# API\n\n", *(f"- {note}\n" for note in notes)]
    parts += [f"\n{section.text}" for section in sections.values()]
    parts.append("\n")
    parts += [
        verdict_line(verdict) for section in sections.values() for verdict in section.verdicts
    ]
    wrong = sum(section.wrong for section in sections.values())
    parts.append(f"- outputs that left the right text: {wrong}\n")
    return "".join(parts)


def _facts(notes: Sequence[str], sections: Mapping[str, Section]) -> dict[str, object]:
    return {
        "version": VERSION,
        "notes": notes,
        "verdicts": [
            asdict(verdict) | {"holds": verdict.holds}
            for section in sections.values()
            for verdict in section.verdicts
        ],
        **{name: section.facts for name, section in sections.items()},
    }
