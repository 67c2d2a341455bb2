"""What the command line costs: a warm `localspec ask` beyond the engine's own time, and `--help`.

The whole process is timed, interpreter start included, because that is what a person waits for. The
engine's own time is `prompt_ms + predicted_ms` of the same answer. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import goals

ASK_GOAL_MS = 80
HELP_GOAL_MS = 120
QUESTION = "What does shutil.copytree do?"


def main(arguments: list[str]) -> int:
    """Print both medians; exit code 1 when one is over its goal."""
    parser = argparse.ArgumentParser("scripts/bench cli", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    command = _command()
    ask = [*command, "ask", "--temperature", "0", "-n", str(options.tokens), QUESTION]
    for _ in range(2):  # starts the daemon, loads the pair, fills the prefix cache
        _timed(ask)
    # Streaming is what people use, so that is what is timed; the engine's time of the same request
    # comes from --json runs in between, under the same conditions.
    walls, engines = [], []
    for _ in range(options.runs):
        walls.append(_timed(ask)[0])
        engines.append(_engine_ms(_timed([*ask, "--json"])[1]))
    helps = [_timed([*command, "--help"])[0] for _ in range(options.runs)]
    added = [wall - engine for wall, engine in zip(walls, engines, strict=True)]
    ok = goals.met("warm ask, added to the engine's time", added, ASK_GOAL_MS, "ms")
    ok &= goals.met("--help", helps, HELP_GOAL_MS, "ms")
    for name, values in (("warm ask in all", walls), ("the engine's own time", engines)):
        sys.stdout.write(f"{name:38} median {statistics.median(values):6.1f} ms\n")
    return 0 if ok else 1


def _command() -> Sequence[str]:
    """Return the installed script next to this interpreter: what people run."""
    script = Path(sys.executable).with_name("localspec")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "localspec"]


def _timed(command: Sequence[str]) -> tuple[float, str]:
    """Wall time in milliseconds and what was printed."""
    started = time.perf_counter()
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True
    )
    return (time.perf_counter() - started) * 1000, run.stdout


def _engine_ms(record: str) -> float:
    timings = json.loads(record)["timings"]
    return float(timings["prompt_ms"] + timings["predicted_ms"])
