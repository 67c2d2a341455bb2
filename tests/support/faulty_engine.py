"""The engine, with a fault at one point of its life: `python faulty_engine.py FILE --fd N`.

While FILE exists and contains "POINT HOW", the process ends (or stops) in that way at that point. It removes
the file first, so that the next engine works. With a third word, "always", the file stays.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from localspec.engine import llama
from localspec.engine.__main__ import main
from localspec.engine.cache import sessions
from localspec.engine.engine import Engine
from localspec.engine.pair import pair
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.drafters.draft_model import DraftModel

FILE = Path(sys.argv.pop(1))


def fault(point: str) -> None:
    """End the process here, if FILE says so."""
    try:
        chosen_point, action, *always = FILE.read_text().split()
    except (OSError, ValueError):
        return
    if chosen_point != point:
        return
    if not always:
        FILE.unlink(missing_ok=True)
    if action == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.Signals[action])
    signal.pause()  # a signal may arrive late; a stopped process continues here


def fault_before(place: Any, name: str, point: str | Callable[..., str]) -> None:
    """Make a function, looked up as `place.name`, begin with a fault."""
    real = getattr(place, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        fault(point if isinstance(point, str) else point(*arguments))
        return real(*arguments, **keywords)

    setattr(place, name, wrapped)


def fault_after(place: Any, name: str, point: str) -> None:
    real = getattr(place, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        result = real(*arguments, **keywords)
        fault(point)
        return result

    setattr(place, name, wrapped)


loaded: list[str] = []


def model(path: bytes, *_: Any) -> str:
    loaded.append("target" if not loaded else "draft")
    return f"load-{loaded[-1]}"


serving: list[bool] = []
learning: list[bool] = []


def decode(_: Any, batch: Any) -> str:
    """Return which pass this is: one that measures, of idle time, of a prompt, or one that generates."""
    if not serving:
        return "load-measure"
    if learning:
        return "idle"
    if batch.n_tokens > 40:
        return "read-prompt"
    time.sleep(0.01)  # otherwise the text would be complete before the fault comes
    return "write"


def use_idle_time(*arguments: Any) -> None:
    learning.append(True)
    try:
        original_idle_time(*arguments)
    finally:
        learning.clear()


original_idle_time = Engine.use_idle_time
Engine.use_idle_time = use_idle_time  # type: ignore[assignment, method-assign]
fault_before(llama, "initialise", "start")
fault_before(llama_cpp, "llama_model_load_from_file", model)
fault_before(llama_cpp, "llama_init_from_model", "load-context")
fault_before(llama_cpp, "llama_decode", decode)
fault_before(pair.LoadedPair, "info", "load-last")
fault_after(pair.LoadedPair, "info", "loaded")
fault_before(llama_cpp, "llama_tokenize", lambda *_: "tokenize" if serving else "load-tokenize")
fault_before(DraftModel, "propose", "draft")
fault_before(Sampler, "adjusted", "sample")
fault_before(sessions.SessionStore, "_write", "save")
fault_before(pair.LoadedPair, "close", "close")
fault_after(pair.LoadedPair, "close", "closed")
original_init = Engine.__init__


def start_engine(*arguments: Any, **keywords: Any) -> None:
    original_init(*arguments, **keywords)
    serving.append(True)


Engine.__init__ = start_engine  # type: ignore[method-assign]
fault("begin")
main()
