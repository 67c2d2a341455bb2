"""Progress on stderr: a bar on a terminal, and a few lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any

from localspec.cli.terminal import layout
from localspec.cli.terminal.pairs import format_retry, format_span, size
from localspec.cli.terminal.render import harmless, is_drawn_on, stderr

_MAX_BAR_CELLS = 24
_QUIET_S = 1.0  # work that is finished sooner prints no lines into a log
_MIN_BAR_CELLS = 6  # with less space there are only numbers


class Progress:
    """The progress of some work, as `done` of `total` bytes. Use it as a context manager."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_drawn = False
        self._last_line = ("", -1)
        self._last_attempt = ("", 0)
        self._start_time = time.monotonic()
        self._terminal = is_drawn_on(sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Erase the bar, so that another line can be printed."""
        if self._is_drawn:
            stderr("\r\x1b[K")
            self._is_drawn = False

    def show(
        self,
        doing: str,
        done: int,
        total: int,
        rate: float = 0.0,
        seconds_left: float | None = None,
        waiting: dict[str, Any] | None = None,
    ) -> None:
        """Show the progress of the step `doing`.

        `rate` is in bytes per second. `waiting` describes the next attempt after an error.
        """
        parts = self._make_parts(doing, done, total, rate, seconds_left)
        if waiting:
            parts = [parts[0], harmless(format_retry(waiting), lines=False), *parts[2:]]
        if self._terminal:
            columns = (layout.width(sys.stderr) or 80) - 1
            bar_cells = min(_MAX_BAR_CELLS, columns - len("  ".join(parts)) - 2)
            if total and bar_cells >= _MIN_BAR_CELLS:
                full_cells = bar_cells * done // total
                parts.insert(2, "█" * full_cells + "░" * (bar_cells - full_cells))
            self._is_drawn = True
            stderr(f"\r{layout.fitting(parts, columns)}\x1b[K")
            return
        if waiting:
            attempt = (waiting["cause"], waiting["attempt"])
            if attempt != self._last_attempt:
                self._last_attempt = attempt
                stderr("  ".join(parts) + "\n")
            return
        share = 10 * done // total if total else -1  # one line for every tenth
        if (doing, share) != self._last_line and time.monotonic() - self._start_time > _QUIET_S:
            self._last_line = (doing, share)
            stderr("  ".join(parts) + "\n")

    def _make_parts(
        self, doing: str, done: int, total: int, rate: float, seconds_left: float | None
    ) -> list[str]:
        parts = [self._name, doing]
        if total:
            parts += [f"{100 * done // total}%", f"{size(done)} of {size(total)}"]
        if rate:
            parts.append(f"{size(rate)}/s")
        if seconds_left:
            parts.append(f"{format_span(seconds_left)} left")
        return [harmless(part, lines=False) for part in parts]
