"""Retry interrupted requests with growing pauses, up to a limit, and the parameters of a download."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from localspec.errors import Unreachable

T = TypeVar("T")


class RetryableError(Exception):
    """A request that may be tried again: the connection broke or stalled, or the server asked to wait.

    advice: what to check if retries do not help. retry_after: in seconds. what: what failed, for the error
    after the last try. max_tries: a lower limit, if more tries would not help.
    """

    def __init__(
        self,
        reason: str,
        advice: str = "",
        *,
        retry_after: float | None = None,
        what: str = "The hub cannot be reached",
        max_tries: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.advice = advice
        self.retry_after = retry_after
        self.what = what
        self.max_tries = max_tries


class Retry(msgspec.Struct, frozen=True):
    """A failed request that is tried again after `seconds`. `attempt`: the coming try, from 2 to `tries`."""

    cause: str
    attempt: int
    tries: int
    seconds: float


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often to try without progress, and how long to wait between the tries."""

    tries: int = 8
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0


class Tuning(msgspec.Struct, frozen=True):
    """The parameters of a download. Sizes are in bytes.

    Segments are large, because each one costs a request to the hub, which redirects to a signed URL. They are
    small enough that all connections end at about the same time. stall_s: a connection is given up after this
    many seconds without a byte.
    """

    connections: int = 4
    segment: int = 32 << 20
    sync: int = 64 << 20
    stall_s: float = 20.0
    retry_policy: RetryPolicy = RetryPolicy()


DEFAULT_TUNING = Tuning()
# Called from the waiting thread, before each wait with the coming attempt and after it with None.
OnWait = Callable[[Retry | None], None]


def ignore_wait(_retry: Retry | None) -> None:
    """Do nothing about a wait."""


def call_with_retries(
    action: Callable[[], T], policy: RetryPolicy, on_wait: OnWait = ignore_wait
) -> T:
    """Call `action` until it succeeds or the tries are used up.

    Raises:
        Unreachable: all tries failed.
        Others: any exception of `action` except RetryableError.
    """
    failures = 0
    while True:
        try:
            return action()
        except RetryableError as error:
            failures += 1
            wait_before_retry(failures, error, policy, on_wait)


def wait_before_retry(
    failures: int,
    error: RetryableError,
    policy: RetryPolicy,
    on_wait: OnWait,
    stop: threading.Event | None = None,
) -> None:
    """Wait after the last of so many failures in a row, or until `stop` is set. 0: there was progress since.

    The pause doubles with each failure, has some jitter, and is at least as long as the server asked. The
    jitter spreads the clients that a busy server asks to wait for the same time.

    Raises:
        Unreachable: all tries failed.
    """
    tries = min(policy.tries, error.max_tries or policy.tries)
    if failures >= tries:
        next_step = f"{error.advice}, and try again" if error.advice else "try again later"
        raise Unreachable(
            f"{error.what}: {error}. Anything already downloaded is kept; {next_step}."
        ) from None
    seconds = min(policy.first_pause_s * 2 ** max(failures - 1, 0), policy.longest_pause_s)
    seconds = max(seconds, error.retry_after or 0.0) * random.uniform(1.0, 1.3)
    on_wait(Retry(str(error), max(failures, 1) + 1, tries, seconds))
    (stop or threading.Event()).wait(seconds)
    on_wait(None)
