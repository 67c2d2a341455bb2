"""A bar on a terminal, a few quiet lines anywhere else. All of it on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from localspec.cli.terminal import layout
from localspec.cli.terminal.pairs import retrying, size, span
from localspec.cli.terminal.render import harmless, is_drawn_on, stderr

_BAR = 24
_QUIET = 1.0  # seconds; what is over sooner needs no lines in a log
_SHORTEST_BAR = 6  # where there is less room, numbers have to do


class Progress:
    """How far something of `done` and `total` bytes is. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._drawn = False
        self._said = ("", -1)
        self._attempt = ("", 0)
        self._began = time.monotonic()
        self._terminal = is_drawn_on(sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Make room for a line of something else."""
        if self._drawn:
            stderr("\r\x1b[K")
            self._drawn = False

    def show(
        self,
        doing: str,
        done: int,
        total: int,
        rate: float = 0.0,
        left: float | None = None,
        waiting: dict[str, Any] | None = None,
    ) -> None:
        """`rate` in bytes per second, `left` in seconds; `waiting`: for another attempt."""
        parts = self._parts(doing, done, total, rate, left)
        if waiting:
            parts = [parts[0], harmless(retrying(waiting), lines=False), *parts[2:]]
        if self._terminal:
            columns = (layout.width(sys.stderr) or 80) - 1
            room = min(_BAR, columns - len("  ".join(parts)) - 2)
            if total and room >= _SHORTEST_BAR:
                full = room * done // total
                parts.insert(2, "█" * full + "░" * (room - full))
            self._drawn = True
            stderr(f"\r{layout.fitting(parts, columns)}\x1b[K")
            return
        if waiting:
            attempt = (waiting["cause"], waiting["attempt"])
            if attempt != self._attempt:
                self._attempt = attempt
                stderr("  ".join(parts) + "\n")
            return
        share = 10 * done // total if total else -1  # a line for every tenth
        if (doing, share) != self._said and time.monotonic() - self._began > _QUIET:
            self._said = (doing, share)
            stderr("  ".join(parts) + "\n")

    def _parts(
        self, doing: str, done: int, total: int, rate: float, left: float | None
    ) -> list[str]:
        parts = [self._name, doing]
        if total:
            parts += [f"{100 * done // total}%", f"{size(done)} of {size(total)}"]
        if rate:
            parts.append(f"{size(rate)}/s")
        if left:
            parts.append(f"{span(left)} left")
        return [harmless(part, lines=False) for part in parts]
