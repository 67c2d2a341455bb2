"""Passes that are interrupted at a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C

from localspec.engine.llama import Stop


class StopAfter(Stop):
    """Call `act` once, after this many steps of a pass; by default it sets the stop."""

    def __init__(self, steps: int, act: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.left = steps
        self._act = act or self.set
        self._callback = C.ggml_abort_callback(self._count)

    def _count(self, _data: object) -> bool:
        self.left -= 1
        if self.left == 0:
            self._act()
        return bool(self)

    def attach(self, handle: Any) -> None:
        C.llama_set_abort_callback(handle, self._callback, None)
