"""Run a training process, pause it while it would disturb, and adopt the draft if it is faster."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from localspec.children import engine_environment
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NotFound
from localspec.extras.tune.texts import TrainingText, TuneClient, check_kept, infill_request
from localspec.files import write_atomically
from localspec.machine import Host, available_bytes, is_on_battery, memory_bytes
from localspec.protocol.tuned import RECORD_FILE

Report = Callable[[str, float], None]
POLL_INTERVAL_S = 0.5
# Held-out answers of each kind that are decoded again with both drafts, and how long each may be.
SPEED_ANSWERS, SPEED_TOKENS = 12, 128
# How often: until the ratio of each kind is known to a per cent, or the time is over.
MIN_SPEED_TURNS, MAX_SPEED_TURNS, SPEED_SECONDS = 3, 24, 900.0
MAX_SPEED_ERROR = 0.01
# What a new draft must reach beside the present one, in the mean over kinds of work and for each kind.
MIN_PER_PASS, MIN_PER_PASS_OF_KIND = 1.02, 0.97
MIN_SPEED, MIN_SPEED_OF_KIND = 1.0, 0.99


# PyTorch frees and allocates the same hundreds of MiB at each step. glibc returned them to the system each
# time, which took a quarter of the time; with these it keeps them. Other C libraries ignore the names.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# Training waits while less than this share of the memory is available.
MIN_AVAILABLE_MEMORY = 1 / 16


class NotBetter(LocalspecError):
    """The trained draft, of which there is a record, is not faster than the one it was made from."""

    def __init__(self, message: str, record: dict[str, Any]) -> None:
        super().__init__(message)
        self.record = record


class Training:
    """A training process, which is stopped while the daemon answers someone, and on battery."""

    def __init__(self, job: dict[str, Any], report: Report) -> None:
        """Start the process."""
        self._report = report
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "localspec.extras.tune.training"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=engine_environment() | (_KEEP_MEMORY if job.get("method") != "none" else {}),
            # Ctrl-C reaches this process, which ends the other. That is in the same session, so that the
            # system wakes and ends it if it is stopped when this process is killed.
            process_group=0,
        )
        self._ended = threading.Event()
        self._job = json.dumps(job).encode()

    def run(self) -> dict[str, Any]:
        """Wait for the process and return its result.

        Raises:
            LocalspecError: it failed.
        """
        pauses = threading.Thread(target=self._pause_and_go_on, daemon=True)
        pauses.start()
        message: dict[str, Any] = {}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(self._job)
            self._process.stdin.close()
            for line in self._process.stdout:
                message = json.loads(line)
                if "stage" in message:
                    self._report(message["stage"], message["done"])
        except BrokenPipeError:  # it ended early, which its exit code says
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        finally:
            self._ended.set()
            pauses.join()
            self._process.kill()
            code = self._process.wait()
            self._process.stdout.close()
        if "result" in message:
            result: dict[str, Any] = message["result"]
            return result
        if "error" in message:
            raise LocalspecError(f"The draft could not be trained: {message['error']}")
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise LocalspecError(
            f"The training ended early ({reason}); memory may not have been sufficient. "
            "The pair's own draft stays in use."
        )

    def _pause_and_go_on(self) -> None:
        """Stop the process while there is a reason to, and let it go on afterwards."""
        client, host, paused = PairsClient(autostart=False), Host.current(), ""
        while not self._ended.wait(POLL_INTERVAL_S):
            reason = find_pause_reason(client, host)
            if bool(reason) != bool(paused):
                os.kill(self._process.pid, signal.SIGSTOP if reason else signal.SIGCONT)
            if reason and reason != paused:
                self._report(reason, 0.0)
            paused = reason


def find_pause_reason(client: PairsClient, host: Host) -> str:
    """Return why nothing should be trained now; "" if nothing speaks against it."""
    with contextlib.suppress(LocalspecError):  # no daemon runs
        status = client.status()
        if status["running"] or status["waiting"]:
            return "paused while the daemon answers"
    if is_on_battery(host):
        return "paused on battery"
    if host.system == "Linux" and available_bytes(host) < MIN_AVAILABLE_MEMORY * memory_bytes():
        return "paused while memory is short"
    return ""


def measure_speed(
    client: TuneClient, names: Sequence[str], texts: Sequence[TrainingText], report: Report
) -> list[dict[str, float]]:
    """Return the tokens per second by kind of work for each of two pairs, asked in turns.

    In each turn both are loaded, one after the other. The first turn does not count: in it each pair learns
    how well its draft does on such work. Of the others, the geometric means are returned. Nothing of the
    answers is kept, neither on the disk nor for n-grams, which would copy them in the next turn.

    names: of the pairs, whose targets are the same.
    """
    turns: list[list[dict[str, float]]] = []
    begun = time.monotonic()
    while len(turns) <= MAX_SPEED_TURNS:
        passed = time.monotonic() - begun
        if len(turns) > MIN_SPEED_TURNS and (
            passed > SPEED_SECONDS or largest_error(turns[1:]) < MAX_SPEED_ERROR
        ):
            break
        report("measuring", max(len(turns) / MAX_SPEED_TURNS, min(passed / SPEED_SECONDS, 1.0)))
        rates: list[dict[str, float]] = [{}, {}]
        for index in (0, 1) if len(turns) % 2 == 0 else (1, 0):
            tokens, milliseconds = Counter[str](), Counter[str]()
            for text in texts:
                timings = _answer_again(client, names[index], text)
                tokens[text.kind] += timings["predicted_n"]
                milliseconds[text.kind] += timings["predicted_ms"]
            rates[index] = {
                kind: 1000 * tokens[kind] / spent
                for kind, spent in milliseconds.items()
                if tokens[kind]
            }
            PairsClient(client.socket_path).unload(names[index])
        turns.append(rates)
    return [
        {
            kind: statistics.geometric_mean(turn[index][kind] for turn in turns[1:])
            for kind in rates[0]
        }
        for index in (0, 1)
    ]


def largest_error(turns: Sequence[Sequence[dict[str, float]]]) -> float:
    """Return the standard error of the ratio of two pairs' speeds, of the kind of work where it is largest.

    turns: at least two, each with the speeds of both pairs by kind.
    """
    errors = [0.0]
    for kind in turns[0][0]:
        ratios = [math.log(after[kind] / before[kind]) for before, after in turns]
        errors.append(statistics.stdev(ratios) / math.sqrt(len(ratios)))
    return max(errors)


def _answer_again(client: TuneClient, pair: str, text: TrainingText) -> dict[str, Any]:
    """Return the timings of the answer that a pair gives to the same question, greedily."""
    if text.prefix:  # editors' requests are kept nowhere
        answer = client.infill(infill_request(pair, text.prefix, text.suffix))
    else:  # not as a chat: a chat template of models.toml is not that of a pair named by its files
        answer = client.answer_prompt(pair, text.prompt, SPEED_TOKENS)
    timings: dict[str, Any] = answer["timings"]
    return timings


def choose_speed_texts(held_out: Sequence[TrainingText]) -> list[TrainingText]:
    """Return the newest held-out texts of each kind, by which the speed is measured."""
    newest = []
    for kind in sorted({text.kind for text in held_out}):
        newest += [text for text in held_out if text.kind == kind][-SPEED_ANSWERS:]
    return newest


def check_better(record: dict[str, Any]) -> None:
    """Check by the record of a trained draft that it pays.

    Raises:
        NotBetter: it is accepted or decoded no better than the pair's own draft, or worse for a kind of work.
    """
    least = {
        "tokens_per_pass": (MIN_PER_PASS, MIN_PER_PASS_OF_KIND),
        "tokens_per_second": (MIN_SPEED, MIN_SPEED_OF_KIND),
    }
    failed = [name for name, ratios in least.items() if not reaches(record[name], *ratios)]
    if failed:
        measures = " and ".join(name.replace("_", " ") for name in failed)
        raise NotBetter(
            f"The trained draft does not pay, by its {measures}. The present draft stays in use.",
            record,
        )


def reaches(gains: dict[str, dict[str, float]], least: float, least_of_kind: float) -> bool:
    """Return whether gains reach a ratio in the mean, and another for each kind of work."""
    ratios = [gain["after"] / gain["before"] for gain in gains.values()]
    return (
        bool(ratios) and statistics.geometric_mean(ratios) >= least and min(ratios) >= least_of_kind
    )


def adopt(
    folder: Path,
    trained: Path,
    record: dict[str, Any],
    client: TuneClient,
    learned: Sequence[TrainingText],
) -> None:
    """Put the trained draft and its record in their place, where the daemon finds them.

    Raises:
        NotFound: something that it learned from was removed meanwhile. Nothing is kept of it.
    """
    draft = folder / record["file"]
    try:
        check_kept(client, learned)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            trained.replace(draft)
            write_atomically(folder / RECORD_FILE, json.dumps(record, indent=2).encode())
            # From here on the daemon retires the draft with what it learned from. What was removed before,
            # but after the first check, is noticed here. However this ends, no draft stays that was not
            # checked.
            check_kept(client, learned)
            if not draft.exists():
                raise NotFound(
                    "The draft was deleted with a conversation before it had its record."
                )
            for earlier in folder.glob("*.gguf"):
                if earlier != draft:
                    earlier.unlink(missing_ok=True)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # the daemon has deleted it
                shutil.rmtree(folder)
            raise
    except NotFound:
        raise NotFound(
            "A conversation that the draft learned from was removed meanwhile, or a question of it was taken "
            "back, so the draft was deleted."
        ) from None


def make_record(
    base: str,
    target: str,
    result: dict[str, Any],
    learned: Sequence[TrainingText],
    speeds: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Return the record of a tuned draft, a `TunedDraft`. base: "" if the pair has none of its own."""
    info = Path(base or target).stat()
    before, after = speeds
    created = time.time()
    return {
        "file": f"draft-{int(created)}.gguf",
        "target": target,
        "base": base,
        "base_size": info.st_size,
        "base_changed": info.st_mtime_ns,
        "created": created,
        "method": result["method"],
        "conversations": sorted({text.conversation for text in learned if text.conversation}),
        "tokens": result["tokens"],
        "tokens_per_pass": result["tokens_per_pass"],
        "tokens_per_second": {
            kind: {"before": before[kind], "after": after[kind]} for kind in before if kind in after
        },
    }


def unload(pair: str) -> None:
    """Unload a pair if it is idle, so that its next answer uses another draft."""
    with contextlib.suppress(LocalspecError):
        PairsClient(autostart=False).unload(pair)
