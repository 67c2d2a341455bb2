"""The process in which chat templates are rendered, seen from its parent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.children import helper_environment
from localspec.errors import TemplateFailed, TemplateRaised

TIME_LIMIT_S = 2.0  # Seconds that a template may take.
START_LIMIT_S = 20.0  # Seconds that the process may take to start on a busy machine.


class TemplateProcess:
    """The child process that renders. It is killed if a template takes too long.

    Any thread may use it; requests are answered one after the other.
    """

    def __init__(self) -> None:
        self.spellings: Sequence[str] = ()  # The texts of the vocabulary's special tokens.
        self._sent_spellings: Sequence[str] = ()  # Those that were sent to the current child.
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._ready = False
        self._lock = threading.Lock()

    def render(self, template: str | None, variables: Mapping[str, Any]) -> str:
        """Return the rendered text. Raises TemplateRaised or TemplateFailed."""
        return str(self.reply(template, variables)["text"])

    def reply(
        self, template: str | None, variables: Mapping[str, Any], **options: str
    ) -> dict[str, Any]:
        """Return the process's whole reply to a request.

        options: further keys of the request.

        Raises:
            TemplateRaised: the template itself raised an exception.
            TemplateFailed: the template was stopped, or the process did not start.
        """
        with self._lock:
            reply = self._ask({"template": template, "variables": variables, **options})
        if "error" in reply:
            raise TemplateRaised(reply["error"])
        return reply

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self.start()
        self._await_ready()
        try:
            self._write(request)
            return self._line(TIME_LIMIT_S)
        except TimeoutError:
            self.close()
            raise TemplateFailed(
                f"The model's chat template took longer than {TIME_LIMIT_S:.0f} seconds."
            ) from None
        except (OSError, ValueError):
            self.close()
            raise TemplateFailed(
                "The model's chat template crashed its process (probably out of memory)."
            ) from None

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        self._child.stdin.flush()

    def start(self) -> None:
        """Start the child without waiting for it."""
        self._buffer = b""
        self._ready, self._sent_spellings = False, ()
        self._child = _spare_children.pop() if _spare_children else _start_child()

    def _await_ready(self) -> None:
        """Wait until the child is ready and has the special tokens. Raises TemplateFailed."""
        has_spellings = not self.spellings or self._sent_spellings is self.spellings
        if not self._ready or not has_spellings:
            try:
                if not self._ready:
                    self._line(START_LIMIT_S)
                if not has_spellings:
                    self._write({"spellings": [*self.spellings]})
                    self._line(START_LIMIT_S)
                    self._sent_spellings = self.spellings
            except (TimeoutError, OSError, ValueError) as error:
                self.close()
                raise TemplateFailed(
                    "The process that renders chat templates did not start."
                ) from error
            self._ready = True

    def _line(self, limit: float) -> dict[str, Any]:
        """Return the child's next line. Raises TimeoutError, or OSError if the child has ended."""
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise OSError("the template process ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """Kill the child."""
        if self._child is not None:
            _end_child(self._child)
            self._child = None


# ------------------------------------------------------------------------ children


_spare_children: list[subprocess.Popen[bytes]] = []


def start_spare_child() -> None:
    """Start the child of the next `TemplateProcess` now.

    A worker does this before it imports llama.cpp, which takes longer than the child's 0.2 s. Without it, a
    load waited for the child, and the built-in pair took 0.75 s to load instead of 0.5 s.
    """
    _spare_children.append(_start_child())


def end_spare_children() -> None:
    """End the children that no `TemplateProcess` has taken."""
    while _spare_children:
        _end_child(_spare_children.pop())


def _start_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "localspec.engine.prompt.template_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=helper_environment(),
    )


def _end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            # Closing flushes the buffer, which fails because the child has ended.
            with contextlib.suppress(OSError):
                pipe.close()
