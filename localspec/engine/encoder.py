"""The step loop of a model that turns texts into numbers: one pass over as many as fit, of all requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from localspec.engine.embedding.inputs import TokenizedInputs
from localspec.engine.embedding.model import EmbeddingModel
from localspec.engine.endings import Emit, refusal
from localspec.engine.interruption import Interruption
from localspec.engine.llama import Aborted, DecodeFatal, NotFinite
from localspec.engine.llama.heads import States
from localspec.errors import Cancelled
from localspec.protocol.frames import Embed, Reply

_LARGEST = 32760.0  # what the largest number becomes with `normalize` 0


@dataclass(eq=False, slots=True)
class _Job:
    """A request: its texts' numbers so far. alone: one text a pass, since its numbers were none."""

    inputs: TokenizedInputs
    found: list[States] = field(default_factory=list)
    alone: bool = False

    @property
    def id(self) -> int:
        return self.inputs.request.id

    @property
    def left(self) -> int:
        return len(self.inputs.texts) - len(self.found)


class Encoder:
    """Runs requests on one loaded model, in turns: one with many texts holds up none with a few.

    One thread calls `submit`, `cancel` and `step`; what is raised on one request's behalf ends that one.
    """

    def __init__(self, model: EmbeddingModel, emit: Emit) -> None:
        self._model = model
        self._emit = emit
        self._jobs: deque[_Job] = deque()
        self.interruption = Interruption()  # for other threads

    # ------------------------------------------------------------------------ requests in

    def submit(self, inputs: TokenizedInputs) -> None:
        self._jobs.append(_Job(inputs))

    def cancel(self, request: int) -> bool:
        """End a request now. False: there is no such request."""
        job = next((job for job in self._jobs if job.id == request), None)
        if job is not None:
            self._refuse(job, Cancelled("The request was cancelled."))
        return job is not None

    @property
    def active(self) -> bool:
        return bool(self._jobs)

    @property
    def hurries(self) -> bool:
        return False

    def forget(self, conversation: str | None) -> None:
        """Nothing is kept of any text."""

    def forget_saved(self, _conversation: str | None, done: Callable[[], None]) -> None:
        """As `forget`: it has been done."""
        done()

    def spare(self, _most: int) -> int:
        """Nothing is kept."""
        return 0

    def save(self) -> None:
        """Nothing is learned."""

    def close(self) -> None:
        self._model.close()

    # ------------------------------------------------------------------------ one step

    def step(self) -> None:
        """One pass.

        Raises:
            DecodeFatal: the context can no longer be trusted; the process is to end.
        """
        taken = self._taken()
        jobs = dict.fromkeys(job for job, _ in taken)
        # Of one request alone: another one's pass is not to be made twice because somebody leaves.
        leaver = [job.id for job in jobs] if len(jobs) == 1 else []
        self._model.context.stop = self.interruption.begins(leaver)
        try:
            found = self._model.encode([text for _, text in taken])
        except (Aborted, DecodeFatal) as error:
            if isinstance(error, DecodeFatal):
                raise
            return
        except Exception as error:  # a bug of ours, too
            self._failed(list(jobs), len(taken), error)
            return
        for (job, _), numbers in zip(taken, found, strict=True):
            job.found.append(numbers)
        self._jobs.rotate(-1)
        for job in jobs:
            if not job.left:
                self._jobs.remove(job)
                self._emit(Reply(job.id, _answer(job)))

    def _taken(self) -> list[tuple[_Job, list[int]]]:
        """The texts of the next pass, each with whose it is: of the first request, then of the others."""
        taken: list[tuple[_Job, list[int]]] = []
        room = self._model.rows
        for job in self._jobs:
            for text in job.inputs.texts[len(job.found) :]:
                full = len(taken) == self._model.texts or len(text) > room or job.alone
                if taken and full:
                    return taken
                taken.append((job, text))
                room -= len(text)
        return taken

    def _failed(self, jobs: list[_Job], texts: int, error: Exception) -> None:
        """Numbers that are none may come from any text of the pass: each gets one of its own then."""
        if isinstance(error, NotFinite) and texts > 1:
            for job in jobs:
                job.alone = True
            return
        for job in jobs:
            self._refuse(job, error)

    def _refuse(self, job: _Job, error: Exception) -> None:
        self._jobs.remove(job)
        self._emit(refusal(job.id, error))


def _answer(job: _Job) -> dict[str, object]:
    request, tokens = job.inputs.request, [len(each) for each in job.inputs.texts]
    if not isinstance(request, Embed):
        return {"scores": [float(each[0]) for each in job.found], "tokens": tokens}
    size = request.dimensions or None
    vectors = [normalized(each[:size], request.normalize) for each in job.found]
    return {"vectors": [each.astype("<f4").tobytes() for each in vectors], "tokens": tokens}


def normalized(numbers: States, how: int) -> States:
    """As llama.cpp's common_embd_normalize: −1 not at all, 0 by the largest, p by the p-norm."""
    exact = np.abs(numbers.astype(np.float64))
    if how < 0:
        return numbers
    length = float((exact**how).sum() ** (1 / how)) if how else float(exact.max()) / _LARGEST
    return (numbers / length).astype(np.float32) if length > 0 else numbers
