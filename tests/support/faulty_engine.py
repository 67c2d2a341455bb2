"""The engine, with a fault at one point of its life: `python faulty_engine.py FILE --fd N`.

While FILE exists and holds "POINT HOW", the process ends (or stops) so at that point, and takes the file
away before: the next engine is well. With a third word, "always", the file stays.
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
    """End here, if that is what FILE says."""
    try:
        asked, how, *always = FILE.read_text().split()
    except (OSError, ValueError):
        return
    if asked != point:
        return
    if not always:
        FILE.unlink(missing_ok=True)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.Signals[how])
    signal.pause()  # a signal may take its time to arrive; a stopped process goes on here


def before(place: Any, name: str, point: str | Callable[..., str]) -> None:
    """Let a function, looked up as `place.name`, begin with a fault."""
    real = getattr(place, name)

    def wrapped(*arguments: Any, **more: Any) -> Any:
        fault(point if isinstance(point, str) else point(*arguments))
        return real(*arguments, **more)

    setattr(place, name, wrapped)


def after(place: Any, name: str, point: str) -> None:
    real = getattr(place, name)

    def wrapped(*arguments: Any, **more: Any) -> Any:
        result = real(*arguments, **more)
        fault(point)
        return result

    setattr(place, name, wrapped)


loaded: list[str] = []


def model(path: bytes, *_: Any) -> str:
    loaded.append("target" if not loaded else "draft")
    return f"load-{loaded[-1]}"


serving: list[bool] = []


def decode(_: Any, batch: Any) -> str:
    """Which pass this is: one that measures, a prompt's, or one that writes."""
    if not serving:
        return "load-measure"
    if batch.n_tokens > 40:
        return "read-prompt"
    time.sleep(0.002)  # or who is to be there when a fault comes would have its text before
    return "write"


before(llama, "initialise", "start")
before(llama_cpp, "llama_model_load_from_file", model)
before(llama_cpp, "llama_init_from_model", "load-context")
before(llama_cpp, "llama_decode", decode)
before(pair.LoadedPair, "info", "load-last")
after(pair.LoadedPair, "info", "loaded")
before(llama_cpp, "llama_tokenize", lambda *_: "tokenize" if serving else "load-tokenize")
before(DraftModel, "propose", "draft")
before(Sampler, "adjusted", "sample")
before(sessions.SessionStore, "_write", "save")
before(pair.LoadedPair, "close", "close")
after(pair.LoadedPair, "close", "closed")
submit = Engine.__init__


def made(*arguments: Any, **more: Any) -> None:
    submit(*arguments, **more)
    serving.append(True)


Engine.__init__ = made  # type: ignore[method-assign]
fault("begin")
main()
