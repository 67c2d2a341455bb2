"""Progress on stderr during a wait: a spinner with the reason, or a bar with the progress."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from localspec.cli.terminal import layout
from localspec.cli.terminal.figures import format_hashing, format_queue
from localspec.cli.terminal.pairs import format_retry, format_span
from localspec.cli.terminal.render import harmless, is_drawn_on, stderr
from localspec.client.api import Client
from localspec.errors import LocalspecError
from localspec.files import format_size

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_S = 0.1
_DELAY_S = 0.2  # without it, the spinner would flicker before quick answers
_MIN_SHOWN_TOKENS = 256  # shorter prompts are read too quickly for a percentage
_MIN_SHOWN_S = 3  # a forecast of less is over before it is read
_STATUS_INTERVAL_FRAMES = 10  # between two requests for the daemon's status


class Spinner:
    """A spinner that turns from its creation until `stop()`, which leaves the line empty."""

    def __init__(self, client: Client, default_text: str = "reading") -> None:
        """Start the spinner. `default_text` is shown where the daemon's status has no better reason."""
        self._default_text = default_text
        self._progress_text = ""  # from the answer's stream; the daemon's status where it is empty
        # A client of its own, because the other one is in use, and this one must never start a daemon.
        self._client = Client(client.socket_path, autostart=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw_frames, daemon=True)
        self._thread.start()

    def update(self, progress: dict[str, Any] | None) -> None:
        """Set the reason for the wait from a report of the answer's stream. None: the answer has begun."""
        match progress:
            case {"state": "queued", "ahead": ahead}:
                self._progress_text = f"waiting for {format_queue(ahead)}"
            case {"state": "waiting", "pair": pair}:
                self._progress_text = f"waiting for {pair}"
            case {"state": "loading", "pair": pair, "done": done}:
                self._progress_text = f"loading {pair}" + (f" {100 * done:.0f}%" if done else "")
            case {"state": "measuring", "pair": pair}:
                self._progress_text = f"measuring {pair}"
            case {"state": "reading", "done": done, "prompt_tokens": tokens} if (
                tokens >= _MIN_SHOWN_TOKENS
            ):
                self._progress_text = f"reading {tokens:,} tokens {100 * done:.0f}%"
                match progress:
                    case {"seconds": seconds} if seconds >= _MIN_SHOWN_S:
                        self._progress_text += f", about {format_span(seconds)} left"
            case _:
                self._progress_text = self._default_text

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(1.0)  # the thread may be waiting for a daemon that hangs

    def _draw_frames(self) -> None:
        if self._ended.wait(_DELAY_S):
            return
        frames = _FRAMES if (sys.stderr.encoding or "").lower().startswith("utf") else "|/-\\"
        reason, count, start_time = "", 0, time.monotonic() - _DELAY_S
        while not self._ended.is_set():
            if self._progress_text or count % _STATUS_INTERVAL_FRAMES == 0:
                reason = self._progress_text or self._describe_status()
            text = f"{frames[count % len(frames)]} {harmless(reason, lines=False)}"
            seconds = time.monotonic() - start_time
            if seconds >= 3:
                text += f" {seconds:.0f} s"
            max_cells = (layout.width(sys.stderr) or 80) - 1
            stderr(f"\r\x1b[K{layout.join_fitting(text.split(' '), max_cells, ' ')}")
            count += 1
            self._ended.wait(_FRAME_S)
        stderr("\r\x1b[K")

    def _describe_status(self) -> str:
        try:
            status = self._client.status()
            pair = next((each for each in status["pairs"] if each["state"] == "loading"), None)
        except (LocalspecError, KeyError):
            return "starting the daemon"
        if progress := format_hashing(status):
            return f"hashing {progress}"
        if pair and pair["stage"] == "profile":
            return f"measuring {pair['name']}"
        if pair:
            share = f" {100 * pair['progress']:.0f}%" if pair.get("progress") else ""
            return f"loading {pair['name']}{share}"
        if status["waiting"]:
            return "waiting for other requests"
        return self._default_text


@contextlib.contextmanager
def spinning(client: Client, text: str) -> Iterator[None]:
    """Show a spinner during the block, if stderr is a terminal that can draw one."""
    spinner = Spinner(client, text) if is_drawn_on(sys.stderr) else None
    try:
        yield
    finally:
        if spinner:
            spinner.stop()


_MAX_BAR_CELLS = 24
_QUIET_S = 1.0  # work that is finished sooner prints no lines into a log
_MIN_BAR_CELLS = 6  # with less space there are only numbers


class Progress:
    """The progress of some work, as `done` of `total` bytes. Use it as a context manager."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_drawn = False
        self._shown: dict[str, object] = {}  # what the last line of each kind was about
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
        parts = [self._name, format_retry(waiting) if waiting else doing]
        if total:
            parts += [f"{100 * done // total}%", f"{format_size(done)} of {format_size(total)}"]
        if rate:
            parts.append(f"{format_size(rate)}/s")
        if seconds_left:
            parts.append(f"{format_span(seconds_left)} left")
        parts = [harmless(part, lines=False) for part in parts]
        if self._terminal:
            columns = (layout.width(sys.stderr) or 80) - 1
            bar_cells = min(_MAX_BAR_CELLS, columns - len("  ".join(parts)) - 2)
            if total and bar_cells >= _MIN_BAR_CELLS:
                full_cells = bar_cells * done // total
                parts.insert(2, "█" * full_cells + "░" * (bar_cells - full_cells))
            self._is_drawn = True
            stderr(f"\r{layout.join_fitting(parts, columns)}\x1b[K")
            return
        # In a log, one line for every attempt, or for every tenth.
        kind, step = "share", (doing, 10 * done // total if total else -1)
        if waiting:
            kind, step = "attempt", (waiting["cause"], waiting["attempt"])
        is_early = time.monotonic() - self._start_time <= _QUIET_S
        if self._shown.get(kind) == step or (is_early and not waiting):
            return
        self._shown[kind] = step
        stderr("  ".join(parts) + "\n")
