"""Train a draft: `python -m localspec.extras.tune.training`, a process of its own at the lowest priority.

It reads one JSON object from stdin, a `Job`, and writes objects to stdout, one a line: {"stage", "done"}
while it works, and at last {"result"} or {"error"}. It keeps no text on the disk, and writes the new draft
only to the file that the job names.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from localspec import installation
from localspec.engine.priority import lower_priority
from localspec.errors import LocalspecError

SAVE_INTERVAL_S = 300.0  # of a draft in the making
DEPTH = 4  # of the rounds that are replayed to compare drafts
VALIDATION_SHARE = 0.1  # of the lessons, by which the numpy way decides when to stop
TEACHING_SHARE = 0.4  # of the time, for the target's reading


class Job(msgspec.Struct):
    """Describe one training.

    - `target`, `draft`: paths of the two models.
    - `output`: the file to write.
    - `texts`, `held_out`: as in `make_lesson`, the oldest first.
    - `seconds`: time that reading and training may take.
    - `method`: "rows", "weights", or "auto" for the latter if PyTorch is installed and `network` knows the
      draft's architecture. "none" only compares the draft with the one in `output`.
    - `start`: a copy of the draft that was trained before, whose weights are trained further.
    """

    target: str
    draft: str
    output: str
    texts: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    seconds: float
    threads: int
    method: str = "auto"
    start: str = ""


def _send(**values: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(values) + b"\n")
    sys.stdout.buffer.flush()


def _reporter(stage: str) -> Callable[[float], None]:
    """Return a function that reports the share of a stage that is done, at most twice a second."""
    last = 0.0

    def report(done: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5 or done >= 1:
            last = time.monotonic()
            _send(stage=stage, done=round(done, 3))

    return report


def train(job: Job) -> dict[str, Any]:
    """Train the draft, write it, and return the figures of both drafts on the held-out texts.

    Raises:
        LocalspecError: a model cannot be loaded, or is of a kind that cannot be tuned.
    """
    from localspec.engine.llama import Model
    from localspec.extras.tune import lessons as reading

    taught: list[reading.Lesson] = []
    with Model(job.target, n_gpu_layers=0) as target:
        n_ctx = min(target.n_ctx_train or reading.MAX_CONTEXT, reading.MAX_CONTEXT)
        with Model(job.draft, n_gpu_layers=0) as draft:
            n_ctx = min(n_ctx, draft.n_ctx_train or n_ctx)
        lessons = [reading.make_lesson(text, target.vocab, n_ctx) for text in job.texts]
        held_out = [reading.make_lesson(text, target.vocab, n_ctx) for text in job.held_out]
        lessons = [lesson for lesson in lessons if len(lesson.labels)]
        report = _reporter("reading")
        deadline = time.process_time() + TEACHING_SHARE * job.seconds * job.threads

        def go_on(count: int) -> bool:
            report(count / len(lessons))
            return time.process_time() < deadline

        if job.method != "none":  # the newest first, since the time may not suffice for all
            taught = reading.read_lessons(target, job.threads, lessons[::-1], go_on)
    method = _train_draft(job, taught) if job.method != "none" else ""
    before = _measure(job.draft, job.threads, held_out, "comparing")
    after = _measure(job.output, job.threads, held_out, "comparing the new draft")
    return {
        "method": method,
        "tokens": sum(len(lesson.tokens) - lesson.answer + 1 for lesson in lessons),
        "tokens_per_pass": {
            kind: {"before": before[kind], "after": after[kind]} for kind in before
        },
    }


def _train_draft(job: Job, lessons: Sequence[Any]) -> str:
    """Train in the best way that is possible, write the draft, and return what was trained."""
    from localspec.extras.tune.model_file import ModelFile

    file = ModelFile(Path(job.start or job.draft))
    seconds = (1 - TEACHING_SHARE) * job.seconds
    if job.method != "rows" and importlib.util.find_spec("torch") is not None:
        from localspec.extras.tune import network

        try:
            decoder = network.Decoder(file, "cpu")
        except network.UnknownDecoder:
            if job.method == "weights":
                raise
        else:
            report, saved = _reporter("training"), time.monotonic()

            def report_and_save(done: float) -> None:
                nonlocal saved
                report(done)
                if done >= 1 or time.monotonic() - saved > SAVE_INTERVAL_S:
                    saved = time.monotonic()
                    file.write_copy(Path(job.output), decoder.values())

            network.train_decoder(decoder, lessons, seconds, job.threads, report_and_save)
            return "all weights"
    if job.method == "weights":
        raise LocalspecError(
            "All weights are trained with PyTorch, which is not installed; run: "
            f"{installation.install_extra_command('tune')}. To train without it: --method rows"
        )
    _train_rows(job, lessons, file)
    return "output rows"


def _train_rows(job: Job, lessons: Sequence[Any], file: Any) -> None:
    """Fit rows of the output matrix, and write the draft."""
    import numpy as np

    from localspec.engine.llama import Model
    from localspec.extras.tune import correction
    from localspec.extras.tune.model_file import OUTPUT
    from localspec.extras.tune.reading import TextReader

    tokens = np.unique(np.concatenate([lesson.labels for lesson in lessons]))
    matrix = file.read_tensor(file.output_name)
    n_validation = max(int(VALIDATION_SHARE * len(lessons)), 1)
    with Model(job.draft, n_gpu_layers=0) as draft:
        reader = TextReader(draft, job.threads, states=True)
        try:
            training, validation = (
                correction.collect_positions(reader, part, tokens, matrix[tokens])
                for part in (lessons[n_validation:], lessons[:n_validation])
            )
        finally:
            reader.close()
    report = _reporter("training")
    matrix[tokens] = correction.fit_rows(
        matrix[tokens],
        training,
        validation,
        lambda epoch: report(epoch / correction.MAX_EPOCHS),
    )
    file.write_copy(Path(job.output), {OUTPUT: matrix})


def _measure(path: str, threads: int, lessons: Sequence[Any], stage: str) -> dict[str, float]:
    """Return by kind of work how many tokens a pass of the target yields with a draft."""
    from localspec.engine.llama import Model
    from localspec.extras.tune.lessons import count_hits, mean_tokens_per_pass
    from localspec.extras.tune.reading import TextReader

    report, by_kind = _reporter(stage), {}
    with Model(path, n_gpu_layers=0) as model:
        reader = TextReader(model, threads)
        try:
            for number, kind in enumerate(kinds := sorted({lesson.kind for lesson in lessons})):
                report(number / len(kinds))
                hits = count_hits(reader, [lesson for lesson in lessons if lesson.kind == kind])
                by_kind[kind] = mean_tokens_per_pass(hits, DEPTH)
        finally:
            reader.close()
    return by_kind


def main() -> None:
    """Run one job."""
    # Threads that spin while they wait for each other would keep others from the processors.
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GGML_NO_BACKTRACE="1")
    os.nice(19)
    lower_priority()
    os.umask(0o077)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    os.environ["OPENBLAS_NUM_THREADS"] = str(job.threads)
    from localspec.engine.llama import initialise

    initialise()
    try:
        _send(result=train(job))
    except (LocalspecError, OSError) as error:
        _send(error=str(getattr(error, "message", error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
