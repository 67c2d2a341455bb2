"""A bar on a terminal, a few quiet lines anywhere else. All of it on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time

from localspec.cli.render_pairs import size, span

_BAR = 24
_QUIET = 1.0  # seconds; what is over sooner needs no lines in a log
_NARROW = 72  # columns below which there is no bar, only numbers


class Progress:
    """How far something of `done` and `total` bytes is. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._drawn = False
        self._said = ("", -1)
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._write("\r\x1b[K")

    def show(
        self, doing: str, done: int, total: int, rate: float = 0.0, left: float | None = None
    ) -> None:
        """`rate` in bytes per second, `left` in seconds."""
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            text = self._line(doing, done, total, rate, left, bar=columns >= _NARROW)
            self._drawn = True
            self._write(f"\r{text[: columns - 1]}\x1b[K")
            return
        share = 10 * done // total if total else -1  # a line for every tenth
        if (doing, share) != self._said and time.monotonic() - self._began > _QUIET:
            self._said = (doing, share)
            self._write(self._line(doing, done, total, 0.0, None, bar=False) + "\n")

    def _line(
        self, doing: str, done: int, total: int, rate: float, left: float | None, *, bar: bool
    ) -> str:
        parts = [self._name, doing]
        if total:
            full = _BAR * done // total
            parts += [f"{'█' * full}{'░' * (_BAR - full)}"] if bar else []
            parts += [f"{100 * done // total} %", f"{size(done)} of {size(total)}"]
        if rate:
            parts.append(f"{size(rate)}/s")
        if left is not None and left > 0:
            parts.append(f"{span(left)} left")
        return "  ".join(parts)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
        except UnicodeEncodeError:  # a terminal without block characters
            encoding = sys.stderr.encoding
            sys.stderr.write(text.encode(encoding, "replace").decode(encoding))
        sys.stderr.flush()
