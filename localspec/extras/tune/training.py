"""Train a draft: `python -m localspec.extras.tune.training`, a process of its own at the lowest priority.

It reads one JSON object from stdin, a `Job`, and writes objects to stdout, one a line: {"stage", "done"}
while it works, and at last {"result"} or {"error"}. It keeps no text on the disk. Besides the new draft it
writes only to the folder `Job.scratch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from localspec.errors import LoadFailed, LocalspecError
from localspec.extras.tune.job import Job, make_reporter, send
from localspec.extras.tune.requirements import check_torch
from localspec.machine import Host, available_bytes
from localspec.priority import lower_priority
from localspec.protocol.tuned import NEW_DRAFT

SAVE_INTERVAL_S = 300.0  # of a draft in the making
DEPTH = 4  # of the rounds that are replayed to compare drafts
VALIDATION_SHARE = 0.1  # of the lessons, by which the numpy way decides when to stop
TEACHING_SHARE = 0.4  # of the time, for the target's reading
COLLECTING_SHARE = 0.5  # of the rest, for the draft's reading where rows are fitted
_PR_SET_PDEATHSIG = 1  # of prctl, as in linux/prctl.h


def train(job: Job) -> dict[str, Any]:
    """Train the draft, write it, and return the figures of both drafts on the held-out texts.

    Raises:
        LocalspecError: a model cannot be loaded, or is of a kind that cannot be tuned.
    """
    from localspec.extras.tune.lessons import make_lesson, read_lessons, select_own
    from localspec.extras.tune.model_file import ModelFile

    _check_possible(job)
    teacher = _open_teacher(job)
    try:
        vocab, n_ctx = teacher.model.vocab, teacher.n_ctx
        if job.draft:  # both models read the texts
            n_ctx = min(n_ctx, ModelFile(Path(job.draft)).n_ctx_train or n_ctx)
        lessons = [make_lesson(text, vocab, n_ctx) for text in job.texts]
        held_out = [make_lesson(text, vocab, n_ctx) for text in job.held_out]
        lessons = [lesson for lesson in lessons if len(lesson.labels)]
        report = make_reporter("reading")
        n_working = 1 if teacher.is_on_gpu else job.threads
        deadline = time.process_time() + TEACHING_SHARE * job.seconds * n_working

        def go_on(count: int) -> bool:
            report(count / len(lessons))
            return time.process_time() < deadline and teacher.bytes_written <= job.max_state_bytes

        # The newest first, since the time may not suffice for all.
        taught = read_lessons(teacher, lessons[::-1], go_on)
    finally:
        teacher.close()
    # Freed memory goes back to the system, which `running.Training` has told glibc to keep.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    method = ""
    if job.method == "new":
        method = _make_draft(job, teacher, taught)
    elif job.method != "none":
        method = _train_draft(job, [*taught, *select_own(lessons[::-1][len(taught) :])])
    before = _measure_own(job, held_out)
    after = _measure(job, job.output, held_out, "comparing the new draft")
    n_tokens = sum(len(lesson.tokens) - lesson.answer + 1 for lesson in select_own(lessons))
    return {
        "method": method,
        "tokens": n_tokens,
        "tokens_per_pass": {
            kind: {"before": before[kind], "after": after[kind]} for kind in before
        },
    }


@contextlib.contextmanager
def _heads_apart(job: Job) -> Iterator[Job]:
    """Yield the job with the heads in the target's file as its draft, if the pair has no other.

    They are put into a file of their own meanwhile, like those that are published apart.
    """
    from localspec.extras.tune.model_file import ModelFile

    target = None if job.draft else ModelFile(Path(job.target))
    if target is None or not target.head_tensors:
        yield job
        return
    heads = Path(job.scratch) / "heads.gguf"
    try:
        target.write_part(heads, target.head_tensors)
        yield msgspec.structs.replace(job, draft=str(heads))
    finally:
        heads.unlink(missing_ok=True)


def _check_possible(job: Job) -> None:
    """Check what only the end of a long training would show. Raises LocalspecError."""
    from localspec.extras.tune.model_file import ModelFile

    check_torch(job.method)
    if job.method == "new":
        _check_memory(ModelFile(Path(job.target)))
    elif not job.draft and job.method != "none":
        raise LocalspecError(
            "The file of the target has no heads that could be trained. If it is one of several, join them "
            "with llama.cpp's llama-gguf-split --merge."
        )


def _check_memory(target: Any) -> None:
    """Check that memory holds the training of a new draft, and that the target's matrices can be read."""
    target.check_matrices()

    from localspec.extras.tune.eagle import EagleShape
    from localspec.extras.tune.states import MAX_VOCABULARY
    from localspec.extras.tune.steps import BYTES_PER_WEIGHT, STEP_BYTES, free_torch_bytes

    width = int(target.read_value(f"{target.architecture}.embedding_length"))
    n_weights = EagleShape(width, (0, 0, 0)).count_weights(min(MAX_VOCABULARY, target.n_vocab))
    needed = BYTES_PER_WEIGHT * n_weights
    available = max(available_bytes(Host.current()), free_torch_bytes() - STEP_BYTES)
    if needed > available:
        raise LocalspecError(
            f"Training a new draft for this target needs {needed >> 20} MiB of memory, and "
            f"{available >> 20} MiB are available."
        )


