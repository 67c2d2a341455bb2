"""One run of `localspec tune`: check the present tuned draft, train another, and adopt it if it is faster."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localspec import config
from localspec.cli.settings import usable_cores
from localspec.errors import BadGguf, LocalspecError
from localspec.extras.tune import running
from localspec.extras.tune import texts as collecting
from localspec.extras.tune.requirements import check_torch
from localspec.extras.tune.texts import TrainingText, TuneClient
from localspec.files import format_size, hold_folder, remove_abandoned, write_atomically
from localspec.paths import default_paths, make_private_directory
from localspec.protocol.tuned import WORK_PREFIX
from localspec.registry.header.gguf import FileSource, read_header

_COMPLETING_SHARE = 0.3  # of the time, in which the target completes files
MIN_CHECKED_TEXTS = 16  # answers since a draft was made, by which it is checked
_COPIES = 5  # of the draft that a run has on the disk at most, the adopted one included
_TRAINED, _STATE = "draft.gguf", "state.json"  # in the work folder
# What the target's states may take on the disk, and what must be free for a new draft to be made.
MAX_STATE_BYTES, MIN_STATE_BYTES = 16 << 30, 1 << 30


@dataclass(frozen=True)
class Plan:
    """Say what to tune, and how.

    view: the pair, a `PairView`. folder: of its tuned draft. places: in files, for the target to complete.
    seconds: for all of it, without pauses. new_answers: how many there must be since the last tuned draft.
    method: as in the job of the training process.
    """

    view: dict[str, Any]
    folder: Path
    seconds: float
    method: str = "auto"
    places: Sequence[collecting.Place] = field(default_factory=list)
    new_answers: int = 0

    @property
    def name(self) -> str:
        return str(self.view["name"])

    @property
    def target(self) -> str:
        return str(self.view["target"]["path"])

    @property
    def base(self) -> str:
        """The path of the pair's own draft; "": it has none in a file."""
        return str(self.view["draft"]["path"]) if self.view["draft"] else ""

    def job(self, **values: Any) -> dict[str, Any]:
        """Return what the training process gets."""
        job = {
            "target": self.target,
            "draft": self.base,
            "texts": [],
            "seconds": self.seconds,
            "threads": usable_cores(),
            "gpu_layers": config.load_config(default_paths().config_file).gpu_layers,
        }
        return job | values


def tune(plan: Plan, history: Sequence[TrainingText], report: running.Report) -> dict[str, Any]:
    """Train a draft, compare it with the pair's own, and return its record.

    history: the saved answers of the pair.

    Raises:
        NotBetter: it does not pay. The error has the record.
        LocalspecError: it could not be trained.
    """
    check_torch(plan.method)
    client, texts = TuneClient(), [*history]
    _check_new_answers(plan, history)
    with _work_folder() as work:
        room = _check_room(plan, work)
        seconds, advice = plan.seconds, collecting.ASK_MORE
        if plan.places:
            completed, advice = _complete(client, plan, report)
            texts += completed
            seconds *= 1 - _COMPLETING_SHARE
        learned, held_out = collecting.split_by_time(texts, advice)
        # First, since the last ones are read first.
        learned = collecting.read_files(dict.fromkeys(t.file for t in learned if t.file)) + learned
        start, held_out = _resume(plan, learned, held_out, work)
        trained = work / _TRAINED
        job = plan.job(
            output=str(trained),
            start=start,
            texts=[text.as_job() for text in learned],
            held_out=[text.as_job() for text in held_out],
            seconds=seconds,
            method=plan.method,
            max_state_bytes=room,
            scratch=str(work),
        )
        begun = time.time()
        try:
            result = running.Training(job, report).run()
            running.unload(plan.name)
            pairs = [_copy_present(plan, work), f"{plan.target},{trained}"]
            judges = running.choose_speed_texts(held_out)
            speeds = running.measure_speed(TuneClient(), pairs, judges, report)
            record = running.make_record(plan.base, plan.target, result, learned, speeds)
            running.check_better(record)
            running.adopt(plan.folder, trained, record, client, learned)
        except LocalspecError:  # a run that is killed may be gone on with
            _attempt_file(plan).touch()
            os.utime(_attempt_file(plan), (begun, begun))
            raise
    running.unload(plan.name)
    return record


def _check_new_answers(plan: Plan, history: Sequence[TrainingText]) -> None:
    """Check that a run by night has something new to learn from. Raises LocalspecError."""
    last = (plan.view.get("tuned") or {}).get("created", 0.0)
    with contextlib.suppress(FileNotFoundError):
        last = max(last, _attempt_file(plan).stat().st_mtime)
    if sum(text.created > last for text in history) < plan.new_answers:
        raise LocalspecError(f"Fewer than {plan.new_answers} answers are new.")


def _attempt_file(plan: Plan) -> Path:
    """Return an empty file whose time is that of the last run of the pair that failed."""
    return plan.folder.with_name(f"attempt-{plan.folder.name}")


