"""Check that a daemon stays as it is under load.

Clients connect and go, leave in the middle of an answer, and ask everything in turn for as long as one likes.

It starts a daemon of its own, with the shipped pair, in a folder that is removed afterwards. What it
counts, open files and resident memory, it reads from /proc, so it runs on Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.workloads import Say
from localspec.client.api import Client
from localspec.client.transport import Connection, events
from localspec.errors import LocalspecError, NoDaemon

PLACES = 4  # clients at once, and the daemon's `parallel`
PATIENCE = 60.0  # seconds until a client that gets nothing is a failure
FREE_WITHIN = 1.0  # seconds from a client's leaving until its place is free
SETTLED = 2.0  # seconds for the last ones to be noticed
MORE_FILES = 2  # open files that may come and go with what looks at them
DAEMON_MB = 2.0  # of growth in the second half of a soak: allocators breathe, leaks add up
ENGINE_MB = 6.0
LOOKS = 120  # readings of the memory


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that was tried: what came out, and whether that is well."""

    what: str
    found: str
    well: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.well else 'FAIL'}  {self.what}: {self.found}"


class Subject:
    """A running daemon under load."""

    def __init__(self, socket_path: str) -> None:
        self.path = socket_path
        self._client = Client(socket_path, autostart=False)
        self.pid: int = self.status()["pid"]

    def status(self) -> dict[str, Any]:
        return self._client.status()

    def open(self, target: str, body: object) -> Connection:
        """Open a request whose answer has begun, and that goes on until the connection is closed."""
        connection = Connection(self.path, PATIENCE)
        try:
            response = connection.request("POST", target, json.dumps(body).encode())
            next(response.chunks())
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(self, method: str, target: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of the whole answer."""
        connection = Connection(self.path, PATIENCE)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            response = connection.request(method, target, data)
            return response.status, response.read()
        finally:
            connection.close()

    def files(self) -> int:
        """How many the daemon has open."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def wait(self, condition: Callable[[], bool], seconds: float) -> float:
        """How long until it holds; `seconds` when it did not in time."""
        began = time.monotonic()
        while not condition() and time.monotonic() - began < seconds:
            time.sleep(0.005)
        return min(time.monotonic() - began, seconds)


def question(words: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], **fields}