def _open_teacher(job: Job) -> Any:
    """Return a reader of the target, which writes its states if they are to be learned from."""
    from localspec.extras.tune.reading import TextReader, place_layers
    from localspec.extras.tune.states import StateReader

    gpu_layers = place_layers(job.gpu_layers, job.target)
    if job.method == "new":
        return StateReader(job.target, job.threads, job.scratch, gpu_layers)
    return TextReader(job.target, job.threads, gpu_layers)


def _make_draft(job: Job, teacher: Any, lessons: Sequence[Any]) -> str:
    """Train a new draft that reads the target's states, write it, and return what was trained."""
    from localspec.extras.tune.eagle import EagleLayer, train_layer
    from localspec.extras.tune.model_file import ModelFile
    from localspec.extras.tune.states import choose_vocabulary

    target, windows = ModelFile(Path(job.target)), teacher.windows(lessons)
    layer = EagleLayer.open(Path(job.start)) if job.start else None
    if layer is None or layer.shape.layers != teacher.layers:
        vocabulary = choose_vocabulary(lessons, target.n_vocab)
        layer = EagleLayer.draw(target, teacher.layers, vocabulary, windows)
    seconds = (1 - TEACHING_SHARE) * job.seconds
    report = _save_and_report(lambda: layer.write(Path(job.output), target))
    train_layer(layer, windows, target, seconds, job.threads, report)
    return NEW_DRAFT


def _save_and_report(save: Callable[[], None]) -> Callable[[float], None]:
    """Return a function that reports the share of the training that is done, and saves at times."""
    report, saved = make_reporter("training"), time.monotonic()

    def report_and_save(done: float) -> None:
        nonlocal saved
        report(done)
        if done >= 1 or time.monotonic() - saved > SAVE_INTERVAL_S:
            saved = time.monotonic()
            save()

    return report_and_save


def _train_draft(job: Job, lessons: Sequence[Any]) -> str:
    """Train in the best way that is possible, write the draft, and return what was trained."""
    from localspec.extras.tune.model_file import ModelFile

    file = ModelFile(Path(job.start or job.draft))
    seconds = (1 - TEACHING_SHARE) * job.seconds
    if job.method != "rows" and importlib.util.find_spec("torch") is not None:
        from localspec.extras.tune import network

        try:
            decoder = network.Decoder(file)
        except network.UnknownDecoder:
            if job.method == "weights":
                raise
        else:
            report = _save_and_report(lambda: file.write_copy(Path(job.output), decoder.values()))
            network.train_decoder(decoder, lessons, seconds, job.threads, report)
            return "all weights"
    _train_rows(job, lessons)
    return "output rows"


