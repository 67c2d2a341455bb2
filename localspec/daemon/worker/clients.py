"""How each client sends answers back, and what reading ahead for it has gained, kept from day to day.

There is no text of anyone in it: the names of programs, and counts.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import msgspec

from localspec.files import write_atomically
from localspec.paths import read_file
from localspec.protocol.conversations import ClientReading
from localspec.protocol.frames import AnswerForm, SentBack

OWN_CLIENT = "localspec"
_MAX_CLIENTS = 64  # those that were seen longest ago go
_SAVE_INTERVAL_S = 60.0
# After so many wrong readings in a row, as many answers as this power of 2 are not read ahead.
_MAX_FAILURES = 2
_PROGRAM = re.compile(r"[\w.@+-]{1,40}")  # the name of a program in its User-Agent


class _Client(msgspec.Struct, omit_defaults=True):
    """What is known of a client.

    - `failures`: wrong readings in a row.
    - `paused`: so many of its next answers are not read ahead.
    """

    form: AnswerForm = ""
    right: int = 0
    wrong: int = 0
    saved_ms: float = 0.0
    wasted_ms: float = 0.0
    failures: int = 0
    paused: int = 0


def name_client(user_agent: str, path: str, *, is_ours: bool) -> str:
    """Return the name under which a client is known: its program, and the endpoint that it uses."""
    program = _PROGRAM.match(user_agent)
    return OWN_CLIENT if is_ours else f"{program[0] if program else 'unknown'} {path}"


class Clients:
    """The known clients by name, and their file. One that cannot be used is treated as empty."""

    def __init__(self, file: Path) -> None:
        self._file, self._saved_at = file, time.monotonic()
        self._clients: dict[str, _Client] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self._clients = msgspec.json.decode(read_file(file), type=dict[str, _Client])

    def form(self, name: str) -> AnswerForm:
        """Return how the client will send an answer back; "other" if nothing is to be read ahead for it."""
        client = self._clients.get(name)
        if client is None:
            return ""
        return "other" if client.paused else client.form

    def learn(self, name: str, sent: SentBack) -> None:
        """Learn how the client sent an answer back, and whether what was read ahead was right."""
        client = self._clients.pop(name, None) or _Client()
        self._clients[name] = client
        if len(self._clients) > _MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        client.form = sent.form or client.form
        client.paused = max(client.paused - 1, 0)
        client.saved_ms += sent.saved_ms
        client.wasted_ms += sent.wasted_ms
        if sent.right:
            client.right, client.failures = client.right + 1, 0
        elif sent.right is not None:
            client.wrong, client.failures = client.wrong + 1, client.failures + 1
            if client.failures >= _MAX_FAILURES:
                client.paused = 1 << min(client.failures, 10)
        if time.monotonic() - self._saved_at > _SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Write the file. What cannot be written is learned again."""
        self._saved_at = time.monotonic()
        if self._clients:
            with contextlib.suppress(OSError):
                write_atomically(self._file, msgspec.json.encode(self._clients), sync=False)

    def forget(self) -> None:
        """Forget all clients, and delete the file."""
        self._clients.clear()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def report(self) -> list[ClientReading]:
        """Return what reading ahead has gained for each client, the one with most readings first."""
        readings = [
            ClientReading(name, c.right, c.wrong, c.saved_ms / 1e3, c.wasted_ms / 1e3)
            for name, c in self._clients.items()
            if c.right or c.wrong
        ]
        return sorted(readings, key=lambda reading: -(reading.right + reading.wrong))
