"""Check what `localspec bench` says of pairs of which the truth is known.

One has drafts that are right one time of five, and one drafts well in code and badly in any other text.

Synthetic pairs on a daemon of its own; the report and its sentence are as a person gets them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import synthetic
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, verdict_line
from benchmarks.measuring.workloads import QUICK, build, workload
from localspec.paths import default_paths

LEAST = 0.97  # times plain decoding, whatever the drafts are
_BAD = "0.2"


def main(arguments: list[str]) -> int:
    """Print both sentences; 1 where a figure must not be so."""
    parser = argparse.ArgumentParser("scripts/bench verdicts", description=__doc__)
    add = parser.add_argument
    add("--tokens", type=positive, default=128, help="of an answer (128)")
    add("--repetitions", type=positive, default=2, help="of each prompt (2)")
    add("--only", choices=["bad", "code"], help="this pair alone")
    options = parser.parse_args(arguments)
    work = default_paths().cache / "bench"
    bench_arguments = [f"-n{options.tokens}", f"--repetitions={options.repetitions}"]
    verdicts: list[Verdict] = []
    if options.only != "code":
        files = build(work, QUICK, workload(_BAD), say)
        verdicts += _bad(
            _run_bench([path for path in (files.target, files.draft) if path], bench_arguments)
        )
    if options.only != "bad":
        pair = synthetic.write_code_pair(work / "code", QUICK.target, QUICK.draft)
        verdicts += _code(_run_bench(pair, bench_arguments))
    sys.stdout.writelines(map(verdict_line, verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _run_bench(pair: Sequence[Path], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the report of a bench in a home that has seen nothing before."""
    with tempfile.TemporaryDirectory(prefix="lsb-") as home:
        environment = {**os.environ, "LOCALSPEC_HOME": home}
        command = [sys.executable, "-m", "localspec"]
        try:
            run = [*command, "bench", ",".join(map(str, pair)), "--json", *arguments]
            done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, check=True)
        finally:
            subprocess.run([*command, "stop"], env=environment, capture_output=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    for entry in report["workloads"]:
        if entry["speed_up"]:
            ratio, low, high = (entry["speed_up"][key] for key in ("value", "low", "high"))
            span = "" if low is None else f" ({low:.2f} to {high:.2f})"
            name = f"{entry['name']}, {entry['sampling']}"
            sys.stdout.write(f"  {name:26} {ratio:.2f}{span} {entry['verdict']}\n")
    sys.stdout.write("".join(f"{note}\n" for note in [*report["notes"], report["sentence"]]))
    return report


def _ratio(report: dict[str, Any], about: str = "") -> float:
    """Of the work of that kind, the geometric mean of the speed-ups at temperature 0."""
    some = [entry for entry in report["workloads"] if about in (entry["about"], "")]
    return geometric_mean([e["speed_up"]["value"] for e in some if e["sampling"] == "greedy"])


def _bad(report: dict[str, Any]) -> list[Verdict]:
    faster = sum(entry["verdict"] == "faster" for entry in report["workloads"])
    return [
        Verdict(f"acceptance {_BAD}: auto / plain", _ratio(report), LEAST),
        Verdict(f"acceptance {_BAD}: kinds of work called faster", faster, 0, at_least=False),
    ]


def _code(report: dict[str, Any]) -> list[Verdict]:
    greedy = [entry for entry in report["workloads"] if entry["sampling"] == "greedy"]
    # An answer by schema is the grammar's text, and nobody's cycle.
    code = [entry for entry in greedy if entry["about"] == "code" and "schema" not in entry["name"]]
    wrong = sum(entry["verdict"] != "faster" for entry in code)
    wrong += sum(entry["verdict"] == "faster" for entry in greedy if entry["about"] == "text")
    return [
        Verdict("good for code alone: auto / plain of other text", _ratio(report, "text"), LEAST),
        Verdict("good for code alone: verdicts that say otherwise", wrong, 0, at_least=False),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
