"""Run several pairs under a budget of memory that does not hold them all.

Is any request lost, and does what they take together stay within the budget?

Copies of the shipped pair on a daemon of its own; what the engines hold is read from /proc, so it runs on
Linux: their own memory, and once of each model's file what is mapped of it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.api.asking import GREEDY, dropped
from benchmarks.api.shared import SHIPPED
from benchmarks.command import positive
from benchmarks.measuring.report import Verdict, verdict_line
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import Daemon
from localspec.errors import LocalspecError

BEYOND = 64  # MiB that they may have together beyond the budget for a moment
CLIENTS = 6
LOOK = 0.02  # seconds between two looks at the memory
MIB = 1 << 20
_MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ +(/.*\.gguf)$")


def held_mib(pids: Sequence[int]) -> float:
    """Return what these processes have of their own, and of models' files, each file once."""
    own, files = 0, Counter[str]()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            own += _own_kib(pid)
            for file, size in _mapped_kib(pid).items():
                files[file] = max(files[file], size)
    return (own + files.total()) / 1024


def _own_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB", text, re.MULTILINE)))


def _mapped_kib(pid: int) -> Counter[str]:
    sizes, file = Counter[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            sizes[file] += int(line.split()[1]) * bool(file)
        elif line[0] in "0123456789abcdef":
            mapped = _MAPPED.match(line)
            file = mapped[1] if mapped else ""
    return sizes


class Watch:
    """`with Watch(…)`: the most that the daemon's engines hold together meanwhile, in MiB."""

    def __init__(self, daemon: Daemon) -> None:
        self.most = 0.0
        self._daemon = daemon
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        task = Path(f"/proc/{self._daemon.pid}/task")
        while not self._over.wait(LOOK):
            pids = [int(pid) for file in task.glob("*/children") for pid in _words(file)]
            self.most = max(self.most, held_mib(pids))


def _words(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text().split()
    return []


def ask(daemon: Daemon, pairs: Sequence[str], number: int) -> str:
    """One request of any kind for any of the pairs: how it went."""
    rng = random.Random(number)
    pair = rng.choices(pairs, weights=range(len(pairs), 0, -1))[0]
    body = {**GREEDY, "model": pair, "n_predict": rng.randrange(1, 24), "prompt": f"{number}: def"}
    kind = rng.choice(("whole", "stream", "editor", "tokens", "left"))
    try:
        if kind == "whole":
            daemon.post("/completion", body)
        elif kind == "stream":
            daemon.stream("/completion", {**body, "ignore_eos": True}, empty=True)
        elif kind == "editor":
            # Of an editor of its own: a newer one of the same editor would take over.
            text = {"input_prefix": "import os\n", "input_suffix": "\n", "user": str(number)}
            daemon.post("/infill", {**body, **text})
        elif kind == "tokens":
            daemon.post("/tokenize", {"content": "def", "model": pair})
        else:
            dropped(daemon, "/completion", body, rng.uniform(0, 0.1))
            return "left"
    except (BenchError, LocalspecError, OSError) as error:
        sys.stderr.write(f"  {kind} on {Path(pair).name}: {error}\n")
        return "lost"
    return "answered"


def main(arguments: list[str]) -> int:
    """Print how it went; 1 where something must not be so."""
    parser = argparse.ArgumentParser("scripts/bench budget", description=__doc__)
    add = parser.add_argument
    add("--pairs", type=positive, default=3, help="that take turns in memory (3)")
    add("--requests", type=positive, default=500, help="of all kinds (500)")
    add("--memory", type=positive, default=460, help="the budget, MiB (460: two pairs)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lsb-") as folder:
        pairs = [_copy(Path(folder), number) for number in range(options.pairs)]
        queue = options.requests
        with Daemon(pair=pairs[0], memory=options.memory, queue=queue) as daemon:
            with Watch(daemon) as watch, ThreadPoolExecutor(CLIENTS) as pool:
                start = time.monotonic()
                went = Counter(pool.map(lambda n: ask(daemon, pairs, n), range(options.requests)))
                seconds = time.monotonic() - start
            settled = daemon.settle(5.0)
            counts = daemon.get("/localspec/status")["counts"]
    sys.stdout.write(
        f"{options.requests} requests in {seconds:.0f} s: {went['answered']} answered, {went['left']} "
        f"whose client left; {counts['worker_starts']} loads; at most {watch.most:.0f} MiB of "
        f"{options.memory}\n"
    )
    most = options.memory + BEYOND
    verdicts = [
        Verdict("requests lost", went["lost"], 0, at_least=False),
        Verdict("engines that died", counts["worker_deaths"], 0, at_least=False),
        Verdict("requests that run on at the end", int(settled is None), 0, at_least=False),
        Verdict("MiB of memory", watch.most, most, at_least=False),
    ]
    sys.stdout.writelines(map(verdict_line, verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _copy(folder: Path, number: int) -> str:
    (folder / f"pair{number}").mkdir()
    names = ("target.gguf", "draft.gguf")
    return ",".join(str(shutil.copy(SHIPPED / n, folder / f"pair{number}" / n)) for n in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
