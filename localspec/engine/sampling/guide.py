"""The interface of guides, which restrict the next token beside the target's logits.

A grammar is a guide, and so is a limit on the length of thinking.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from localspec.errors import GrammarRejected, LocalspecError
from localspec.priority import lower_priority

Mask = npt.NDArray[np.bool_] | None


class Guide(Protocol):
    """The constraint on one answer; its state advances with each accepted token.

    forbids_often: whether it forbids tokens at most places. Drafts made without its mask are then rarely
    accepted.
    """

    forbids_often: bool = False

    def begin_round(self) -> bool:
        """Return whether the guide can answer in the round that begins; if not, its sequence skips it."""
        return True

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the guide can answer, if it cannot yet."""
        return

    def mask(self) -> Mask:
        """Return which tokens may come next, of shape (n_vocab,); None means all of them."""

    def consume(self, token: int) -> None:
        """Advance by one token, which the mask must allow."""

    def take_back(self, count: int) -> None:
        """Undo the last `count` consumed tokens, at most as many as one pass consumes."""

    def count_valid(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, could come next in this order."""

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, whatever the logits."""
        return []


class CombinedGuide(Guide):
    """A guide that combines two guides, such as a limit on thinking and a grammar for the answer."""

    def __init__(self, first: Guide, second: Guide) -> None:
        """Combine two guides. Where both force tokens, or no token satisfies both, `first` prevails."""
        self._guides = first, second
        self.forbids_often = first.forbids_often or second.forbids_often

    def begin_round(self) -> bool:
        first, second = (guide.begin_round() for guide in self._guides)
        return first and second  # Both must begin the round, even if one is not ready.

    def wait(self, seconds: float) -> None:
        for guide in self._guides:
            guide.wait(seconds)

    def mask(self) -> Mask:
        first, second = (guide.mask() for guide in self._guides)
        if first is None or second is None:
            return second if first is None else first
        both: npt.NDArray[np.bool_] = first & second
        return both if both.any() else first

    def consume(self, token: int) -> None:
        for guide in self._guides:
            guide.consume(token)

    def take_back(self, count: int) -> None:
        for guide in self._guides:
            guide.take_back(count)

    def count_valid(self, tokens: Sequence[int]) -> int:
        return min(guide.count_valid(tokens) for guide in self._guides)

    def forced_tokens(self) -> list[int]:
        first, second = self._guides
        return first.forced_tokens() or second.forced_tokens()


# ------------------------------------------------------------------------ slow guides
# Computing a mask takes microseconds for most grammars and a tenth of a second for hostile ones. So a guide
# runs in a thread of its own, and the step loop waits a moment for each guide in each round. A sequence whose
# guide needs longer skips the following rounds until the guide has answered, and then repeats its last pass.

# Seconds that the step loop waits for one guide in one round. Eight hostile guides together stay below the
# longest gap of a running answer (`longest_gap`, 250 ms). The seconds are CPU time of the guide's thread
# where the system reports it: on a busy machine the thread may wait longer than this for a core, and a
# skipped round would cost its sequence far more.
ROUND_WAIT_S = 0.02
# Limit of the same wait in wall time, as a multiple of ROUND_WAIT_S.
MAX_WALL_PER_CPU = 4
MIN_WAIT_S = 0.001  # A shorter remaining wait is not worth another wake-up.
# Limit for one mask, in wall time. llguidance's own limit (its "fuel") ends most computations much sooner.
ANSWER_LIMIT_S = 30.0
# Limit of the CPU time of all operations of one answer. The first FREE_S of each operation do not count. An
# answer that waits for its grammar occupies a slot that another request may need.
EXCESS_LIMIT_S = 1.0
FREE_S = 0.02


class GuideBusy(Exception):
    """Raised when a guide needs longer than the round can wait."""


class _Reply(NamedTuple):
    number: int
    value: Any
    error: Exception | None


# Operations for the thread. The number identifies the reply; None means that no reply is needed.
_Calls = queue.SimpleQueue[tuple[Callable[[], Any], int | None] | None]
_Replies = queue.SimpleQueue[_Reply]


class DeferredGuide(Guide):
    """A guide whose operations run in a thread of its own. Only the step loop calls its methods."""

    def __init__(self, guide: Guide, wait_s: float | None = None) -> None:
        """Wrap `guide`. wait_s: seconds that a round waits for it; None means ROUND_WAIT_S."""
        self.forbids_often = guide.forbids_often
        self._guide = guide
        self._wait_s = ROUND_WAIT_S if wait_s is None else wait_s
        self._calls: _Calls = queue.SimpleQueue()
        self._replies: _Replies = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._number = 0
        # What remains of this round's wait, in seconds of the thread's CPU time and of wall time.
        self._cpu_s, self._wall_s = self._wait_s, MAX_WALL_PER_CPU * self._wait_s
        # Tokens consumed since the round began, and the masks after each of these paths. The masks survive
        # a repeated pass, so that each repetition gets further than the previous one.
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Mask] = {}
        # The mask that did not arrive in time: the number of its call and its path.
        self._awaited: tuple[int, tuple[int, ...]] | None = None
        self._late_since = 0.0
        self._failure: Exception | None = None

    def begin_round(self) -> bool:
        """Return whether the sequence can take part in the round, which it can unless a mask is late.

        Raises:
            GrammarRejected: the guide has failed or taken far too long.
        """
        self._cpu_s, self._wall_s = self._wait_s, MAX_WALL_PER_CPU * self._wait_s
        if self._path:
            self._path.clear()
            self._masks.clear()
        self._receive(0.0)
        if self._failure is not None:
            raise self._failure
        if self._awaited is not None and time.monotonic() - self._late_since > ANSWER_LIMIT_S:
            raise GrammarRejected(
                f"The grammar is too complex: one token takes more than {ANSWER_LIMIT_S:.0f} seconds."
            )
        return self._awaited is None

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a late mask, when the step loop has nothing else to do."""
        self._receive(seconds)

    def mask(self) -> Mask:
        """Return the mask as `Guide.mask` does. Raises GuideBusy if the round cannot wait for it."""
        path = tuple(self._path)
        if path not in self._masks:
            try:
                self._masks[path] = self._call(self._guide.mask)
            except GuideBusy:
                self._awaited = self._number, path
                self._late_since = time.monotonic()
                raise
        return self._masks[path]

    def consume(self, token: int) -> None:
        """Advance by one token, without waiting."""
        self._path.append(token)
        self._send(lambda: self._guide.consume(token))

    def take_back(self, count: int) -> None:
        """Undo the last `count` tokens, without waiting."""
        if count:
            del self._path[-count:]
            self._send(lambda: self._guide.take_back(count))

    def count_valid(self, tokens: Sequence[int]) -> int:
        """Return how many of these draft tokens can be tried; 0 if the guide is busy."""
        drafts = list(tokens)
        try:
            return int(self._call(lambda: self._guide.count_valid(drafts)))
        except GuideBusy:
            return 0

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next; none if the guide is busy."""
        try:
            forced: list[int] = self._call(self._guide.forced_tokens)
        except GuideBusy:
            return []
        return forced

    # ------------------------------------------------------------------------ the thread

    def _send(self, act: Callable[[], Any], number: int | None = None) -> threading.Thread:
        """Queue an operation and return the thread that runs it, which is started at the first call."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_calls, args=(self._calls, self._replies), name="guide", daemon=True
            )
            self._thread.start()
            # The thread refers to the queues only, so this object can be collected. That ends the thread.
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put((act, number))
        return self._thread

    def _call(self, act: Callable[[], Any]) -> Any:
        """Run `act` in the thread and return its result.

        Raises:
            GuideBusy: the wait of this round is over; the call goes on in the thread.
            Exception: the exception of `act`, or of an earlier operation.
        """
        self._number += 1
        thread = self._send(act, self._number)
        start, cpu_start = time.perf_counter(), _cpu_time(thread)
        cpu_s, wall_s = self._cpu_s, self._wall_s
        while True:
            try:
                reply = self._replies.get(timeout=max(min(self._cpu_s, self._wall_s), 0.0))
            except queue.Empty:
                reply = None
            self._cpu_s = cpu_s - (_cpu_time(thread) - cpu_start)
            self._wall_s = wall_s - (time.perf_counter() - start)
            if reply is not None and reply.number == self._number:
                if reply.error is not None:
                    raise reply.error
                return reply.value
            if self._cpu_s < MIN_WAIT_S:
                lower_priority(thread.native_id)
            elif self._wall_s > 0:
                continue
            raise GuideBusy

    def _receive(self, seconds: float) -> None:
        """Store the late mask if one is awaited, after waiting at most `seconds` for it."""
        while self._awaited is not None:
            number, path = self._awaited
            try:
                reply = self._replies.get(timeout=seconds)
            except queue.Empty:
                return
            if reply.number == number:
                self._awaited = None
                self._masks[path], self._failure = reply.value, reply.error


def _run_calls(calls: _Calls, replies: _Replies) -> None:
    """Run calls in order until None arrives. After a failure, later calls fail with the same error."""
    error: Exception | None = None
    excess_s = 0.0  # CPU time of all calls so far, of each the part beyond FREE_S.
    while (call := calls.get()) is not None:
        (act, number), value, start = call, None, time.thread_time()
        if error is None:
            try:
                value = act()
                excess_s += max(time.thread_time() - start - FREE_S, 0.0)
                if excess_s > EXCESS_LIMIT_S:
                    raise GrammarRejected(
                        "The grammar is too complex: computing which tokens may come takes too long."
                    )
            except Exception as failure:
                if not isinstance(failure, LocalspecError):
                    traceback.print_exc()
                value, error = None, failure
        if number is not None:
            replies.put(_Reply(number, value, error))
        del (
            call,
            act,
            value,
        )  # Holds no references while waiting, so that the guide can be collected.


def _cpu_time(thread: threading.Thread) -> float:
    """Return the CPU seconds that a running thread has used, or wall time where the system has none."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.perf_counter()
