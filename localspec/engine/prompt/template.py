"""Chat messages → prompt text, through the template in the model's own file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from localspec.children import helper_environment
from localspec.engine.prompt.marks import CHANNELS, Marks, NotSeen, seen
from localspec.engine.prompt.special_tokens import RenderedPrompt, pairs
from localspec.engine.prompt.wordings import Messages, TemplateRaised, fitted
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt

TIME_LIMIT = 2.0  # seconds a template may take
START_LIMIT = 20.0  # seconds for the process to come up on a busy machine
MARK = "zqplaceqz"  # stands for a text; no template has it
_NOTHING = re.compile(r"\b(?:none|null)\b", re.IGNORECASE)
_THOUGHT = re.compile("reasoning|thinking|thought", re.IGNORECASE)
# By the names that families have for it.
_THINKING = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
_SKELETONS = 16  # kept; of a chat of 10,000 messages one is about a megabyte


class TemplateRenderer:
    """Renders in a child process, which is ended when a template takes too long. Threads take turns."""

    def __init__(self, template: str | None, bos: str, eos: str, *, eager: bool = True) -> None:
        """eager: start the process now, and not with the first chat."""
        self._template = template
        # None, not missing: templates ask for both, and were written for a renderer that does so
        self._always: dict[str, Any] = {"tools": None, "documents": None, "bos_token": bos}
        self._always |= {"eos_token": eos, "add_generation_prompt": False}
        self._process = _Process()
        self._capabilities = Capabilities(
            lambda chat: self._rendered({**self._always, "messages": chat})
        )
        # chats of one shape have one skeleton, and the choices of a request the same chat
        self._skeleton = lru_cache(_SKELETONS)(
            lambda variables: self._rendered(json.loads(variables))
        )
        if template is not None and eager:
            self._process.start()  # comes up while the models load

    def watch(self, spellings: Sequence[str]) -> None:
        """Tell special tokens of the vocabulary, spelled so, that the template writes from those that a
        message spells. Without it none are told apart."""
        self._process.spellings = spellings

    def render(self, prompt: ChatPrompt) -> str:
        """The text of `rendered`."""
        return self.rendered(prompt).text

    def rendered(self, prompt: ChatPrompt) -> RenderedPrompt:
        """Return the prompt up to where the answer begins: after the last message, or where its text
        would stand when that is `continued`.

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
        except TemplateRaised as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None

    def marks(self, known: Sequence[Marks]) -> list[Marks]:
        """What thoughts are marked with: those of the known marks that are in the template, or else the
        ones that are seen in what it makes of thoughts.

        Raises:
            NotSeen: they are marked in another way.
        """
        if self._template is None:
            return list(known)
        found = [(o, c) for o, c in known if o.rstrip() in self._template or c in self._template]
        if found or not known or CHANNELS in self._template or not _THOUGHT.search(self._template):
            return found
        if isinstance(self._seen, NotSeen):
            raise self._seen
        return [self._seen] if self._seen else []

    @cached_property
    def _seen(self) -> Marks | NotSeen | None:
        def render(messages: Messages, asks: bool) -> str:
            worded = self._capabilities.worded(messages)
            asked = {"messages": worded, "add_generation_prompt": asks}
            return self._rendered({**self._always, **_THINKING, **asked})

        try:
            return seen(render)
        except NotSeen as unknown:
            return unknown
        except (TemplateRaised, TemplateFailed):
            return None

    def _continued(self, prompt: ChatPrompt, messages: Messages) -> RenderedPrompt:
        """Up to where the last message's text, or its thoughts, would stand."""
        *before, last = messages
        if prompt.continued == "reasoning_content":
            last = {**last, "content": "", "reasoning_content": MARK}
        else:
            last = {**last, "content": MARK}
        try:
            rendered = self._text(prompt, [*before, last])
        except TemplateRaised as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None
        place = rendered.text.rfind(MARK)
        if place < 0:
            raise TemplateFailed(
                f"This model's chat template has no place for the '{prompt.continued}' of the "
                "last message, so it cannot be continued."
            )
        return rendered.until(place)

    def _text(self, prompt: ChatPrompt, messages: Messages) -> RenderedPrompt:
        """Raises TemplateRaised where the template itself raises, TemplateFailed where it was stopped."""
        variables = self._variables(prompt, messages)
        if not self._process.spellings:
            return RenderedPrompt(self._rendered(variables))
        # What a continued answer begins with is the caller's, and may complete a special token.
        wanted = "always" if prompt.continued or prompt.answer_prefix else "forged"
        reply = self._reply(variables, special=wanted)
        special = pairs(reply["special"]) if "special" in reply else None
        return RenderedPrompt(str(reply["text"]), special)

    def _variables(self, prompt: ChatPrompt, messages: Messages) -> dict[str, Any]:
        return {
            **self._always,
            **self._today(),
            **prompt.template_kwargs,
            "messages": self._capabilities.worded(messages),
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continued,
            "tools": prompt.tools or None,
        }

    def _today(self) -> dict[str, str]:
        """By the names and in the forms of llama.cpp's renderer; without it Llama 3 is in July 2024."""
        today = datetime.now().astimezone()
        return {"date_string": f"{today:%d %b %Y}", "datetime": f"{today:%b %d %Y}"}

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        return str(self._reply(variables)["text"])

    def _reply(self, variables: Mapping[str, Any], **more: str) -> dict[str, Any]:
        reply = self._process.ask({"template": self._template, "variables": variables, **more})
        if "error" in reply:
            raise TemplateRaised(reply["error"])
        return reply

    def close(self) -> None:
        """End the child."""
        self._process.close()


