"""Bystanders beside clients that send hostile requests: longest gap in a stream, longest wait for a token.

Measured on the shipped pair, or on --model, with a projector of random weights. Another --seed has other
requests, so that many can be sent in pieces. The three bystanders are a stream, a stream that is held to a
JSON schema, and a client that asks for one token again and again. What a pass takes by itself is measured
before the attack.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.api import hostile
from benchmarks.api.shared import Bench, Section, number
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, table
from benchmarks.servers.daemon import Daemon
from benchmarks.synthetic_projector import write_projector
from localspec.client.transport import Connection, events
from localspec.errors import LocalspecError
from localspec.priority import lower_priority, lower_session_priority
from localspec.protocol.requests import MAX_CHOICES

NAME = "isolation"
GAP_MS = 250.0  # `longest_gap`, to which one pass is added
ADMISSION_MS = 1000.0
QUIET_S = 5.0  # without an attack, before it
PAUSE_S = 0.05  # between two requests for one token
TIMEOUT_S = 120.0
CONTEXT = 4096  # tokens for each client, so that none waits for room
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "items": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "items"],
}


@dataclass(slots=True)
class Waits:
    """Seconds that one bystander waited, each with the moment when the wait ended (perf_counter)."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def between(self, start: float, end: float, name: str) -> list[float]:
        """Return the waits of one kind that ended in this span, in milliseconds."""
        waits: list[tuple[float, float]] = getattr(self, name)
        return [wait * 1e3 for at, wait in waits if start <= at <= end]


@dataclass(frozen=True, slots=True)
class Sent:
    """A hostile request: when it was sent and done with (perf_counter), and the seed that makes it."""

    start: float
    end: float
    status: str
    seed: int
    path: str


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(NAME).add_argument
    add("--hostile", type=positive, default=1000, help="hostile requests (1000)")
    add("--attackers", type=positive, default=3, help="clients that send them (3)")


def measure(bench: Bench) -> Section:
    options = bench.options
    models = bench.second(bench.models(options.acceptance[0]) if options.model else bench.shipped())
    # It lies beside the target, which reads pictures then. Its rows mean nothing to the target.
    write_projector(models.target.with_name("mmproj-F16.gguf"), embedding_length(models.target))
    bystanders = {"stream": Waits(), "stream with a schema": Waits(), "one token": Waits()}
    over = threading.Event()
    # A request may ask for several answers, each of which takes a place.
    places = 3 + MAX_CHOICES * options.attackers
    attackers = ProcessPoolExecutor(options.attackers, get_context("spawn"), initializer=give_way)
    with attackers, bench.daemon(models, CONTEXT * places, places) as daemon:
        list(attackers.map(time.sleep, [0.1] * options.attackers))  # their start is not, either
        writing = {"prompt": "import os", "n_predict": 400, "ignore_eos": True, "temperature": 0}
        shaped = {"prompt": "{", "n_predict": 100, "json_schema": SCHEMA}
        plans: list[Callable[[], None]] = [
            lambda: _stream(daemon, writing, bystanders["stream"], over),
            lambda: _stream(daemon, shaped, bystanders["stream with a schema"], over),
            lambda: _ask(daemon, bystanders["one token"], over),
        ]
        threads = [threading.Thread(target=plan) for plan in plans]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        time.sleep(QUIET_S)
        attack = time.perf_counter()
        sent = _attack(attackers, daemon.socket, options.hostile, bench.rng(NAME))
        end = time.perf_counter()
        over.set()
        for thread in threads:
            thread.join()
    statuses = Counter(request.status for request in sent)
    say(f"statuses of hostile requests: {dict(statuses)}")
    _show_causes(bystanders, sent, attack)
    return _section(bystanders, (began + 1.0, attack, end), statuses)


def _show_causes(bystanders: dict[str, Waits], sent: list[Sent], attack: float) -> None:
    """Print the requests that were being answered during each wait that was too long."""
    waits = [
        (name, wait, end - wait, end)
        for name, bystander in bystanders.items()
        for limit, kind in ((GAP_MS, bystander.gaps), (ADMISSION_MS, bystander.firsts))
        for end, wait in kind
        if end >= attack and wait * 1e3 > limit
    ]
    for name, wait, start, end in waits:
        say(f"{name} waited {wait * 1e3:.0f} ms beside:")
        for request in sent:
            if request.start < end and request.end > start:
                say(
                    f"  {request.path}, {(start - request.start) * 1e3:.0f} ms after it was sent, "
                    f"{request.status}, seed {request.seed}"
                )


def give_way() -> None:
    """Have an attacker give way to the bystanders and the daemon: its own work is not what is measured."""
    os.setsid()
    lower_priority()
    lower_session_priority(os.getpid())


