"""The process in which chat templates are rendered, seen from its parent."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.children import Child, Deadline, helper_environment
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
        self._child: Child | None = None
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
        try:
            child = self._ready_child()
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            self.close()
            raise TemplateFailed(
                "The process that renders chat templates did not start."
            ) from error
        why = f"took longer than {TIME_LIMIT_S:.0f} seconds"
        try:
            reply = child.ask(json.dumps(request).encode(), Deadline(TIME_LIMIT_S))
        except (EOFError, OSError) as error:
            if not isinstance(error, TimeoutError):
                why = "crashed its process (probably out of memory)"
            raise TemplateFailed(f"The model's chat template {why}.") from None
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def start(self) -> None:
        """Start the child without waiting for it."""
        self._ready, self._sent_spellings = False, ()
        self._child = _spare_children.pop() if _spare_children else _start_child()

    def _ready_child(self) -> Child:
        """Return the child once it is ready and has the special tokens."""
        if self._child is None or not self._child.is_running:
            self.close()
            self.start()
        assert self._child is not None
        if not self._ready:
            self._child.receive(Deadline(START_LIMIT_S))
            self._ready = True
        if self.spellings and self._sent_spellings is not self.spellings:
            message = json.dumps({"spellings": [*self.spellings]}).encode()
            self._child.ask(message, Deadline(START_LIMIT_S))
            self._sent_spellings = self.spellings
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


_spare_children: list[Child] = []


def start_spare_child() -> None:
    """Start the child of the next `TemplateProcess` now.

    A worker does this before it imports llama.cpp, which takes longer than the child's 0.2 s. Without it, a
    load waited for the child, and the built-in pair took 0.75 s to load instead of 0.5 s.
    """
    _spare_children.append(_start_child())


def end_spare_children() -> None:
    """End the children that no `TemplateProcess` has taken."""
    while _spare_children:
        _spare_children.pop().close()


def _start_child() -> Child:
    child = Child("localspec.engine.prompt.template_child", environment=helper_environment())
    child.start()
    return child