def _message(role: str, content: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


def _check_tools(tools: list[dict[str, Any]], text: str) -> None:
    for tool in tools:
        name = tool.get("function", tool).get("name")
        if name and name not in text:
            raise InvalidRequest(
                f"This model's chat template leaves out the tool '{name}'.", param="tools"
            )


# ------------------------------------------------------------------------ what a template can do


class Capabilities:
    """Of one template. `render` makes text of messages, and raises TemplateRaised where the template does."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render

    def worded(self, messages: Messages) -> Messages:
        """`messages` as the template reads them; nothing that is said is changed."""
        return [self._worded(each) for each in messages]

    def _worded(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if message["content"] is None and not self.knows_null:
            message["content"] = ""
        if message.get("tool_calls") and self.wants_text:
            message = _with_text_arguments(message)
        if (thoughts := message.get("reasoning_content")) is not None:
            # what gpt-oss calls them; as in transformers
            message = {"thinking": thoughts, **message}
        return _in_parts(message) if self.wants_parts else message

    @cached_property
    def wants_parts(self) -> bool:
        """Whether it reads a message's text in a list of parts only."""
        message = {"role": "user", "content": MARK}
        return not self._writes([message]) and self._writes([_in_parts(message)])

    @cached_property
    def knows_null(self) -> bool:
        """Whether a call without text may have null for it: not where that is written, or fails.

        Where null is told from an empty text, the latter is a turn of its own.
        """
        for more in ({}, {"reasoning_content": "So."}):
            try:
                counts = [
                    len(_NOTHING.findall(self._render(self._calls(content, MARK, **more))))
                    for content in ("", None)
                ]
            except TemplateRaised:
                return False
            if counts[0] != counts[1]:
                return False
        return True

    @cached_property
    def wants_text(self) -> bool:
        """Whether it takes the arguments of a call as their JSON only, and not as an object."""
        chat = self._calls("", MARK)
        return not self._writes(chat) and self._writes([*map(_with_text_arguments, chat)])

    def _calls(self, content: str | None, argument: str, **more: Any) -> Messages:
        """A question, a call and its result."""
        function = {"name": "look", "arguments": {"at": argument}}
        call = {"id": "abcdef123", "type": "function", "function": function}
        chat: Messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": content, "tool_calls": [call], **more},
            {"role": "tool", "content": "Seen.", "tool_call_id": call["id"], "name": "look"},
        ]
        return [*map(_in_parts, chat)] if self.wants_parts else chat

    def _writes(self, messages: Messages) -> bool:
        try:
            return MARK in self._render(messages)
        except TemplateRaised:
            return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return message if text is None else {**message, "content": [{"type": "text", "text": text}]}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**function, "arguments": _json(function.get("arguments"))}}
        for call in message.get("tool_calls") or ()
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


# ------------------------------------------------------------------------ the child process


class _Process:
    """The child that renders, and is ended when a template takes too long. Threads take turns."""

    def __init__(self) -> None:
        self.spellings: Sequence[str] = ()  # of the vocabulary's special tokens
        self._known: Sequence[str] = ()  # those that the child knows
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._ready = False
        self._asking = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer: the text, or the error that the template raised. Raises TemplateFailed."""
        with self._asking:
            return self._ask(request)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self.start()
        self._await_ready()
        try:
            self._write(request)
            return self._line(TIME_LIMIT)
        except TimeoutError:
            self.close()
            raise TemplateFailed(
                f"The model's chat template took longer than {TIME_LIMIT:.0f} seconds."
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
        self._buffer = b""
        self._ready, self._known = False, ()
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "localspec.engine.prompt.template_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=helper_environment(),
        )

    def _await_ready(self) -> None:
        known = not self.spellings or self._known is self.spellings
        if not self._ready or not known:
            try:
                if not self._ready:
                    self._line(START_LIMIT)
                if not known:
                    self._write({"spellings": [*self.spellings]})
                    self._line(START_LIMIT)
                    self._known = self.spellings
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
