"""What must be in the environment before llama.cpp's libraries are loaded. Imports nothing heavy."""

from __future__ import annotations

import os

# How GNU OpenMP's threads spin while they wait for each other: 3 ms, its default, or 10 µs while there are
# more threads than processors (`engine/llama/waiting.py` arranges that), where 1 µs is the default.
OPENMP_ENVIRONMENT = {"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "ACTIVE"}


def prepare() -> None:
    """Set how threads wait, unless the user has, and turn off the debugger at an abort.

    Without the debugger, llama.cpp's own last line says what was wrong.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"
    if not any(name in os.environ for name in OPENMP_ENVIRONMENT):
        os.environ.update(OPENMP_ENVIRONMENT)


def is_prepared() -> bool:
    """Whether threads wait as `prepare` sets it."""
    return all(os.environ.get(name) == value for name, value in OPENMP_ENVIRONMENT.items())