def connections(subject: Subject, count: int, say: Say) -> Verdict:
    """Connect and go: one in three without a word, one in a request, one after its answer."""
    before = subject.files()
    for number in range(count):
        if number % 3 == 2:
            subject.ask("GET", "/health")
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(subject.path)
                connection.sendall((b"", b"POST /infill HTTP/1.1\r\nContent-Le")[number % 3])
        if number % max(count // 5, 1) == 0:
            say(f"{number} connections, {subject.files()} open files")
    subject.wait(lambda: subject.files() <= before + MORE_FILES, SETTLED)
    after = subject.files()
    return Verdict(
        f"{count} connections",
        f"{before} open files before, {after} after",
        after <= before + MORE_FILES,
    )


def leavers(subject: Subject, count: int, say: Say) -> Verdict:
    """Clients that leave in the middle of an answer, as many at once as there are places."""
    waits: list[float] = []
    endless = question("What does os.walk do?", stream=True, ignore_eos=True)
    while len(waits) < count:
        opened = [
            subject.open("/v1/chat/completions", endless)
            for _ in range(min(PLACES, count - len(waits)))
        ]
        assert subject.status()["running"], "the answers are too short to be left"
        for connection in opened:
            connection.close()
        took = subject.wait(lambda: subject.status()["running"] == 0, 2 * FREE_WITHIN)
        waits += [took] * len(opened)
        if len(waits) % max(count // 5 // PLACES * PLACES, PLACES) == 0:
            say(f"{len(waits)} clients have left, the slowest place was free in {max(waits):.3f} s")
    summary = f"places free in {statistics.median(waits):.3f} s (median), {max(waits):.3f} s (most)"
    return Verdict(f"{count} clients that leave", summary, max(waits) <= FREE_WITHIN)


TOPICS = ("os.walk", "json.dumps", "shutil.which", "itertools.chain", "zip", "re.sub", "sorted")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
Kind = Callable[[Subject, random.Random], None]


class Wrong(Exception):
    """An answer that is not what was asked for."""


def _expect(answer: tuple[int, bytes], status: int) -> bytes:
    if answer[0] != status:
        raise Wrong(f"HTTP {answer[0]} instead of {status}: {answer[1][:200]!r}")
    return answer[1]


def _chat(subject: Subject, rng: random.Random) -> None:
    body = question(f"What does {rng.choice(TOPICS)} do?", max_tokens=rng.randint(1, 48))
    _expect(subject.ask("POST", "/v1/chat/completions", body), 200)


def _stream(subject: Subject, rng: random.Random) -> None:
    body = question(f"What is {rng.choice(TOPICS)}?", max_tokens=rng.randint(1, 48), stream=True)
    data = _expect(subject.ask("POST", "/v1/chat/completions", body), 200)
    if list(events(iter([data])))[-1] != "[DONE]":
        raise Wrong("A stream ended without its end.")


def _json(subject: Subject, rng: random.Random) -> None:
    body = question("A number?", json_schema=SCHEMA, max_tokens=40, seed=rng.randint(0, 9))
    _expect(subject.ask("POST", "/v1/chat/completions", body), 200)


def _infill(subject: Subject, rng: random.Random) -> None:
    lines = "".join(f"x{n} = {n}\n" for n in range(rng.randint(0, 60)))
    body = {"input_prefix": lines, "prompt": "def f(", "n_predict": 16, "samplers": ["infill"]}
    _expect(subject.ask("POST", "/infill", body), 200)


def _leave(subject: Subject, rng: random.Random) -> None:
    body = question(f"{rng.choice(TOPICS)}?", stream=True, ignore_eos=True)
    subject.open("/v1/chat/completions", body).close()


def _refused(subject: Subject, rng: random.Random) -> None:
    wrong = rng.choice(({"temperature": -1}, {"grammar": "root ::= ["}, {"model": "none"}))
    status = 404 if "model" in wrong else 400
    _expect(subject.ask("POST", "/v1/chat/completions", question("x", **wrong)), status)


def _small(subject: Subject, rng: random.Random) -> None:
    body = {"content": rng.choice(TOPICS) * rng.randint(1, 50)}
    _expect(subject.ask("POST", "/tokenize", body), 200)
    _expect(subject.ask("GET", rng.choice(("/metrics", "/v1/models", "/props"))), 200)


KINDS: tuple[Kind, ...] = (_chat, _stream, _json, _infill, _leave, _refused, _small)


def mixed(subject: Subject, seconds: float, say: Say) -> list[Verdict]:
    """Every kind of request from several clients at once; what the memory does meanwhile."""
    done: Counter[str] = Counter()
    wrong: list[str] = []
    over = threading.Event()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            kind = rng.choice(KINDS)
            try:
                kind(subject, rng)
            except (Wrong, LocalspecError) as error:
                wrong.append(f"{kind.__name__.strip('_')}: {error}")
            done[kind.__name__.strip("_")] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(PLACES)]
    for thread in threads:
        thread.start()
    try:
        readings = list(_readings(subject, seconds, lambda: sum(done.values()), say))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    counted = ", ".join(f"{number} {name}" for name, number in sorted(done.items()))
    return [
        Verdict(
            "requests", f"{counted}; wrong: {wrong[:3] or 0}", not wrong and len(done) == len(KINDS)
        ),
        _growth("memory of the daemon", readings, 1, DAEMON_MB),
        _growth("memory of the engine", readings, 2, ENGINE_MB),
    ]


Reading = tuple[float, float, float]  # seconds since the start; MB of the daemon and of the engine


def _readings(
    subject: Subject, seconds: float, done: Callable[[], int], say: Say
) -> Iterator[Reading]:
    began = last_report = time.monotonic()
    worker = subject.status()["worker_pid"]
    while (spent := time.monotonic() - began) < seconds:
        time.sleep(min(seconds / LOOKS, 5.0))
        now = (spent, resident_mb(subject.pid), resident_mb(worker))
        yield now
        if time.monotonic() - last_report > 30:
            last_report = time.monotonic()
            say(
                f"{spent / 60:.1f} min, {done()} requests: daemon {now[1]:.1f} MB, engine {now[2]:.1f} MB"
            )


def _growth(what: str, readings: Sequence[Reading], column: int, most: float) -> Verdict:
    """By a line through the second half of the readings: in the first, caches fill."""
    late = readings[len(readings) // 2 :]
    times, sizes = [reading[0] for reading in late], [reading[column] for reading in late]
    slope = statistics.linear_regression(times, sizes).slope  # MB per second
    grown = slope * (times[-1] - times[0])
    summary = (
        f"{sizes[-1]:.1f} MB, {grown:+.2f} MB in the last {(times[-1] - times[0]) / 60:.1f} min"
    )
    return Verdict(what, f"{summary} ({slope * 3600:+.1f} MB per hour)", grown <= most)


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def own_daemon() -> Iterator[Subject]:
    """Run a daemon with the shipped pair in a folder of its own."""
    home = tempfile.mkdtemp(prefix="ls-soak-")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCALSPEC_")}
    environment |= {
        "LOCALSPEC_HOME": home,
        "LOCALSPEC_PARALLEL": str(PLACES),
        "LOCALSPEC_PREFIX_MEMORY": "16",  # full within seconds: a cache that fills looks like a leak
    }
    path = str(Path(home) / "run" / "localspec.sock")
    daemon = subprocess.Popen([sys.executable, "-m", "localspec.daemon"], env=environment)
    try:
        yield _listening(daemon, path)
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(home)


def _listening(daemon: subprocess.Popen[bytes], path: str) -> Subject:
    while True:
        with contextlib.suppress(NoDaemon):
            return Subject(path)
        if daemon.poll() is not None:
            raise SystemExit(f"The daemon ended at once, with exit code {daemon.returncode}.")
        time.sleep(0.02)


def main(arguments: list[str]) -> int:
    """Print how it goes and a verdict with figures; 1 when one is not well."""
    parser = argparse.ArgumentParser("scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="of mixed requests (60)")
    parser.add_argument("--connections", type=int, default=10_000, help="that come and go (10000)")
    parser.add_argument("--leavers", type=int, default=1_000, help="clients that leave (1000)")
    options = parser.parse_args(arguments)
    if not Path("/proc/self/fd").exists():
        parser.error("this machine has no /proc to read open files and memory from")

    def say(text: str) -> None:
        sys.stderr.write(f"  {text}\n")

    with own_daemon() as subject:
        _chat(subject, random.Random(0))  # the pair is loaded, everything is imported
        verdicts = [
            connections(subject, options.connections, say),
            leavers(subject, options.leavers, say),
            *mixed(subject, options.minutes * 60, say),
        ]
        status = subject.status()
    deaths, running = status["counts"]["worker_deaths"], status["running"]
    verdicts.append(
        Verdict(
            "at the end", f"{deaths} engines died, {running} requests run", not deaths | running
        )
    )
    sys.stdout.write("".join(f"{verdict}\n" for verdict in verdicts))
    return 0 if all(verdict.well for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
