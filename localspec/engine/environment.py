"""What must be in the environment before llama.cpp's libraries are loaded. Imports nothing heavy."""

from __future__ import annotations

import os

# How GNU OpenMP's threads wait awake for each other: 3 ms, its own default, and 10 µs while it has more
# threads than there are processors (`engine/llama/waiting.py` sees to that), where 1 µs is the default.
WAITING = {"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "ACTIVE"}


def prepare() -> None:
    """Set how threads wait, unless the user has, and no debugger at an abort: llama.cpp's own last line
    then says what was wrong, and not gdb's.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"
    if not any(name in os.environ for name in WAITING):
        os.environ.update(WAITING)


def prepared() -> bool:
    """Whether threads wait as is set here."""
    return all(os.environ.get(name) == value for name, value in WAITING.items())
