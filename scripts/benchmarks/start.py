"""How long the daemon takes until it answers, and what it holds with nothing loaded.

Each start has a home of its own. Time runs from the start of the process to the end of the answer to
GET /health; memory is looked at once the watcher of the configuration runs too. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import goals
from benchmarks.load import load_report
from localspec.client.api import Client
from localspec.errors import NoDaemon

TIME_GOAL_MS = 400
MEMORY_GOAL_MB = 60
_SETTLED = 2.0  # seconds after which nothing more is imported
_POLL = 0.002


def main(arguments: list[str]) -> int:
    """Print both medians; exit code 1 when one is over its goal."""
    parser = argparse.ArgumentParser("scripts/bench start", description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args(arguments)
    sys.stdout.write(f"{load_report()}\n")
    runs = [_start() for _ in range(options.runs + 1)][1:]  # the first one reads from disk
    ok = goals.met("until the daemon answers", [ms for ms, _ in runs], TIME_GOAL_MS, "ms")
    ok &= goals.met("held with nothing loaded", [mb for _, mb in runs], MEMORY_GOAL_MB, "MB")
    return 0 if ok else 1


def _start() -> tuple[float, float]:
    """Milliseconds to the first answer, and resident memory in MB."""
    with tempfile.TemporaryDirectory(prefix="ls-") as home:
        client = Client(str(Path(home, "run", "localspec.sock")), autostart=False)
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "localspec.daemon"],
            env={**os.environ, "LOCALSPEC_HOME": home},
            cwd="/",
        )
        try:
            while not _answers(client):
                time.sleep(_POLL)
            spent = time.perf_counter() - started
            time.sleep(_SETTLED)
            held = subprocess.check_output(["ps", "-o", "rss=", "-p", str(process.pid)], text=True)
        finally:
            process.terminate()
            process.wait()
    return spent * 1000, int(held) / 1024


def _answers(client: Client) -> bool:
    try:
        client.health()
    except NoDaemon:
        return False
    return True
