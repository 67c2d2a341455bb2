"""The step loop of an embedding or reranking model.

Each pass holds as many texts as fit, of all requests in turn.
"""

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

_MAX_ABS_VALUE = 32760.0  # `normalize` 0 scales a vector so that its largest component is this


@dataclass(eq=False, slots=True)
class _Job:
    """A request and the vectors of its texts so far.

    alone: each text gets a pass of its own, because a shared pass gave NaN or infinite values.
    """

    inputs: TokenizedInputs
    vectors: list[States] = field(default_factory=list)
    alone: bool = False

    @property
    def id(self) -> int:
        return self.inputs.request.id

    @property
    def remaining(self) -> int:
        return len(self.inputs.texts) - len(self.vectors)


class Encoder:
    """Runs requests on one loaded model, in turns, so that a long request does not hold up short ones.

    One thread calls `submit`, `cancel` and `step`. An exception raised on behalf of one request ends only
    that request.
    """

    def __init__(self, model: EmbeddingModel, emit: Emit) -> None:
        self._model = model
        self._emit = emit
        self._jobs: deque[_Job] = deque()
        self.interruption = Interruption()  # called by other threads

    # ------------------------------------------------------------------------ requests in

    def submit(self, inputs: TokenizedInputs) -> None:
        self._jobs.append(_Job(inputs))

    def cancel(self, request_id: int) -> bool:
        """End a request now. Return False if there is no such request."""
        job = next((job for job in self._jobs if job.id == request_id), None)
        if job is not None:
            self._fail_job(job, Cancelled("The request was cancelled."))
        return job is not None

    @property
    def active(self) -> bool:
        return bool(self._jobs)

    @property
    def hurries(self) -> bool:
        return False

    def forget(self, conversation: str | None) -> None:
        """Do nothing: an encoder caches no text."""

    def forget_saved(self, _conversation: str | None, done: Callable[[], None]) -> None:
        """Call `done`: an encoder has no files."""
        done()

    def spare(self, _most: int) -> int:
        """Return 0: an encoder has no prompt cache."""
        return 0

    def save(self) -> None:
        """Do nothing: an encoder learns nothing."""

    def close(self) -> None:
        self._model.close()

    # ------------------------------------------------------------------------ one step

    def step(self) -> None:
        """Make one pass.

        Raises:
            DecodeFatal: The context can no longer be trusted; the process must end.
        """
        selected = self._select_texts()
        jobs = dict.fromkeys(job for job, _ in selected)
        # A shared pass is not interrupted: the other requests would pay for it a second time.
        leaver = [job.id for job in jobs] if len(jobs) == 1 else []
        self._model.context.stop = self.interruption.begins(leaver)
        try:
            encoded = self._model.encode([text for _, text in selected])
        except (Aborted, DecodeFatal) as error:
            if isinstance(error, DecodeFatal):
                raise
            return
        except Exception as error:  # a bug of ours, too, ends only these requests
            self._handle_failure(list(jobs), len(selected), error)
            return
        for (job, _), vector in zip(selected, encoded, strict=True):
            job.vectors.append(vector)
        self._jobs.rotate(-1)
        for job in jobs:
            if not job.remaining:
                self._jobs.remove(job)
                self._emit(Reply(job.id, _build_reply(job)))

    def _select_texts(self) -> list[tuple[_Job, list[int]]]:
        """Return the texts of the next pass with their jobs, those of the first request first."""
        selected: list[tuple[_Job, list[int]]] = []
        free_rows = self._model.rows
        for job in self._jobs:
            for text in job.inputs.texts[len(job.vectors) :]:
                is_full = len(selected) == self._model.texts or len(text) > free_rows or job.alone
                if selected and is_full:
                    return selected
                selected.append((job, text))
                free_rows -= len(text)
        return selected

    def _handle_failure(self, jobs: list[_Job], n_texts: int, error: Exception) -> None:
        """Fail the jobs, unless a text of another one may be at fault.

        NaN or infinite values may come from any text of the pass, so after a shared pass each text gets
        one of its own.
        """
        if isinstance(error, NotFinite) and n_texts > 1:
            for job in jobs:
                job.alone = True
            return
        for job in jobs:
            self._fail_job(job, error)

    def _fail_job(self, job: _Job, error: Exception) -> None:
        self._jobs.remove(job)
        self._emit(refusal(job.id, error))


def _build_reply(job: _Job) -> dict[str, object]:
    request, tokens = job.inputs.request, [len(text) for text in job.inputs.texts]
    if not isinstance(request, Embed):
        return {"scores": [float(vector[0]) for vector in job.vectors], "tokens": tokens}
    size = request.dimensions or None
    vectors = [normalized(vector[:size], request.normalize) for vector in job.vectors]
    return {"vectors": [vector.astype("<f4").tobytes() for vector in vectors], "tokens": tokens}


def normalized(vector: States, norm: int) -> States:
    """Return `vector` scaled as llama.cpp's common_embd_normalize does it.

    norm: -1 leaves it as it is, 0 scales by the largest component, p > 0 by the p-norm.
    """
    magnitudes = np.abs(vector.astype(np.float64))
    if norm < 0:
        return vector
    length = (
        float((magnitudes**norm).sum() ** (1 / norm))
        if norm
        else float(magnitudes.max()) / _MAX_ABS_VALUE
    )
    return (vector / length).astype(np.float32) if length > 0 else vector
