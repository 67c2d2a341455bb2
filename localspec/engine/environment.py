"""What must be in the environment before llama.cpp's libraries are loaded. Imports nothing heavy."""

from __future__ import annotations

import os


def prepare() -> None:
    """Set OpenMP's waiting, unless the user has, and no debugger at an abort.

    llama.cpp's own last line then says what was wrong, and not gdb's that it has left.

    Threads that spin at a barrier collapse when anything else wants a core (measured: one pass 0.2 ms →
    460 ms beside a busy process; with this 3 ms). A short spin keeps the speed of a quiet machine
    (27.8 ms against 27.7 at 760 MB of weights; sleeping at once costs 6 %), but for 1.3 % after 1 000
    tokens, where threads end apart. Ten times as long a spin has that back, and makes passes of 60 ms
    beside a busy process ones of 97 to 146.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
