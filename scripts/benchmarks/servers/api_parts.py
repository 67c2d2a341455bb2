"""The three measurements of `scripts/bench api`."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import synthetic
from benchmarks.measuring.runs import BenchError
from benchmarks.measuring.workloads import Files, Say
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running

GREEDY: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_k": 1,
    "samplers": ["top_k"],
    "cache_prompt": True,
}
_BROKEN = "\ufffd"
SETTLE_S = 1.0  # after the last request nothing may be busy for longer


# ------------------------------------------------------------------------- a conversation goes on


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the same conversation by both. Milliseconds; `theirs` None without llama-server.

    prompt: tokens in all; read: those that were not cached; correct: both wrote the right text.
    """

    prompt: int
    read: int
    ours_ms: float
    engine_ms: float  # of ours, reading and the first token
    theirs_ms: float | None
    correct: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """length: tokens of the first prompt; turns: that follow; new: tokens of each; answer: written."""

    length: int = 3000
    turns: int = 9
    new: int = 40
    answer: int = 16

    @property
    def context(self) -> int:
        """Tokens that all of it takes, and some for drafts."""
        room = self.length + (self.turns + 1) * (self.new + self.answer) + 64
        return -(-room // 256) * 256


def continue_conversation(
    daemon: Daemon,
    server: Running | None,
    files: Files,
    wanted: Conversation,
    rng: random.Random,
    say: Say,
) -> list[Turn]:
    """Time to first token of turn after turn, in an order shuffled for each."""
    said = synthetic.follow(files.cycle, rng.randrange(len(files.cycle)), wanted.length)
    found: list[Turn] = []
    for number in range(wanted.turns + 1):
        expected = synthetic.follow(files.cycle, said[-1], wanted.answer)
        text = str(daemon.post("/detokenize", {"tokens": expected})["content"])
        body = {"prompt": said, "n_predict": wanted.answer, **GREEDY}
        ours = theirs = None
        for mine in rng.sample((True, False), 2):
            if mine:
                ours = daemon.stream("/completion", body)
            elif server is not None:
                theirs = server.stream(body)
        assert ours is not None
        turn = Turn(
            len(said),
            int(ours.timings["prompt_n"]),
            ours.first_s * 1e3,
            float(ours.timings["prompt_ms"]),
            theirs.first_s * 1e3 if theirs else None,
            # llama-server leaves out what is no whole character at the end.
            ours.text == text
            and (theirs is None or theirs.text.rstrip(_BROKEN) == text.rstrip(_BROKEN)),
        )
        other = "" if turn.theirs_ms is None else f", llama-server {turn.theirs_ms:.0f} ms"
        say(f"turn {number} of {turn.prompt} tokens: {turn.ours_ms:.0f} ms{other}")
        if number:  # the first reads everything; what is asked is what comes after it
            found.append(turn)
        new = synthetic.follow(files.cycle, rng.randrange(len(files.cycle)), wanted.new)
        said = [*said, *expected, *new]
    return found


# ------------------------------------------------------------------------- an editor that types


@dataclass(frozen=True, slots=True)
class Reissued:
    """Requests that were dropped for the next, and what was left of them.

    settled_ms: until nothing ran any more after the last; None: longer than a second. correct: the last
    answer is that of the same request alone. finished: of those dropped, answered before they were.
    """

    requests: int
    interval_ms: float
    settled_ms: float | None
    correct: bool
    finished: int
    last_first_ms: float


_CODE = "import os\n\n\ndef names(folder):\n    found = []\n    for entry in os.scandir(folder):\n"
_TYPED = (
    "        if entry.is_file() and not entry.name.startswith('.'):\n            found.append(e"
)


def reissue(daemon: Daemon, count: int, interval: float) -> Reissued:
    """`/infill` at each keystroke, each cancelled by leaving, as llama.vim does."""

    def body(typed: int) -> dict[str, Any]:
        lines = (_CODE + _TYPED[: len(_TYPED) - (count - typed) % 40]).rsplit("\n", 1)
        return {
            "input_prefix": lines[0] + "\n",
            "input_suffix": "\n    return sorted(found)\n",
            "prompt": lines[1],
            "n_predict": 48,
            **GREEDY,
        }

    alone = str(daemon.post("/infill", {**body(count), "cache_prompt": False})["content"])
    if daemon.settle(SETTLE_S) is None:
        raise BenchError("The daemon does not come to rest before the requests.")
    before = daemon.get("/localspec/status")["counts"]
    for typed in range(count):
        with _sent(daemon.socket, "/infill", _json({**body(typed), "stream": True})):
            time.sleep(interval)
    last = daemon.stream("/infill", body(count))
    settled = daemon.settle(SETTLE_S)
    after = daemon.get("/localspec/status")["counts"]
    cancelled = after["cancelled"] + after["failed"] - before["cancelled"] - before["failed"]
    return Reissued(
        count,
        interval * 1e3,
        None if settled is None else settled * 1e3,
        last.text == alone,
        count - cancelled,
        last.first_s * 1e3,
    )


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


@contextlib.contextmanager
def _sent(path: str, target: str, content: bytes) -> Iterator[None]:
    """A request whose answer nobody reads; the connection is closed at the end."""
    head = f"POST {target} HTTP/1.1\r\nHost: localspec\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(head.encode("ascii") + content)
        yield


# ------------------------------------------------------------------------- several at once


@dataclass(frozen=True, slots=True)
class Together:
    """Tokens per second of so many clients in all, while all of them write, each a text of its own."""

    clients: int
    repetition: int
    speed: float
    drafted: int
    correct: bool


def write_together(
    daemon: Daemon,
    files: Files,
    clients: int,
    tokens: int,
    prompt: int,
    repetition: int,
    rng: random.Random,
    plain: bool = False,
) -> Together:
    """All start at once; what counts is from when the last begins to write to when the first is done."""
    starts = [rng.randrange(len(files.cycle)) for _ in range(clients)]
    prompts = [synthetic.follow(files.cycle, start, prompt) for start in starts]
    expected = [
        str(
            daemon.post("/detokenize", {"tokens": synthetic.follow(files.cycle, p[-1], tokens)})[
                "content"
            ]
        )
        for p in prompts
    ]
    answers: list[Any] = [None] * clients
    ready = threading.Barrier(clients)

    def ask(at: int) -> None:
        body = {"prompt": prompts[at], "n_predict": tokens, **GREEDY, "cache_prompt": False}
        if plain:
            body["speculative"] = {"enabled": False}
        ready.wait()
        try:
            answers[at] = daemon.stream("/completion", body)
        except Exception as error:  # raised again where it is read
            answers[at] = error

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise BenchError(f"One of {clients} clients failed: {answer}")
    return Together(
        clients,
        repetition,
        # A run for warming up is too short for all to meet, and nobody reads its speed.
        joint_speed([answer.stamps for answer in answers]) if repetition >= 0 else 0.0,
        sum(int(answer.timings["draft_n"]) for answer in answers),
        all(a.text == text for a, text in zip(answers, expected, strict=True)),
    )


def joint_speed(clients: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Tokens per second of all, while all of them write; each client's (seconds, tokens so far).

    Raises:
        BenchError: they never wrote at the same time.
    """
    start = max(stamps[0][0] for stamps in clients)
    end = min(stamps[-1][0] for stamps in clients)
    if end <= start:
        raise BenchError("The clients did not write at the same time; let them write more tokens.")
    made = sum(_so_far(stamps, end) - _so_far(stamps, start) for stamps in clients)
    return made / (end - start)


def _so_far(stamps: Sequence[tuple[float, int]], when: float) -> int:
    return max((tokens for at, tokens in stamps if at <= when), default=0)


def medians(runs: Sequence[Together]) -> dict[int, float]:
    """Speed by number of clients."""
    return {
        count: statistics.median(run.speed for run in runs if run.clients == count)
        for count in sorted({run.clients for run in runs})
    }
