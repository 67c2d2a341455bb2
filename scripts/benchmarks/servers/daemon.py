"""A daemon of the benchmark's own, in a home folder that lives as long as it does, and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.runs import BenchError
from benchmarks.servers.process import Started
from localspec.client.transport import Connection, events
from localspec.errors import LocalspecError, NoDaemon

START_S = 30.0
ANSWER_S = 900.0
Heard = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer.

    first_s: time until its first text, or its end where it has none. last: the closing event.

    stamps: perf_counter's time and the tokens so far, of each event that tells them.
    """

    text: str
    first_s: float
    last: Mapping[str, Any]
    stamps: Sequence[tuple[float, int]] = ()

    @property
    def timings(self) -> Mapping[str, Any]:
        timings = self.last.get("timings")
        return timings if isinstance(timings, dict) else {}


def timed(
    start: float, data: Iterator[str], *, empty: bool = False, heard: Heard | None = None
) -> Streamed:
    """Read the events of a native completion to their end. `start` is perf_counter's, of the request.

    empty: an answer may have no text; heard: is told the tokens so far, as they come.

    Raises:
        BenchError: an error instead of an answer, or no text in it.
    """
    text, first, last = "", None, {}
    stamps: list[tuple[float, int]] = []
    for event in data:
        last = json.loads(event)
        if "error" in last:
            raise BenchError(f"The answer failed: {last['error'].get('message')}")
        if "tokens_predicted" in last:
            stamps.append((time.perf_counter(), int(last["tokens_predicted"])))
            if heard is not None:
                heard(stamps[-1][1])
        if first is None and last.get("content"):
            first = time.perf_counter() - start
        text += last.get("content", "")
    if first is None and empty:
        first = time.perf_counter() - start
    if first is None:
        raise BenchError("The answer has no text.")
    return Streamed(text, first, last, stamps)


class Daemon(Started):
    """`with Daemon(…)`: a daemon that nobody else uses, its pair loaded.

    Settings are LOCALSPEC_* in lower case; `pair` among them.
    """

    def __init__(self, **settings: object) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="lsb-"))  # short: a socket's path has 103 bytes
        self.socket = str(self._home / "run" / "localspec.sock")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCALSPEC_")}
        environment |= {f"LOCALSPEC_{k.upper()}": str(v) for k, v in settings.items()}
        environment |= {"LOCALSPEC_HOME": str(self._home)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "localspec.daemon"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(NoDaemon):
                self.get("/health")
                self.load()
                return
            time.sleep(0.02)
        raise BenchError("The daemon did not start; `localspec start` says why.")

    def _tidy(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def dial(self) -> socket.socket:
        """Return a connection of one's own."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.socket)
        return connection

    def get(self, target: str) -> dict[str, Any]:
        return self._whole("GET", target, b"")

    def post(self, target: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request and its whole answer. Raises BenchError for anything but 200."""
        return self._whole("POST", target, json.dumps(body).encode())

    def _whole(self, method: str, target: str, body: bytes) -> dict[str, Any]:
        with contextlib.closing(Connection(self.socket, ANSWER_S)) as connection:
            response = connection.request(method, target, body)
            answer = json.loads(response.read() or b"{}")
        if response.status != 200 or not isinstance(answer, dict):
            raise BenchError(f"{target} answered {response.status}: {json.dumps(answer)[:300]}")
        return answer

    def stream(
        self,
        target: str,
        body: Mapping[str, Any],
        *,
        empty: bool = False,
        heard: Heard | None = None,
    ) -> Streamed:
        """One streamed native completion, as `timed` reads it. Raises BenchError."""
        start = time.perf_counter()
        with contextlib.closing(Connection(self.socket, ANSWER_S)) as connection:
            content = json.dumps({**body, "stream": True}).encode()
            response = connection.request("POST", target, content)
            if response.status != 200:
                raise BenchError(f"{target} answered {response.status}: {response.read()!r:.300}")
            return timed(start, events(response.chunks()), empty=empty, heard=heard)

    def load(self, pair: str = "") -> None:
        """Load a pair, or else the configured one, and wait for it."""
        body = json.dumps({"model": pair}).encode()
        with contextlib.closing(Connection(self.socket, ANSWER_S)) as connection:
            response = connection.request("POST", "/localspec/load", body)
            states = [state for state in events(response.chunks()) if state != "[DONE]"]
        last = [json.loads(state) for state in states[-1:]]
        if response.status != 200 or not last or last[0].get("state") != "ready":
            raise BenchError(f"The pair did not load: {last}")

    def settle(self, seconds: float) -> float | None:
        """How long until nothing runs or waits; None where that takes longer than `seconds`."""
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            with contextlib.suppress(LocalspecError):
                status = self.get("/localspec/status")
                if not status["running"] and not status["waiting"]:
                    return spent
            time.sleep(0.005)
        return None
