"""A program in a terminal of its own, as a user has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.patience import PATIENCE

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[=>]|\r")


class Terminal:
    """A pty that runs `localspec`: `expect` waits for output, `send` types."""

    def __init__(
        self,
        environment: dict[str, str],
        *arguments: str,
        columns: int = 80,
        lines: int = 24,
        stdout: int | None = None,
        program: Sequence[str] = ("-m", "localspec"),
    ) -> None:
        """Start a program. With `stdout` only stdin and stderr are the terminal; Python runs `program`."""
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            env={**environment, "TERM": environment.get("TERM_", "xterm-256color")},
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches it
        )
        os.close(slave)
        self.raw = ""
        self._position = 0
        self._bytes = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if hasattr(self, "process"):
            self.process.send_signal(signal.SIGWINCH)

    def _read(self, seconds: float) -> bool:
        """Return whether something was received; at the end it is False, too."""
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other end is closed
            return False
        if b"\x1b[6n" in data:  # prompt_toolkit requests the position of the cursor
            os.write(self.master, b"\x1b[1;1R")
        self._bytes += data
        self.raw = self._bytes.decode("utf-8", "replace")
        return bool(data)

    @property
    def text(self) -> str:
        """Return everything so far without escape codes."""
        return ESCAPES.sub("", self.raw)

    def expect(self, text: str) -> None:
        """Wait until `text`, in however many lines, appears after what was expected last."""
        deadline = time.monotonic() + PATIENCE
        pattern = re.compile(r"\s+".join(map(re.escape, text.split(" "))))
        while (match := pattern.search(self.text, self._position)) is None:
            self._read(0.05)
            assert time.monotonic() < deadline, f"waited for {text!r}; there is {self.text!r}"
        self._position = match.end()

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.send("\x03")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the exit code, after reading all output."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self._read(0.02)
            assert time.monotonic() < deadline, f"it does not end; there is {self.text!r}"
        while self._read(0.05):
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.master)


@contextlib.contextmanager
def terminal(environment: dict[str, str], *arguments: str, **options: Any) -> Iterator[Terminal]:
    opened = Terminal(environment, *arguments, **options)
    try:
        yield opened
    finally:
        opened.close()
