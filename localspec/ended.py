"""How the last daemon ended: it writes that down, and whoever finds none running reads it.

A process that is killed writes nothing. What it wrote at its start tells then what it can have been.
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

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OOM_COUNTS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
_STACK = "-stack"  # beside the file: where a crash was


def begin(file: Path) -> None:
    """Note that this process is the daemon. A disk that is full, or read-only, stops nobody."""
    run = {"pid": os.getpid(), "started": time.time(), "boot": _boot(), "oom_kills": oom_kills()}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(file, run)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        faulthandler.enable(open_file(_stack_of(file), flags), all_threads=False)


def end(file: Path, why: str = "") -> None:
    """Note that it ends: because it was told to, or `why`, a sentence."""
    with contextlib.suppress(OSError, ValueError):
        run = json.loads(read_file(file))
        if run.get("pid") == os.getpid():
            _write(file, {**run, "ended": time.time(), "why": why})


def told(file: Path) -> str:
    """How the daemon that ran last ended, in a sentence or two; "" where none did. None runs now."""
    try:
        run = json.loads(read_file(file))
        started, ended = (_clock(run.get(key)) for key in ("started", "ended"))
        last = f"The previous daemon (pid {int(run['pid'])}, started {started})"
        if run.get("ended"):
            why = str(run.get("why") or "")
            return f"{last} ended at {ended}: {why}" if why else f"{last} was stopped at {ended}."
        return f"{last} {_killed(file, run)} The end of its log: localspec logs"
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return ""  # it holds something else


def _killed(file: Path, run: dict[str, Any]) -> str:
    """Of one that could say nothing."""
    with contextlib.suppress(OSError):
        stack = read_file(_stack_of(file)).decode("utf-8", "replace")
        if stack.startswith("Fatal Python error: "):
            what = stack.partition("\n")[0].removeprefix("Fatal Python error: ")
            return f"crashed ({what}); where is in {_stack_of(file)}."
    if run.get("boot") and run["boot"] != _boot():
        return "ended with the machine, which was started again since."
    kills = oom_kills()
    if kills is not None and run.get("oom_kills") is not None and kills > run["oom_kills"]:
        return "was killed; the system has ended processes for want of memory since it was started."
    return "was killed."


def _stack_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}{_STACK}")


def _write(file: Path, run: dict[str, Any]) -> None:
    files.write_whole(file, json.dumps(run).encode(), sync=False)


def _clock(at: object) -> str:
    """A time of today as 21:03, another one with its day."""
    if not isinstance(at, int | float):
        return ""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def _boot() -> str:
    try:
        return _BOOT.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def oom_kills() -> int | None:
    """Processes that the kernel has ended for memory, here and in our control group.

    None where nothing counts them.
    """
    if sys.platform != "linux":
        return None
    counts = [
        int(line.split()[1])
        for file in _OOM_COUNTS
        for line in _lines(file)
        if line.startswith("oom_kill ")
    ]
    return sum(counts) if counts else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
