"""Render chat messages to prompt text with the template in the model's own file."""

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
from localspec.engine.prompt.dialect import (
    CHANNELS,
    MarkersUnknown,
    Marks,
    Messages,
    TemplateRaised,
    detect_markers,
    find_wording,
)
from localspec.engine.prompt.special_tokens import RenderedPrompt, pairs
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt

TIME_LIMIT_S = 2.0  # Seconds that a template may take.
START_LIMIT_S = 20.0  # Seconds that the process may take to start on a busy machine.
PLACEHOLDER = "zqplaceqz"  # A placeholder for a text, which no template contains.
_NOTHING = re.compile(r"\b(?:none|null)\b", re.IGNORECASE)
_THOUGHT = re.compile("reasoning|thinking|thought", re.IGNORECASE)
# Variables that turn thinking on, by the names that different families of models use.
_THINKING = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
_MAX_SKELETONS = 16  # Cached skeletons. One of a chat of 10,000 messages takes about a megabyte.


class TemplateRenderer:
    """A renderer of chats in a child process, which is killed if a template takes too long.

    Any thread may use it; they render one after the other.
    """

    def __init__(self, template: str | None, bos: str, eos: str, *, eager: bool = True) -> None:
        """Prepare to render `template`. eager: start the process now, and not with the first chat."""
        self._template = template
        # Tools and documents are None instead of missing, as in the renderer that templates are written for.
        self._always: dict[str, Any] = {"tools": None, "documents": None, "bos_token": bos}
        self._always |= {"eos_token": eos, "add_generation_prompt": False}
        self._process = _Process()
        self._capabilities = Capabilities(
            lambda chat: self._rendered({**self._always, "messages": chat})
        )
        # Chats of the same shape have the same skeleton, and all choices of a request have the same chat.
        self._skeleton = lru_cache(_MAX_SKELETONS)(
            lambda variables: self._rendered(json.loads(variables))
        )
        if template is not None and eager:
            self._process.start()  # It starts while the models are loaded.

    def watch(self, spellings: Sequence[str]) -> None:
        """Distinguish the template's special tokens from those that a message spells.

        spellings: the texts of the vocabulary's special tokens. Without this call, none are distinguished.
        """
        self._process.spellings = spellings

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text of `rendered`."""
        return self.rendered(prompt).text

    def rendered(self, prompt: ChatPrompt) -> RenderedPrompt:
        """Return the prompt up to the beginning of the answer.

        The answer begins after the last message, or at the text of the last message if that is `continued`.

        Raises:
            InvalidRequest: the template has no place for a message, or for the tools.
            TemplateFailed: the model has no template, or the template failed, took longer than
                TIME_LIMIT_S or rendered too much text.
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

        messages = find_wording(messages, skeleton)
        _check_tools(prompt.tools or [], text)
        if prompt.continued:
            return self._continued(prompt, messages)
        try:
            return self._text(prompt, messages)
        except TemplateRaised as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None

    def marks(self, known: Sequence[Marks]) -> list[Marks]:
        """Return the markers of thoughts.

        These are the `known` ones that occur in the template, or else those detected in its output.

        Raises:
            NotSeen: the markers cannot be detected.
        """
        if self._template is None:
            return list(known)
        marks = [(o, c) for o, c in known if o.rstrip() in self._template or c in self._template]
        if marks or not known or CHANNELS in self._template or not _THOUGHT.search(self._template):
            return marks
        if isinstance(self._detected_marks, MarkersUnknown):
            raise self._detected_marks
        return [self._detected_marks] if self._detected_marks else []

    @cached_property
    def _detected_marks(self) -> Marks | MarkersUnknown | None:
        def render(messages: Messages, add_generation_prompt: bool) -> str:
            worded = self._capabilities.worded(messages)
            variables = {"messages": worded, "add_generation_prompt": add_generation_prompt}
            return self._rendered({**self._always, **_THINKING, **variables})

        try:
            return detect_markers(render)
        except MarkersUnknown as unknown:
            return unknown
        except (TemplateRaised, TemplateFailed):
            return None

    def _continued(self, prompt: ChatPrompt, messages: Messages) -> RenderedPrompt:
        """Render the prompt up to the place of the last message's text or thoughts."""
        *earlier, last = messages
        if prompt.continued == "reasoning_content":
            last = {**last, "content": "", "reasoning_content": PLACEHOLDER}
        else:
            last = {**last, "content": PLACEHOLDER}
        try:
            rendered = self._text(prompt, [*earlier, last])
        except TemplateRaised as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None
        index = rendered.text.rfind(PLACEHOLDER)
        if index < 0:
            raise TemplateFailed(
                f"This model's chat template has no place for the '{prompt.continued}' of the "
                "last message, so it cannot be continued."
            )
        return rendered.prefix_until(index)

    def _text(self, prompt: ChatPrompt, messages: Messages) -> RenderedPrompt:
        """Render messages, with the template's special tokens distinguished.

        Raises:
            TemplateRaised: the template itself raised an exception.
            TemplateFailed: the template was stopped.
        """
        variables = self._variables(prompt, messages)
        if not self._process.spellings:
            return RenderedPrompt(self._rendered(variables))
        # The given beginning of an answer is the caller's text, which may complete a special token.
        mode = "always" if prompt.continued or prompt.answer_prefix else "forged"
        reply = self._reply(variables, special=mode)
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
        """Return the date by the names and in the formats of llama.cpp's renderer.

        Without it, the template of Llama 3 uses a date in July 2024.
        """
        today = datetime.now().astimezone()
        return {"date_string": f"{today:%d %b %Y}", "datetime": f"{today:%b %d %Y}"}

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        return str(self._reply(variables)["text"])

    def _reply(self, variables: Mapping[str, Any], **options: str) -> dict[str, Any]:
        """Return the process's reply to a request. Raises TemplateRaised or TemplateFailed."""
        reply = self._process.ask({"template": self._template, "variables": variables, **options})
        if "error" in reply:
            raise TemplateRaised(reply["error"])
        return reply

    def close(self) -> None:
        """Kill the child process."""
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


