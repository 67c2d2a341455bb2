"""Retry interrupted requests with growing pauses, up to a limit."""

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

    def max_attempts(self, retry_policy: RetryPolicy) -> int:
        """Return the maximum number of tries."""
        return min(retry_policy.tries, self.max_tries or retry_policy.tries)


class Retry(msgspec.Struct, frozen=True):
    """A failed request that is tried again after `seconds`. `attempt`: the coming try, from 2 to `tries`."""

    cause: str
    attempt: int
    tries: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try without progress, and how long to wait between the tries.

    on_wait: called from the waiting thread, before each wait with the coming attempt and after it with None.
    """

    tries: int = 8
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    on_wait: Callable[[Retry | None], None] = field(default=lambda _: None, compare=False)


def call_with_retries(
    action: Callable[[], T],
    retry_policy: RetryPolicy | None = None,
    cancel: threading.Event | None = None,
) -> T:
    """Call `action` until it succeeds or the tries are used up.

    Raises:
        Unreachable: all tries failed.
        PullCancelled: `cancel` was set.
        Others: any exception of `action` except RetryableError.
    """
    retry_policy = retry_policy or RetryPolicy()
    for attempt in range(retry_policy.tries):
        try:
            return action()
        except RetryableError as error:
            if attempt + 1 >= error.max_attempts(retry_policy):
                raise unreachable_error(error) from None
            wait_before_retry(attempt, error, retry_policy, cancel)
    raise AssertionError("tries is at least 1")


def unreachable_error(error: RetryableError) -> Unreachable:
    """Return the error after the last try."""
    next_step = f"{error.advice}, and try again" if error.advice else "try again later"
    return Unreachable(f"{error.what}: {error}. Anything already downloaded is kept; {next_step}.")


def wait_before_retry(
    attempt: int, error: RetryableError, retry_policy: RetryPolicy, cancel: threading.Event | None
) -> None:
    """Wait before the next attempt.

    The pause doubles with each attempt, has some jitter, and is at least as long as the server asked. The
    jitter spreads the clients that a busy server asks to wait for the same time.
    """
    seconds = min(retry_policy.first_pause_s * 2**attempt, retry_policy.longest_pause_s)
    seconds = max(seconds, error.retry_after or 0.0) * random.uniform(1.0, 1.3)
    retry_policy.on_wait(Retry(str(error), attempt + 2, error.max_attempts(retry_policy), seconds))
    try:
        if cancel is None:
            time.sleep(seconds)
        else:
            cancel.wait(seconds)
            check_cancel(cancel)
    finally:
        retry_policy.on_wait(None)
