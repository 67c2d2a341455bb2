"""How requests end: with an answer, with an error that is theirs alone, or not yet: run again alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from localspec.engine.llama import DecodeError, DecodeFatal, NotFinite
from localspec.engine.pair.lane import Lane
from localspec.engine.scheduler import Scheduler
from localspec.engine.sequence import Sequence
from localspec.errors import LocalspecError
from localspec.protocol.frames import Failed, Frame

Emit = Callable[[Frame], None]


class Endings:
    """Takes requests out of the scheduler and sends each its last frames."""

    def __init__(self, scheduler: Scheduler, emit: Emit) -> None:
        self._scheduler = scheduler
        self._emit = emit

    def finish(self, lane: Lane, sequence: Sequence) -> None:
        """The answer is complete, or cut off where it was to be."""
        last, done = sequence.last_text(), sequence.done(lane.exact)
        done.passes, done.busy = lane.passes, lane.busy
        lane.passes = lane.busy = 0
        if sequence in lane.active:
            self._scheduler.leave(lane, sequence)
        if last is not None:
            self._emit(last)
        self._emit(done)

    def guard(self, act: Callable[[Lane, Sequence], None], lane: Lane, sequence: Sequence) -> None:
        """Do something for one request; what is raised ends that one.

        Raises:
            DecodeFatal: a context is lost.
        """
        try:
            act(lane, sequence)
        except DecodeFatal:
            raise
        except Exception as error:  # also a bug of ours: the others go on
            self.failed(lane, sequence, error)

    def failed(self, lane: Lane, sequence: Sequence, error: Exception) -> None:
        """End one request with an error. Nothing of its slot is trusted any more."""
        if isinstance(error, NotFinite) and self._separate(lane, sequence):
            return
        self._scheduler.drop(lane, sequence)
        self.refused(sequence.id, error)

    def _separate(self, lane: Lane, sequence: Sequence) -> bool:
        """Logits that are no numbers may come from any text in the context: some of llama.cpp's kernels
        add what others' cells hold, times nothing, and NaN times nothing is NaN.

        So all is forgotten, and those that ran are run again, one after another. False: this one was
        alone already, so they are its own.
        """
        if sequence.alone:
            self._scheduler.forget_slots(lane)
            return False
        sequence.verifier.take_back()
        for each in sorted(lane.active, key=lambda each: -each.number):
            if each.finished:
                self.finish(lane, each)
        self._scheduler.separate(lane)
        return True

    def refused(self, request: int, error: Exception) -> None:
        """Tell of an error."""
        self._emit(refusal(request, error))


def refusal(request: int, error: Exception) -> Failed:
    """An error as it is told. One that is no fault of the request is ours, and the log says where."""
    if isinstance(error, LocalspecError) and not isinstance(error, DecodeError):
        sizes = error.n_prompt_tokens, error.n_ctx
        return Failed(request, error.code, error.message, error.param, *sizes)
    traceback.print_exception(error)
    what = error.message if isinstance(error, LocalspecError) else f"{error!r}."
    return Failed(request, "internal_error", f"The engine failed on this request: {what}")
