"""The state of a pull, in one form from the downloading threads to the terminal."""

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
    """One file of a pull. Numbers are in bytes."""

    file: str
    done: int
    size: int
    hashed: int = 0


class PullState(msgspec.Struct, frozen=True, kw_only=True):
    """A pull at one moment. `rate` is in bytes per second, `seconds_left` is None while unknown.

    While `state` is "verifying", `hashed` is the progress. An "interrupted" pull was stopped by the end of
    the daemon and resumes at its next start. `retry`: a request failed and will be tried again; if several
    will, the first of them. `message` is the error's sentence and `code` its code. `notes` are remarks of
    the checks. `offers`: the available quantizations, if none was named. `said`: what was chosen, and why.
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