def _train_rows(job: Job, lessons: Sequence[Any]) -> None:
    """Fit rows of the output matrix, and write the draft."""
    import numpy as np

    from localspec.extras.tune import correction
    from localspec.extras.tune.model_file import EMBEDDINGS, OUTPUT, ModelFile

    file = ModelFile(Path(job.draft))
    tokens = file.read_output_tokens()
    matrix = file.read_tensor(file.output_name)
    changing = np.isin(tokens, np.concatenate([lesson.labels for lesson in lessons]))
    n_validation = max(int(VALIDATION_SHARE * len(lessons)), 1)
    report = make_reporter("reading with the draft")
    begun, seconds = time.thread_time(), (1 - TEACHING_SHARE) * job.seconds

    def spent() -> float:
        """Return the share of the time that is over. Pauses, and threads that help, do not count."""
        return (time.thread_time() - begun) / seconds

    def collect(first: int, end: int, share: float) -> correction.Positions:
        def go_on(count: int) -> bool:
            report((first + count) / len(lessons))
            return spent() < share

        part = lessons[first:end]
        return correction.collect_positions(reader, part, matrix, tokens, changing, go_on)

    reader = _open_reader(job, job.draft)
    try:
        validation = collect(0, n_validation, VALIDATION_SHARE * COLLECTING_SHARE)
        training = collect(n_validation, len(lessons), COLLECTING_SHARE)
    finally:
        reader.close()
    report = make_reporter("training")

    def go_on(epoch: float) -> bool:
        report(epoch / correction.MAX_EPOCHS)
        return spent() < 1

    matrix[changing] = correction.fit_rows(matrix[changing], training, validation, go_on)
    # A draft whose output matrix is that of its embeddings gets one of its own.
    name = OUTPUT if file.output_name == EMBEDDINGS else file.output_name
    file.write_copy(Path(job.output), {name: matrix})


def _open_reader(job: Job, draft: str) -> Any:
    """Return a reader of a draft, behind its target if it needs that."""
    from localspec.extras.tune.model_file import ModelFile
    from localspec.extras.tune.reading import SidecarReader, TextReader, place_layers

    if ModelFile(Path(draft)).is_sidecar:
        gpu_layers = place_layers(job.gpu_layers, job.target, draft)
        return SidecarReader(job.target, draft, job.threads, gpu_layers)
    return TextReader(draft, job.threads, place_layers(job.gpu_layers, draft))


def _measure_own(job: Job, lessons: Sequence[Any]) -> dict[str, float]:
    """Return what `_measure` returns for the pair's own draft; 1.0 for each kind of work without one.

    One that cannot be read counts as none where a new one is made: their speed is compared as well.
    """
    if job.draft:
        try:
            return _measure(job, job.draft, lessons, "comparing")
        except LoadFailed:
            if job.method != "new":
                raise
    return {lesson.kind: 1.0 for lesson in lessons}


def _measure(job: Job, draft: str, lessons: Sequence[Any], stage: str) -> dict[str, float]:
    """Return by kind of work how many tokens a pass of the target yields with a draft."""
    from localspec.extras.tune.lessons import count_hits, mean_tokens_per_pass

    report, by_kind = make_reporter(stage), {}
    reader = _open_reader(job, draft)
    try:
        for number, kind in enumerate(kinds := sorted({lesson.kind for lesson in lessons})):
            report(number / len(kinds))
            hits = count_hits(reader, [lesson for lesson in lessons if lesson.kind == kind])
            by_kind[kind] = mean_tokens_per_pass(hits, DEPTH)
    finally:
        reader.close()
    return by_kind


def _end_with_parent() -> None:
    """Have the system kill this process when its parent dies, so that it never stays stopped without it.

    A process group without a parent in its session is woken by every system, but in a container the parent's
    own parent may be of that session. Linux alone has this. The parent's death counts as that of the thread
    that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run one job."""
    _end_with_parent()
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
        with _heads_apart(job) as job:
            send(result=train(job))
    except (LocalspecError, OSError) as error:
        send(error=str(getattr(error, "message", error)))
        sys.exit(1)
    except Exception as error:  # that of a library is better than none
        send(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
