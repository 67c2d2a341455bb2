"""How the previous daemon ended.

The daemon writes a file when it starts and when it ends; a command that finds no daemon reads it. A
process that is killed writes nothing, so its start entry is used to find the likely cause.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from localspec import files
from localspec.paths import open_file, read_file

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OOM_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
_STACK_SUFFIX = "-stack"  # of the file beside it to which a crash writes its stack trace


def record_start(file: Path) -> None:
    """Record that this process is the daemon.

    A full or read-only disk is ignored, since the daemon can run without the record.
    """
    run = {
        "pid": os.getpid(),
        "started": time.time(),
        "boot": _read_boot_id(),
        "oom_kills": count_oom_kills(),
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_run(file, run)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        faulthandler.enable(open_file(_stack_path(file), flags), all_threads=False)


def record_end(file: Path, why: str = "") -> None:
    """Record that the daemon ends, and why, as a sentence, unless it was told to stop."""
    with contextlib.suppress(OSError, ValueError):
        run = json.loads(read_file(file))
        if run.get("pid") == os.getpid():
            _write_run(file, {**run, "ended": time.time(), "why": why})


def describe_last_end(file: Path) -> str:
    """Return how the previous daemon ended, in one or two sentences, or "" if there was none.

    Call this only while no daemon is running.
    """
    try:
        run = json.loads(read_file(file))
        started, ended = (_format_time(run.get(key)) for key in ("started", "ended"))
        subject = f"The previous daemon (pid {int(run['pid'])}, started {started})"
        if run.get("ended"):
            if why := str(run.get("why") or ""):
                return f"{subject} ended at {ended}: {why}"
            return f"{subject} was stopped at {ended}."
        return f"{subject} {_explain_kill(file, run)} The end of its log: localspec logs"
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return ""  # the file is not a record of a run


def _explain_kill(file: Path, run: dict[str, Any]) -> str:
    """Return the likely cause of the end of a daemon that could not record it."""
    with contextlib.suppress(OSError):
        stack = read_file(_stack_path(file)).decode("utf-8", "replace")
        if stack.startswith("Fatal Python error: "):
            crash = stack.partition("\n")[0].removeprefix("Fatal Python error: ")
            return f"crashed ({crash}); where is in {_stack_path(file)}."
    if run.get("boot") and run["boot"] != _read_boot_id():
        return "ended with the machine, which was started again since."
    kills = count_oom_kills()
    if kills is not None and run.get("oom_kills") is not None and kills > run["oom_kills"]:
        return "was killed; the system has ended processes for want of memory since it was started."
    return "was killed."


def _stack_path(file: Path) -> Path:
    return file.with_name(f"{file.stem}{_STACK_SUFFIX}")


def _write_run(file: Path, run: dict[str, Any]) -> None:
    files.write_atomically(file, json.dumps(run).encode(), sync=False)


def _format_time(timestamp: object) -> str:
    """Format a time as 21:03 if it is today, else with its date."""
    if not isinstance(timestamp, int | float):
        return ""
    moment = time.localtime(timestamp)
    today = time.localtime()[:3] == moment[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", moment)


def _read_boot_id() -> str:
    return "".join(_read_lines(_BOOT_ID)).strip()


def count_oom_kills() -> int | None:
    """Return how many processes the system and our control group have killed for want of memory, if known."""
    if sys.platform != "linux":
        return None
    counts = [
        int(line.split()[1])
        for file in _OOM_COUNTERS
        for line in _read_lines(file)
        if line.startswith("oom_kill ")
    ]
    return sum(counts) if counts else None


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
