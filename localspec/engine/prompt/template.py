"""Render chat messages to prompt text with the template in the model's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from localspec.chat.dialect import PLACEHOLDER, learn_dialect
from localspec.chat.wordings import Messages, find_wording, with_forms
from localspec.engine.prompt.special_tokens import RenderedPrompt
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.errors import InvalidRequest, TemplateFailed, TemplateRaised
from localspec.protocol.dialect import Dialect
from localspec.protocol.frames import ChatPrompt

_MAX_SKELETONS = 16  # Cached skeletons. One of a chat of 10,000 messages takes about a megabyte.


class TemplateRenderer:
    """A renderer of chats in a child process, which is killed if a template takes too long.

    Any thread may use it; they render one after the other.
    """

    def __init__(
        self, template: str | None, bos: str, eos: str, dialect: Dialect | None = None
    ) -> None:
        """Prepare to render `template`.

        dialect: the template's, if another renderer has learnt it. Without it, the process starts now, and
        not with the first chat, because learning the dialect needs it.
        """
        self._template = template
        self._bos, self._eos = bos, eos
        self._process = TemplateProcess()
        # Chats of the same shape have the same skeleton, and all choices of a request have the same chat.
        self._skeleton = lru_cache(_MAX_SKELETONS)(
            lambda variables: self._rendered(json.loads(variables))
        )
        if dialect is not None:
            self.dialect = dialect
        elif template is not None:
            self._process.start()

    @property
    def texts(self) -> tuple[str | None, str, str]:
        """The arguments of another renderer of the same template."""
        return self._template, self._bos, self._eos

    @cached_property
    def dialect(self) -> Dialect:
        """The dialect of the model, which is learnt when this property is first read."""
        return learn_dialect(self._template, self._rendered, self._bos, self._eos)

    def watch(self, spellings: Sequence[str]) -> None:
        """Distinguish the template's special tokens from those that a message spells.

        spellings: the texts of the vocabulary's special tokens. Without this call, none are distinguished.
        """
        self._process.spellings = spellings

    def render(self, prompt: ChatPrompt) -> str:
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
        messages = [{"role": m.role, "content": m.content, **m.extra} for m in prompt.messages]
        text = ""

        def skeleton(wording: Messages) -> str:
            nonlocal text
            text = self._skeleton(json.dumps(self._variables(prompt, wording)))
            return text

        messages = find_wording(messages, skeleton, self.dialect.calls)
        for tool in prompt.tools or ():
            name = tool.get("function", tool).get("name")
            if name and name not in text:
                raise InvalidRequest(
                    f"This model's chat template leaves out the tool '{name}'.", param="tools"
                )
        if prompt.continued == "reasoning_content":
            messages[-1] = {**messages[-1], "content": "", "reasoning_content": PLACEHOLDER}
        elif prompt.continued:
            messages[-1] = {**messages[-1], "content": PLACEHOLDER}
        try:
            rendered = self._text(prompt, messages)
        except TemplateRaised as refusal:
            raise TemplateFailed(f"The model's chat template failed: {refusal}") from None
        if not prompt.continued:
            return rendered
        index = rendered.text.rfind(PLACEHOLDER)
        if index < 0:
            raise TemplateFailed(
                f"This model's chat template has no place for the '{prompt.continued}' of the "
                "last message, so it cannot be continued."
            )
        return rendered.part(0, index)

    def _text(self, prompt: ChatPrompt, messages: Messages) -> RenderedPrompt:
        """Render messages, with the template's special tokens distinguished."""
        variables = self._variables(prompt, messages)
        if not self._process.spellings:
            return RenderedPrompt(self._rendered(variables))
        # The given beginning of an answer is the caller's text, which may complete a special token.
        mode = "always" if prompt.continued or prompt.answer_prefix else "forged"
        reply = self._process.reply(self._template, variables, special=mode)
        special = reply.get("special")
        return RenderedPrompt(str(reply["text"]), special and [(a, b) for a, b in special])

    def _variables(self, prompt: ChatPrompt, messages: Messages) -> dict[str, Any]:
        today = datetime.now().astimezone()
        return {
            # None instead of missing, as in the renderer that templates are written for.
            "documents": None,
            "bos_token": self._bos,
            "eos_token": self._eos,
            # The date by the names and in the formats of llama.cpp's renderer. Without it, the template of
            # Llama 3 uses a date in July 2024.
            "date_string": f"{today:%d %b %Y}",
            "datetime": f"{today:%b %d %Y}",
            **prompt.template_kwargs,
            "messages": with_forms(messages, self.dialect.messages),
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continued,
            "tools": prompt.tools or None,
        }

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        return self._process.render(self._template, variables)

    def close(self) -> None:
        """Kill the child process."""
        self._process.close()
