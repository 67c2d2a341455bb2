"""What a pull shows of itself, from the threads that fetch to the terminal: one shape all the way."""

from __future__ import annotations

from typing import Literal

import msgspec

from localspec.registry.hub.repository import Offer
from localspec.registry.hub.retry import Retry

State = Literal[
    "checking", "downloading", "verifying", "done", "failed", "cancelled", "interrupted"
]
RUNNING = ("checking", "downloading", "verifying")


class FileState(msgspec.Struct, frozen=True):
    """One file of a pull, in bytes."""

    file: str
    done: int
    size: int
    hashed: int = 0


class PullState(msgspec.Struct, frozen=True, kw_only=True):
    """A pull at one moment. `rate` in bytes per second, `seconds_left` None while unknown; while it
    verifies, `hashed` is what counts.

    "interrupted": by the daemon's end; it goes on at the next start. `retry`: a request failed and is
    tried again; of several the one that comes first.

    `message` is the error's sentence and `code` its code; `notes` are what the checks found.
    `offers`: the quantizations there are, where none was named; `said`: what was decided, and why.
    """

    name: str
    state: State
    done: int = 0
    size: int = 0
    hashed: int = 0
    rate: float = 0
    seconds_left: float | None = None
    files: tuple[FileState, ...] = ()
    notes: tuple[str, ...] = ()
    offers: tuple[Offer, ...] = ()
    said: tuple[str, ...] = ()
    message: str = ""
    code: str = ""
    retry: Retry | None = None
