"""Trying again, with patience and an end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from localspec.errors import Unreachable
from localspec.registry.store.files import check_cancel

T = TypeVar("T")


class Interrupted(Exception):
    """The request may be tried again: the line broke, stalled, or the server asked for patience.

    advice: what to look at when trying again does not help. retry_after: in seconds. what: what cannot be
    done, for the error after the last try. max_tries: fewer than usual, where more promise nothing.
    """

    def __init__(
        self,
        why: str,
        advice: str = "",
        *,
        retry_after: float | None = None,
        what: str = "The hub cannot be reached",
        max_tries: int | None = None,
    ) -> None:
        super().__init__(why)
        self.advice = advice
        self.retry_after = retry_after
        self.what = what
        self.max_tries = max_tries

    def tries(self, patience: Patience) -> int:
        """Return how often to try in all."""
        return min(patience.tries, self.max_tries or patience.tries)


class Retry(msgspec.Struct, frozen=True):
    """What a pull waits for: another attempt, the how manieth of how many, in how many seconds."""

    cause: str
    attempt: int
    tries: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Patience:
    """How often to try without getting a byte further, and how long to wait between (seconds).

    `told` is called before each wait, and with None after it; from whichever thread waits.
    """

    tries: int = 8
    first_pause: float = 1.0
    longest_pause: float = 30.0
    told: Callable[[Retry | None], None] = field(default=lambda _: None, compare=False)


def patiently(
    action: Callable[[], T],
    patience: Patience | None = None,
    cancel: threading.Event | None = None,
) -> T:
    """Call `action` until it is not Interrupted.

    Raises:
        Unreachable: after all tries. PullCancelled. Whatever else `action` raises.
    """
    patience = patience or Patience()
    for attempt in range(patience.tries):
        try:
            return action()
        except Interrupted as error:
            if attempt + 1 >= error.tries(patience):
                raise gave_up(error) from None
            pause(attempt, error, patience, cancel)
    raise AssertionError("tries is at least 1")


def gave_up(error: Interrupted) -> Unreachable:
    what_to_do = f"{error.advice}, and try again" if error.advice else "try again later"
    return Unreachable(f"{error.what}: {error}. Anything already downloaded is kept; {what_to_do}.")


def pause(
    attempt: int, error: Interrupted, patience: Patience, cancel: threading.Event | None
) -> None:
    """Wait twice as long each time, with some jitter, and as long as the server asked at least.

    A server that asks for no time at all is one that many ask at once.
    """
    seconds = min(patience.first_pause * 2**attempt, patience.longest_pause)
    seconds = max(seconds, error.retry_after or 0.0) * random.uniform(1.0, 1.3)
    patience.told(Retry(str(error), attempt + 2, error.tries(patience), seconds))
    try:
        if cancel is None:
            time.sleep(seconds)
        else:
            cancel.wait(seconds)
            check_cancel(cancel)
    finally:
        patience.told(None)