# ------------------------------------------------------------------------ template capabilities


class Capabilities:
    """The forms of messages that one template supports, detected from what it renders."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        """Detect with `render`, which raises TemplateRaised if the template raises."""
        self._render = render

    def worded(self, messages: Messages) -> Messages:
        """Return `messages` in the form that the template reads, with the same content."""
        return [self._convert(message) for message in messages]

    def _convert(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if message["content"] is None and not self.knows_null:
            message["content"] = ""
        if message.get("tool_calls") and self.wants_text:
            message = _with_text_arguments(message)
        if (thoughts := message.get("reasoning_content")) is not None:
            # The name that gpt-oss uses for thoughts, as in transformers.
            message = {"thinking": thoughts, **message}
        return _in_parts(message) if self.wants_parts else message

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template reads a message's text only in a list of parts."""
        message = {"role": "user", "content": PLACEHOLDER}
        return not self._writes([message]) and self._writes([_in_parts(message)])

    @cached_property
    def knows_null(self) -> bool:
        """Whether a message with calls may have null as its text.

        It may not if the template then writes "null" or fails. Where it may, null is used, because some
        templates render an empty text as a turn of its own.
        """
        for fields in ({}, {"reasoning_content": "So."}):
            try:
                counts = [
                    len(
                        _NOTHING.findall(
                            self._render(self._call_chat(content, PLACEHOLDER, **fields))
                        )
                    )
                    for content in ("", None)
                ]
            except TemplateRaised:
                return False
            if counts[0] != counts[1]:
                return False
        return True

    @cached_property
    def wants_text(self) -> bool:
        """Whether the template reads the arguments of a call only as JSON text, not as an object."""
        chat = self._call_chat("", PLACEHOLDER)
        return not self._writes(chat) and self._writes([*map(_with_text_arguments, chat)])

    def _call_chat(self, content: str | None, argument: str, **fields: Any) -> Messages:
        """Return a chat with a question, a call and its result; fields: added to the call's message."""
        function = {"name": "look", "arguments": {"at": argument}}
        call = {"id": "abcdef123", "type": "function", "function": function}
        chat: Messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": content, "tool_calls": [call], **fields},
            {"role": "tool", "content": "Seen.", "tool_call_id": call["id"], "name": "look"},
        ]
        return [*map(_in_parts, chat)] if self.wants_parts else chat

    def _writes(self, messages: Messages) -> bool:
        """Return whether the template renders the text MARK."""
        try:
            return PLACEHOLDER in self._render(messages)
        except TemplateRaised:
            return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text in a list of parts."""
    text = message["content"]
    return message if text is None else {**message, "content": [{"type": "text", "text": text}]}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
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
    """The child process that renders. It is killed if a template takes too long."""

    def __init__(self) -> None:
        self.spellings: Sequence[str] = ()  # The texts of the vocabulary's special tokens.
        self._sent_spellings: Sequence[str] = ()  # Those that were sent to the current child.
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._ready = False
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply: the text, or the error that the template raised. Raises TemplateFailed."""
        with self._lock:
            return self._ask(request)

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
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "localspec.engine.prompt.template_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=helper_environment(),
        )

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
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                # Closing flushes the buffer, which fails because the child has ended.
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child = None
