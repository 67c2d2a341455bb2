"""How requests end: with an answer, or with an error that is theirs alone."""

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
    """Takes requests out of the scheduler and sends each one its last frames."""

    def __init__(self, scheduler: Scheduler, emit: Emit) -> None:
        self._scheduler = scheduler
        self._emit = emit

    def finish(self, lane: Lane, sequence: Sequence) -> None:
        """Send the end of an answer that is complete or was cut off."""
        last_text, done = sequence.last_text(), sequence.done(lane.exact)
        done.passes, done.busy = lane.passes, lane.busy
        lane.passes = lane.busy = 0
        if sequence in lane.active:
            self._scheduler.leave(lane, sequence)
        if last_text is not None:
            self._emit(last_text)
        self._emit(done)

    def guard(self, act: Callable[[Lane, Sequence], None], lane: Lane, sequence: Sequence) -> None:
        """Call `act` for one request, and fail that request if it raises.

        Raises:
            DecodeFatal: A context is lost.
        """
        try:
            act(lane, sequence)
        except DecodeFatal:
            raise
        except Exception as error:  # a bug of ours, too: the other requests go on
            self.failed(lane, sequence, error)

    def failed(self, lane: Lane, sequence: Sequence, error: Exception) -> None:
        """End one request with an error. What its slot holds is not trusted any more."""
        if isinstance(error, NotFinite) and self._separate(lane, sequence):
            return
        self._scheduler.drop(lane, sequence)
        self.refused(sequence.id, error)

    def _separate(self, lane: Lane, sequence: Sequence) -> bool:
        """Empty the lane after NaN or infinite logits, and run its requests again one after another.

        They may come from any text in the context: some of llama.cpp's kernels add what the cells of
        other sequences hold, multiplied by zero, and NaN times zero is NaN. Returns False if the sequence
        ran alone already, so that the values are its own.
        """
        if sequence.alone:
            self._scheduler.forget_slots(lane)
            return False
        sequence.verifier.take_back()
        for active in sorted(lane.active, key=lambda sequence: -sequence.number):
            if active.finished:
                self.finish(lane, active)
        self._scheduler.separate(lane)
        return True

    def refused(self, request_id: int, error: Exception) -> None:
        """Send the frame of an error."""
        self._emit(refusal(request_id, error))


def refusal(request_id: int, error: Exception) -> Failed:
    """Return the frame of an error.

    An error that the request did not cause is reported as internal, with its traceback in the log.
    """
    if isinstance(error, LocalspecError) and not isinstance(error, DecodeError):
        sizes = error.n_prompt_tokens, error.n_ctx
        return Failed(request_id, error.code, error.message, error.param, *sizes)
    traceback.print_exception(error)
    detail = error.message if isinstance(error, LocalspecError) else f"{error!r}."
    return Failed(request_id, "internal_error", f"The engine failed on this request: {detail}")
