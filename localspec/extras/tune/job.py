"""Define what a training process gets on stdin, and write what it sends to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec


class Job(msgspec.Struct):
    """Describe one training.

    - `target`, `draft`: paths of the two models. `draft` is "" if heads in the target's file draft, or
      nothing does.
    - `output`: the file to write.
    - `texts`, `held_out`: as in `make_lesson`, the oldest first.
    - `seconds`: time that reading and training may take.
    - `method`: "rows", "weights", or "auto" for the latter if PyTorch is installed and `network` knows the
      draft's architecture. "new" makes another draft, which reads the target's states. "none" only compares
      the draft with the one in `output`.
    - `gpu_layers`: how many layers of each model may be on a GPU, as in the configuration.
    - `scratch`: a folder for files that are needed meanwhile, such as the target's states, which take at most
      `max_state_bytes` there.
    - `start`: a draft that was half trained before, whose weights are trained further.
    """

    target: str
    draft: str
    output: str
    texts: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    seconds: float
    threads: int
    method: str = "auto"
    start: str = ""
    max_state_bytes: int = 0
    scratch: str = ""
    gpu_layers: int = 0


def send(**values: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(values) + b"\n")
    sys.stdout.buffer.flush()


def make_reporter(stage: str) -> Callable[[float], None]:
    """Return a function that reports the share of a stage that is done, at most twice a second."""
    last = 0.0

    def report(done: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5 or done >= 1:
            last = time.monotonic()
            send(stage=stage, done=round(done, 3))

    return report
