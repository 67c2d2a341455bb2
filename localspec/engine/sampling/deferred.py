"""A grammar that answers beside the step loop, so that a slow one delays no other request's tokens.

Computing a mask takes microseconds for most grammars and a tenth of a second for hostile ones. Each guide
has a thread of its own. The step loop waits for it a moment in each round; a sequence whose guide needs
longer sits out the following rounds until the guide has answered, and then repeats its last pass.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.engine.priority import lower_priority
from localspec.engine.sampling.guide import Guide
from localspec.errors import GrammarRejected, LocalspecError

# Seconds that the step loop waits for one guide in one round. Eight hostile ones together stay below the
# gap that a running answer may have (`longest_gap`, 250 ms). They are the processor's, where the system can
# tell: on a busy machine a thread waits longer than that for a core, and to sit out a round costs its
# sequence far more.
ROUND_WAIT_S = 0.02
# The most that the step loop waits by the clock on the wall, in multiples of that.
STARVED = 4
MOMENT_S = 0.001  # shorter waits are not worth another turn
# For one mask, by the clock on the wall: llguidance's fuel ends it much sooner.
ANSWER_LIMIT_S = 30.0
# Processor time that the operations of one answer may take, each beyond FREE_S. An answer that waits for its
# grammar keeps its place, which another request may want.
EXCESS_LIMIT_S = 1.0
FREE_S = 0.02

Mask = npt.NDArray[np.bool_] | None


class GuideBusy(Exception):
    """The guide needs longer than the round can wait."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation for the thread; `number` is that of its reply, None where none is wanted."""

    act: Callable[[], Any]
    number: int | None


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int
    value: Any
    error: Exception | None


@dataclass(slots=True)
class _Clock:
    """Processor time of all operations so far, as far as each took more than FREE_S."""

    excess_s: float = 0.0

    def run(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns. Raises GrammarRejected where all have taken too long together."""
        start = time.thread_time()
        value = act()
        self.excess_s += max(time.thread_time() - start - FREE_S, 0.0)
        if self.excess_s > EXCESS_LIMIT_S:
            raise GrammarRejected(
                "The grammar is too complex: computing which tokens may come takes too long."
            )
        return value


class DeferredGuide:
    """A Guide whose operations run in a thread. Its methods are called by the step loop alone."""

    def __init__(self, guide: Guide, wait_s: float | None = None) -> None:
        """wait_s: seconds that a round waits for it; None: ROUND_WAIT_S."""
        self.narrows = guide.narrows
        self._guide = guide
        self._wait_s = ROUND_WAIT_S if wait_s is None else wait_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._number = 0
        # What is left of this round's wait, in seconds of the thread and on the wall.
        self._patience, self._wall_s = self._wait_s, STARVED * self._wait_s
        # Tokens consumed since the round began, and the masks known at these places. They are kept when a
        # pass is repeated, so that each repetition gets further than the one before.
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Mask] = {}
        self._awaited: tuple[int, tuple[int, ...]] | None = None  # a late mask: number and place
        self._late_since = 0.0
        self._failure: Exception | None = None

    def begin_round(self) -> bool:
        """Return whether the sequence can take part in a round: no late answer is awaited.

        Raises:
            GrammarRejected: the guide has failed, or has taken far too long.
        """
        self._patience, self._wall_s = self._wait_s, STARVED * self._wait_s
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
        """Wait for a late answer, where nothing else is to be done."""
        self._receive(seconds)

    def mask(self) -> Mask:
        """As a Guide's. Raises GuideBusy where the round cannot wait for it."""
        place = tuple(self._path)
        if place not in self._masks:
            try:
                self._masks[place] = self._ask(self._guide.mask)
            except GuideBusy:
                self._awaited = self._number, place
                self._late_since = time.monotonic()
                raise
        return self._masks[place]

    def consume(self, token: int) -> None:
        """Advance by one token, without waiting."""
        self._path.append(token)
        self._send(lambda: self._guide.consume(token))

    def take_back(self, count: int) -> None:
        """Go back before the last `count` tokens, without waiting."""
        if count:
            del self._path[-count:]
            self._send(lambda: self._guide.take_back(count))

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these drafts can be tried; none where the guide is busy."""
        drafts = list(tokens)
        try:
            return int(self._ask(lambda: self._guide.valid(drafts)))
        except GuideBusy:
            return 0

    def forced(self) -> list[int]:
        """Tokens that must come next; none where the guide is busy."""
        try:
            forced: list[int] = self._ask(self._guide.forced)
        except GuideBusy:
            return []
        return forced

    # ------------------------------------------------------------------------ the thread

    def _send(self, act: Callable[[], Any], number: int | None = None) -> threading.Thread:
        """Return the thread that carries it out."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._calls, self._replies), name="guide", daemon=True
            )
            self._thread.start()
            # The thread holds the queues and not this object, whose end is its own.
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(_Call(act, number))
        return self._thread

    def _ask(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns in the thread.

        Raises:
            GuideBusy: the round's patience has ended; the call goes on.
            Exception: what `act` has raised, or an operation before it.
        """
        self._number += 1
        thread = self._send(act, self._number)
        start, worked = time.perf_counter(), _worked(thread)
        patience, wall_s = self._patience, self._wall_s
        while True:
            try:
                reply = self._replies.get(timeout=max(min(self._patience, self._wall_s), 0.0))
            except queue.Empty:
                reply = None
            self._patience = patience - (_worked(thread) - worked)
            self._wall_s = wall_s - (time.perf_counter() - start)
            if reply is not None and reply.number == self._number:
                return _value(reply)
            if self._patience < MOMENT_S:
                lower_priority(thread.native_id)
            elif self._wall_s > 0:
                continue
            raise GuideBusy

    def _receive(self, seconds: float) -> None:
        """Take the late answer, where one is awaited, after waiting at most so long for it."""
        while self._awaited is not None:
            number, place = self._awaited
            try:
                reply = self._replies.get(timeout=seconds)
            except queue.Empty:
                return
            if reply.number == number:
                self._awaited = None
                self._masks[place], self._failure = reply.value, reply.error


def _serve(calls: queue.SimpleQueue[_Call | None], replies: queue.SimpleQueue[_Reply]) -> None:
    """Carry out calls in their order. After one that fails, all that follow fail alike."""
    error: Exception | None = None
    clock = _Clock()
    while (call := calls.get()) is not None:
        value = None
        if error is None:
            try:
                value = clock.run(call.act)
            except Exception as failure:
                if not isinstance(failure, LocalspecError):
                    traceback.print_exc()
                error = failure
        if call.number is not None:
            replies.put(_Reply(call.number, value, error))
        del call, value  # nothing is held while waiting


def _worked(thread: threading.Thread) -> float:
    """Seconds of processor time that a running thread has used; of the wall's where they are not known."""
    if sys.platform == "linux" and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.perf_counter()


def _value(reply: _Reply) -> Any:
    if reply.error is not None:
        raise reply.error
    return reply.value
