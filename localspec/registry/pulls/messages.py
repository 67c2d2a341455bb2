"""What a pull's process is told and reports: its job, and its state at each moment.

The state has one form from the downloading threads to the terminal.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from localspec.protocol.pairs import ForecastView
from localspec.registry.catalogue import CataloguePair
from localspec.registry.header.fit import FreeMemory, LoadOptions
from localspec.registry.hub.repository import Offer
from localspec.registry.hub.retry import Retry, Tuning
from localspec.registry.pulls.targets import PullTarget

State = Literal[
    "checking", "downloading", "verifying", "done", "failed", "cancelled", "interrupted"
]
RUNNING_STATES = ("checking", "downloading", "verifying")


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
    `forecast`: how fast the pair should be, once its headers were read; null if that cannot be told.
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
    forecast: ForecastView | None = None
    message: str = ""
    code: str = ""
    retry: Retry | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to pull, and into which store.

    pairs: those of the catalogue. memory, load: as in `Puller`. endpoint, token,
    login_endpoint: as in `Hub`.
    """

    target: PullTarget
    store: str
    pairs: dict[str, CataloguePair] = {}
    memory: FreeMemory | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    endpoint: str = ""
    token: str = ""
    login_endpoint: str = ""
    tuning: Tuning = Tuning()


class Report(msgspec.Struct, frozen=True):
    """A new state. `target`: the request as far as it is decided, when that changed."""

    state: PullState
    target: PullTarget | None = None
