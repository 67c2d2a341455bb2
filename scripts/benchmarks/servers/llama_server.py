"""llama-server on the same files, one process per setting, by its own clock."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.runs import WARM_TOKENS, BenchError, Run, Setting
from benchmarks.measuring.workloads import Text
from benchmarks.servers.daemon import Heard, Streamed, timed
from benchmarks.servers.process import Started
from localspec.children import HUGE_PAGES
from localspec.client.transport import events
from localspec.engine import environment

LOAD_S = 300.0  # a cold 8 B model from a slow disk
ANSWER_S = 900.0


@dataclass(frozen=True, slots=True)
class Server:
    """How to start llama-server. The files, sizes and threads are those of our engine.

    context: tokens in all; each of `parallel` places has its share of them.
    gpu_layers negative: as llama-server decides, which is all that fit. socket: a path that ends with .sock,
    where it listens instead of at a port. draft: None where it is in the target's file. drafts_with: its
    name for the kind of drafts.
    """

    program: Path
    target: Path
    draft: Path | None
    context: int
    threads: int
    gpu_layers: int = -1
    type_kv: str = "f16"
    parallel: int = 1
    extra: Sequence[str] = ()
    socket: str = ""
    drafts_with: str = "draft-simple"

    def command(self, depth: int, port: int) -> list[str]:
        """Return the command line; depth 0 is plain decoding."""
        line = [str(self.program), "--host", self.socket or "127.0.0.1", "--port", str(port)]
        line += ["--no-webui"]
        line += ["-m", str(self.target), "-c", str(self.context), "-np", str(self.parallel)]
        line += ["--cache-ram", "0"]
        line += ["-t", str(self.threads), "-ctk", self.type_kv, "-ctv", self.type_kv]
        if self.gpu_layers >= 0:
            line += ["-ngl", str(self.gpu_layers)]
        if depth:
            line += ["--spec-type", self.drafts_with]
            line += ["-md", str(self.draft)] if self.draft else []
            line += ["--spec-draft-n-max", str(depth), "-td", str(self.threads)]
            line += ["-ctkd", self.type_kv, "-ctvd", self.type_kv]
            if self.gpu_layers >= 0:
                line += ["-ngld", str(self.gpu_layers)]
        return [*line, *self.extra]


def _environment() -> dict[str, str]:
    """Our environment without what we set for our own engine: llama-server keeps its defaults."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in environment.OPENMP_ENVIRONMENT
    }
    tunables = variables.pop("GLIBC_TUNABLES", "").split(":")
    if theirs := ":".join(tunable for tunable in tunables if tunable not in ("", HUGE_PAGES)):
        variables["GLIBC_TUNABLES"] = theirs
    return variables


class Running(Started):
    """A started llama-server; leaving it ends the process."""

    def __init__(self, server: Server, setting: Setting) -> None:
        self._setting = setting
        self._socket = server.socket
        self._port = _free_port()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in _tidy)
        self._process = subprocess.Popen(
            server.command(setting.depth or 0, self._port),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + LOAD_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchError(f"llama-server ended while loading: {self._last_line()}")
            try:
                status, _ = self._request("GET", "/health", None, 5.0)
            except OSError:
                status = 0
            if status == 200:
                return
            time.sleep(0.1)
        raise BenchError(f"llama-server was not ready after {LOAD_S:.0f} s: {self._last_line()}")

    def _tidy(self) -> None:
        self._log.close()

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _request(
        self, method: str, path: str, body: object, timeout: float
    ) -> tuple[int, dict[str, Any]]:
        connection = self._connection(timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read() or b"{}")
            return response.status, answer if isinstance(answer, dict) else {}
        finally:
            connection.close()

    def dial(self) -> socket.socket:
        """Return a connection of one's own."""
        if not self._socket:
            return socket.create_connection(("127.0.0.1", self._port))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._socket)
        return connection

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        if self._socket:
            connection.sock = self.dial()
            connection.sock.settimeout(timeout)
        return connection

    def warm_up(self, text: Text) -> None:
        """Ask for a short answer first: the first passes of every width are slow."""
        self._complete(text.prompt, WARM_TOKENS)

    def run(self, text: Text, repetition: int) -> Run:
        """One completion from token ids, timed by the server itself. Raises BenchError."""
        answer = self._complete(text.prompt, len(text.expected))
        timings = answer["timings"]
        return Run(
            self._setting.name,
            repetition,
            int(timings["predicted_n"]),
            answer.get("tokens") == text.expected,
            float(timings["predicted_per_second"]),
            drafted=int(timings.get("draft_n", 0)),
            accepted=int(timings.get("draft_n_accepted", 0)),
        )

    def post(self, target: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request and its whole answer. Raises BenchError for anything but 200."""
        try:
            status, answer = self._request("POST", target, body, ANSWER_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BenchError(
                f"llama-server gave no answer ({error}): {self._last_line()}"
            ) from error
        if status != 200:
            raise BenchError(f"llama-server answered {status}: {json.dumps(answer)[:300]}")
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
        connection = self._connection(ANSWER_S)
        try:
            content = json.dumps({**body, "stream": True})
            connection.request("POST", target, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(
                    f"llama-server answered {response.status}: {response.read()!r:.300}"
                )
            data = events(iter(lambda: response.read1(1 << 16), b""))
            return timed(start, data, empty=empty, heard=heard)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BenchError(
                f"llama-server gave no answer ({error}): {self._last_line()}"
            ) from error
        finally:
            connection.close()

    def _complete(self, prompt: list[int], count: int) -> dict[str, Any]:
        # Greedy by the shortest way its sampler knows, so that it loses no time on 150 k candidates.
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        answer = self.post("/completion", body)
        if "timings" not in answer:
            raise BenchError(f"llama-server answered {json.dumps(answer)[:300]}")
        return answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
