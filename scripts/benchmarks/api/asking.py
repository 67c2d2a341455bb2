"""What is sent to both servers, and several clients at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import Daemon, Streamed
from benchmarks.servers.llama_server import Running

GREEDY: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_k": 1,
    "samplers": ["top_k"],
    "cache_prompt": True,
}
COLD: Mapping[str, Any] = {**GREEDY, "cache_prompt": False}
_BROKEN = "\ufffd"


def same_text(one: str, other: str) -> bool:
    """Equal, but for what is no whole character at the end: llama-server leaves that out."""
    return one.rstrip(_BROKEN) == other.rstrip(_BROKEN)


def dropped(server: Daemon | Running, target: str, body: Mapping[str, Any], seconds: float) -> None:
    """Send a streamed request whose answer nobody reads, and leave it after so many seconds."""
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {target} HTTP/1.1\r\nHost: localspec\r\nContent-Type: application/json\r\n"
    with server.dial() as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(seconds)


def together(requests: Sequence[Callable[[], Streamed]]) -> list[Streamed]:
    """All begin at once, each a client of its own; the answers of all.

    Raises:
        BenchError: one of them failed.
    """
    answers: list[Streamed | Exception | None] = [None] * len(requests)
    ready = threading.Barrier(len(requests))

    def ask(at: int) -> None:
        ready.wait()
        try:
            answers[at] = requests[at]()
        except Exception as error:  # raised again where it is read
            answers[at] = error

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streamed = [answer for answer in answers if isinstance(answer, Streamed)]
    if len(streamed) < len(requests):
        failed = next(answer for answer in answers if isinstance(answer, Exception))
        raise BenchError(f"One of {len(requests)} clients failed: {failed}")
    return streamed


def joint_speed(clients: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Tokens per second of all, while all of them write; each client's (seconds, tokens so far).

    Raises:
        BenchError: they never wrote at the same time.
    """
    start = max(stamps[0][0] for stamps in clients)
    end = min(stamps[-1][0] for stamps in clients)
    if end <= start:
        raise BenchError("The clients did not write at the same time; let them write more tokens.")
    made = sum(so_far(stamps, end) - so_far(stamps, start) for stamps in clients)
    return made / (end - start)


def so_far(stamps: Sequence[tuple[float, int]], when: float) -> int:
    """Tokens until then."""
    return max((tokens for at, tokens in stamps if at <= when), default=0)