def embedding_length(target: Path) -> int:
    """Return how many numbers a row has that a target reads."""
    from gguf import GGUFReader

    reader = GGUFReader(target)
    fields = (
        reader.get_field(name) for name in reader.fields if name.endswith(".embedding_length")
    )
    return next(int(field.contents()) for field in fields if field is not None)


def _stream(daemon: Daemon, body: hostile.Body, waits: Waits, over: threading.Event) -> None:
    """Stream one answer after another."""
    content = json.dumps({**body, "stream": True}).encode()
    while not over.is_set():
        last, first = time.perf_counter(), True
        try:
            with contextlib.closing(Connection(daemon.socket, TIMEOUT_S)) as connection:
                response = connection.request("POST", "/completion", content)
                if response.status != 200:
                    waits.errors[f"{response.status} {response.read()[:80]!r}"] += 1
                    time.sleep(PAUSE_S)
                    continue
                for _ in events(response.chunks()):
                    now = time.perf_counter()
                    (waits.firsts if first else waits.gaps).append((now, now - last))
                    last, first = now, False
                    if over.is_set():
                        return
        except (LocalspecError, OSError) as error:
            waits.errors[str(error)[:80]] += 1


def _ask(daemon: Daemon, waits: Waits, over: threading.Event) -> None:
    """Ask for one token again and again."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    while not over.is_set():
        start = time.perf_counter()
        try:
            daemon.post("/v1/chat/completions", body)
            now = time.perf_counter()
            waits.firsts.append((now, now - start))
        except (LocalspecError, OSError) as error:
            waits.errors[str(error)[:80]] += 1
        time.sleep(PAUSE_S)


def _attack(attackers: Executor, socket: str, requests: int, rng: random.Random) -> list[Sent]:
    """Send hostile requests."""
    seeds = [rng.getrandbits(64) for _ in range(requests)]
    sent: list[Sent] = []
    for request in attackers.map(partial(send_hostile, socket), seeds, chunksize=1):
        sent.append(request)
        if not len(sent) % 500:
            say(f"{len(sent)} hostile requests sent")
    return sent


def send_hostile(socket: str, seed: int) -> Sent:
    """Send one request; its status is "left" where the client did not wait for it."""
    rng = random.Random(seed)
    path, body, conversation = hostile.request(rng)
    start = time.perf_counter()
    status = _send(socket, rng, path, body, conversation)
    return Sent(start, time.perf_counter(), status, seed, path)


def _send(
    socket: str, rng: random.Random, path: str, body: hostile.Body | None, conversation: str
) -> str:
    headers = {"x-conversation-id": conversation} if conversation else {}
    patience = rng.choice([0.1, 0.5, 2.0, 10.0, 30.0])
    try:
        method = "GET" if body is None else "POST"
        content = b"" if body is None else json.dumps(body).encode("utf-8", "surrogatepass")
        with contextlib.closing(Connection(socket, patience)) as connection:
            response = connection.request(method, path, content, headers)
            response.read()
            return str(response.status)
    except (LocalspecError, OSError):
        return "left"


def _section(
    bystanders: dict[str, Waits], times: tuple[float, float, float], statuses: Counter[str]
) -> Section:
    began, attack, end = times
    rows: list[list[str]] = []
    worst_gap = worst_first = median_gap = 0.0
    for name, waits in bystanders.items():
        cells = [name]
        for kind in ("gaps", "firsts"):
            quiet, loud = waits.between(began, attack, kind), waits.between(attack, end, kind)
            cells += [*_figures(quiet), *_figures(loud)]
            if kind == "gaps" and loud:
                worst_gap, median_gap = max(worst_gap, max(loud)), max(median_gap, *_medians(quiet))
            elif loud:
                worst_first = max(worst_first, max(loud))
        rows.append(cells)
    header = ["bystander"]
    for kind in ("gap", "first token"):
        for when in ("quiet", "attacked"):
            header += [f"{kind} {when}: median ms", "99 %", "longest"]
    errors = {name: dict(waits.errors) for name, waits in bystanders.items() if waits.errors}
    text = (
        f"{sum(statuses.values())} hostile requests, answers {dict(statuses)}; errors of bystanders: "
        f"{errors or 'none'}\n\n{table(header, rows)}"
    )
    verdicts = [
        Verdict("longest gap of a bystander, ms", worst_gap, GAP_MS + median_gap, False),
        Verdict("longest wait for a first token, ms", worst_first, ADMISSION_MS, False),
    ]
    facts = {"statuses": statuses, "errors": errors, "rows": [header, *rows]}
    return Section(text, verdicts, sum(map(len, errors.values())), facts)


def _medians(values: Sequence[float]) -> list[float]:
    return [statistics.median(values)] if values else [0.0]


def _figures(values: Sequence[float]) -> list[str]:
    """Median, 99th percentile and maximum."""
    if not values:
        return ["", "", ""]
    ordered = sorted(values)
    last = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return [number(value, ".0f") for value in (statistics.median(ordered), last, ordered[-1])]
