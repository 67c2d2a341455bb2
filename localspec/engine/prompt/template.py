"""Chat messages → prompt text, through the template in the model's own file."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from localspec.engine.prompt.habits import MARK, Habits, Messages, Refused
from localspec.engine.prompt.roles import fitted
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt

TIME_LIMIT = 2.0  # seconds a template may take
START_LIMIT = 20.0  # seconds for the process to come up on a busy machine
_SKELETONS = 16  # kept; of a chat of 10,000 messages one is about a megabyte


class TemplateRenderer:
    """Renders in a child process, which is ended when a template takes too long. Threads take turns."""

    def __init__(self, template: str | None, bos: str, eos: str) -> None:
        self._template = template
        # None, not missing: templates ask for both, and were written for a renderer that does so
        self._always: dict[str, Any] = {"tools": None, "documents": None, "bos_token": bos}
        self._always |= {"eos_token": eos, "add_generation_prompt": False}
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._asking = threading.Lock()
        self._habits = Habits(lambda chat: self._rendered({**self._always, "messages": chat}))
        # chats of one shape have one skeleton, and the choices of a request the same chat
        self._skeleton = lru_cache(_SKELETONS)(
            lambda variables: self._rendered(json.loads(variables))
        )
        if template is not None:
            self._start()  # comes up while the models load

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt as text, up to where the answer begins: after the last message, or where its
        text would stand when that is `continued`.

        Raises:
            InvalidRequest: the template has no place for a message, or for the tools.
            TemplateFailed: the model has no template, or the template failed, took longer than
                TIME_LIMIT or made too much; with its own reason.
        """
        if self._template is None:
            raise TemplateFailed(
                "This model's file has no chat template; use /v1/completions with a prompt instead."
            )
        messages = [_message(m.role, m.content, m.extra) for m in prompt.messages]
        text = ""

        def skeleton(wording: Messages) -> str:
            nonlocal text
            text = self._skeleton(json.dumps(self._variables(prompt, wording)))
            return text

        messages = fitted(messages, skeleton)
        _check_tools(prompt.tools or [], text)
        if prompt.continued:
            return self._continued(prompt, messages)
        try:
            return self._text(prompt, messages)
        except Refused as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None

    def _continued(self, prompt: ChatPrompt, messages: Messages) -> str:
        """Up to where the last message's text, or its thoughts, would stand."""
        *before, last = messages
        if prompt.continued == "reasoning_content":
            last = {**last, "content": "", "reasoning_content": MARK}
        else:
            last = {**last, "content": MARK}
        try:
            text, found, _ = self._text(prompt, [*before, last]).rpartition(MARK)
        except Refused as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None
        if not found:
            raise TemplateFailed(
                f"This model's chat template has no place for the '{prompt.continued}' of the last "
                "message, which was to be continued."
            )
        return text

    def _text(self, prompt: ChatPrompt, messages: Messages) -> str:
        """Raises Refused where the template itself raises, TemplateFailed where it was stopped."""
        return self._rendered(self._variables(prompt, messages))

    def _variables(self, prompt: ChatPrompt, messages: Messages) -> dict[str, Any]:
        return {
            **self._always,
            **prompt.template_kwargs,
            "messages": self._habits.worded(messages),
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continued,
            "tools": prompt.tools or None,
        }

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        with self._asking:
            reply = self._ask({"template": self._template, "variables": variables})
        if "error" in reply:
            raise Refused(reply["error"])
        return str(reply["text"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self._start()
        self._await_ready()
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
            return self._line(TIME_LIMIT)
        except TimeoutError:
            self.close()
            raise TemplateFailed(
                f"The model's chat template took longer than {TIME_LIMIT:.0f} seconds."
            ) from None
        except (OSError, ValueError):
            self.close()
            raise TemplateFailed("The model's chat template ended its process (memory).") from None

    def _start(self) -> None:
        self._buffer = b""
        self._ready = False
        self._child = subprocess.Popen(
            [sys.executable, "-m", "localspec.engine.prompt.template_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _await_ready(self) -> None:
        if not self._ready:
            try:
                self._line(START_LIMIT)
            except (TimeoutError, OSError, ValueError) as error:
                self.close()
                raise TemplateFailed(
                    "The process that renders chat templates did not start."
                ) from error
            self._ready = True

    def _line(self, limit: float) -> dict[str, Any]:
        """The child's next line. Raises TimeoutError, or OSError at its end."""
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise OSError("the template process ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the child."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                # what was still buffered has no reader any more
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child = None


def _message(role: str, content: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


def _check_tools(tools: list[dict[str, Any]], text: str) -> None:
    for tool in tools:
        name = tool.get("function", tool).get("name")
        if name and name not in text:
            raise InvalidRequest(
                f"This model's chat template leaves out the tool '{name}'.", param="tools"
            )
