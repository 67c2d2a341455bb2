"""Passes that are ended on their way, at a place of one's choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C

from localspec.engine.llama import Stop


class StopAfter(Stop):
    """Once, after so many steps of a pass: `act` is called there, which by default sets it."""

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