def _copy_present(plan: Plan, work: Path) -> str:
    """Return the name of the pair with its own draft.

    The draft is a copy, so that both drafts begin with nothing known: what an earlier load has measured would
    favour one of them.
    """
    if plan.base:
        return f"{plan.target},{shutil.copyfile(plan.base, work / 'present.gguf')}"
    return plan.target if plan.view.get("tuned") else plan.name


def check_present(
    plan: Plan, history: Sequence[TrainingText], report: running.Report
) -> str | None:
    """Compare the pair's tuned draft with its own on the answers since, and delete it if it is worse.

    Return why it was deleted; "": it was not; None: there is none, or there are too few answers to tell.
    history: as of `tune`.

    Raises:
        LocalspecError: they could not be compared.
    """
    tuned = plan.view.get("tuned")
    if not tuned:
        return None
    problem = ""
    try:
        read_header(FileSource(plan.folder / tuned["file"]))
    except BadGguf:
        problem = "is damaged"
    else:
        texts = [text for text in history if text.created > tuned["created"]]
        if len(texts) < MIN_CHECKED_TEXTS:
            return None
        with _work_folder() as work:
            job = plan.job(
                output=str(plan.folder / tuned["file"]),
                held_out=[text.as_job() for text in texts],
                method="none",
                scratch=str(work),
            )
            gains = running.Training(job, report).run()["tokens_per_pass"]
        if not running.reaches(gains, 1.0, running.MIN_PER_PASS_OF_KIND):
            problem = "was accepted less often than the pair's own since"
    if problem:
        shutil.rmtree(plan.folder)
        running.unload(plan.name)
    return problem


def _check_room(plan: Plan, work: Path) -> int:
    """Return how many bytes the target's states may take on the disk.

    Raises:
        LocalspecError: it does not hold what a run needs.
    """
    free = shutil.disk_usage(work).free
    drafts = _COPIES * Path(plan.base).stat().st_size if plan.base else 0
    needed = drafts + (MIN_STATE_BYTES if plan.method == "new" else 0)
    if needed > free:
        raise LocalspecError(
            f"Tuning needs {format_size(needed)} in {work.parent}, and {format_size(free)} are free."
        )
    return min(MAX_STATE_BYTES, (free - drafts) // 2)


def _complete(
    client: TuneClient, plan: Plan, report: running.Report
) -> tuple[list[TrainingText], str]:
    """Return what the target writes at places in files, as many as the time allows.

    Also return what helps if that is not enough to learn from.
    """
    deadline = time.monotonic() + _COMPLETING_SHARE * plan.seconds
    n_places, n_completed = len(plan.places), 0

    def completed(count: int) -> bool:
        nonlocal n_completed
        n_completed = count
        report("completing files", count / n_places)
        return time.monotonic() < deadline

    texts = collecting.complete_places(client, plan.name, plan.places, completed)
    if n_completed < n_places:
        return texts, (
            f"The time sufficed for {n_completed} of {n_places} places in the files: "
            "allow more with --minutes"
        )
    return texts, "Ask more, in new conversations, or name more files with --files"


# A run that is killed leaves its folder, with the draft as it was last saved. The next run of the pair goes
# on with it if it still learns from all answers of the history that the other had learned from. Which files
# are learned from depends on how far the target came with completing them, so these may be others. Those that
# were learned from before do not judge.


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """Make a folder on the disk of the tuned drafts, and delete it afterwards with what is in it."""
    root = default_paths().tuned
    make_private_directory(root)
    with (
        tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=root) as folder,
        hold_folder(Path(folder)),
    ):
        yield Path(folder)


def _resume(
    plan: Plan, learned: Sequence[TrainingText], held_out: list[TrainingText], work: Path
) -> tuple[str, list[TrainingText]]:
    """Return the path of a half-trained draft to go on with, "" if there is none, and what judges it.

    Delete what earlier runs left. Write down what this one learns from, as digests.
    """
    info = Path(plan.base or plan.target).stat()
    settings = {
        "target": plan.target,
        "base": [plan.base, info.st_size, info.st_mtime_ns],
        "method": plan.method,
    }
    answers = {_digest(json.dumps([text.prompt, text.answer])) for text in learned if not text.file}
    files = {_digest(text.file) for text in learned if text.file}
    start = ""
    for folder in work.parent.glob(f"{WORK_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, KeyError), hold_folder(folder) as is_free:
            if is_free and not start:
                earlier = json.loads((folder / _STATE).read_bytes())
                known_answers, known_files = set(earlier.pop("answers")), set(earlier.pop("files"))
                known = {text.file for text in held_out if _digest(text.file) in known_files}
                judges = collecting.select_unlearned(held_out, known)
                if known_answers <= answers and earlier == settings and judges:
                    (folder / _TRAINED).rename(work / "start.gguf")
                    start, held_out = str(work / "start.gguf"), judges
                    files |= known_files
        remove_abandoned(folder)
    state = settings | {"answers": sorted(answers), "files": sorted(files)}
    write_atomically(work / _STATE, json.dumps(state).encode())
    return start, held_out


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
