"""Something that turns on stderr while the first word is waited for, and says what it waits for."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from localspec.cli.terminal import layout
from localspec.cli.terminal.figures import hashing, queue
from localspec.cli.terminal.render import harmless, stderr
from localspec.client.api import Client
from localspec.errors import LocalspecError

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME = 0.1  # seconds
_PATIENCE = 0.2  # seconds; a quick answer is not worth a flicker
_LONG = 256  # tokens of a prompt that is worth a number
_ASK_AGAIN = 10  # frames between two looks at what the daemon does


class Spinner:
    """Turns from its creation until `stop()`, which leaves the line empty."""

    def __init__(self, client: Client, otherwise: str = "reading") -> None:
        """`otherwise`: what is said where the daemon's status tells nothing better."""
        self._else = otherwise
        self._told = ""  # by the answer's stream; until then the daemon's status is looked at
        # Of its own: the other is at work, and this one must never start a daemon.
        self._client = Client(client.socket_path, autostart=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    def tell(self, progress: dict[str, Any] | None) -> None:
        """What the answer's stream says that it waits for; None: it has begun."""
        match progress:
            case {"state": "queued", "ahead": ahead}:
                self._told = f"waiting for {queue(ahead)}"
            case {"state": "waiting", "pair": pair}:
                self._told = f"waiting for {pair}"
            case {"state": "loading", "pair": pair, "done": done}:
                self._told = f"loading {pair}" + (f" {100 * done:.0f}%" if done else "")
            case {"state": "reading", "done": done, "prompt_tokens": tokens} if tokens >= _LONG:
                self._told = f"reading {tokens:,} tokens {100 * done:.0f}%"
            case _:
                self._told = self._else

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(1.0)  # it may be asking a daemon that hangs

    def _turn(self) -> None:
        if self._ended.wait(_PATIENCE):
            return
        frames = _FRAMES if (sys.stderr.encoding or "").lower().startswith("utf") else "|/-\\"
        doing, count, began = "", 0, time.monotonic() - _PATIENCE
        while not self._ended.is_set():
            if self._told or count % _ASK_AGAIN == 0:
                doing = self._told or self._doing()
            said = f"{frames[count % len(frames)]} {harmless(doing, lines=False)}"
            seconds = time.monotonic() - began
            if seconds >= 3:
                said += f" {seconds:.0f} s"
            room = (layout.width(sys.stderr) or 80) - 1
            stderr(f"\r\x1b[K{layout.fitting(said.split(' '), room, ' ')}")
            count += 1
            self._ended.wait(_FRAME)
        stderr("\r\x1b[K")

    def _doing(self) -> str:
        try:
            status = self._client.status()
            pair = status["pair"]
        except (LocalspecError, KeyError):
            return "starting the daemon"
        if what := hashing(status):
            return f"hashing {what}"
        if pair["state"] == "loading":
            share = f" {100 * pair['progress']:.0f}%" if pair.get("progress") else ""
            return f"loading {pair['name']}{share}"
        if status["waiting"]:
            return "waiting for other requests"
        return self._else
