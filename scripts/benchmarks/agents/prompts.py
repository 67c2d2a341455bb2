"""What a model reads for the requests of agents: the text by a chat template, and tokens."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence

import msgspec

from benchmarks.agents.sessions import Request
from localspec.daemon.completion.request import chat_prompt
from localspec.engine.prompt.template import TemplateRenderer
from localspec.extras.anthropic import request as anthropic
from localspec.extras.anthropic.wire import MessagesRequest
from localspec.extras.responses import request as responses
from localspec.extras.responses.wire import ResponsesRequest
from localspec.protocol.fields import IgnoredFields
from localspec.protocol.requests import ChatMessage, ChatRequest

_WORD = re.compile(r"<\|im_start\|>|<\|im_end\|>|\w+|[^\w\s]+")


def as_chat(request: Request) -> ChatRequest:
    """Return the request as the daemon translates it into a chat."""
    body = {"model": "", **request.body}
    if request.path.endswith("/messages"):
        message = msgspec.convert(body, MessagesRequest)
        return anthropic.chat_request(message, IgnoredFields())[0]
    if request.path.endswith("/responses"):
        converted = msgspec.convert(body, ResponsesRequest)
        parsed = responses.parse_input(converted, _no_reference)
        return responses.chat_request(converted, parsed, [])
    return msgspec.convert(body, ChatRequest)


def _no_reference(name: str) -> ChatMessage:
    raise LookupError(name)


def render(request: Request, renderer: TemplateRenderer) -> str:
    """Return the prompt of a request."""
    return renderer.render(chat_prompt(as_chat(request)))


def word_tokens(text: str, start: int, end: int, n_words: int, *, one_in: int = 1) -> list[int]:
    """Return a token per word of a prompt in ChatML: equal words have equal tokens, below `n_words`.

    start, end: the control tokens of messages. one_in: only so many words are left, always the same ones,
    for a session that is shorter by that factor.
    """
    tokens = []
    for word in _WORD.findall(text):
        if word in ("<|im_start|>", "<|im_end|>"):
            tokens.append(start if word == "<|im_start|>" else end)
            continue
        number = _number_word(word)
        if number % one_in == 0:
            tokens.append(number // one_in % n_words)
    return tokens


@functools.lru_cache(1 << 16)  # a session repeats its prompt in each request
def _number_word(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:6], "big")


def as_template_body(request: Request) -> dict[str, object]:
    """Return what /apply-template needs to render the same prompt."""
    chat = as_chat(request)
    fields: Sequence[str] = ("messages", "tools", "chat_template_kwargs", "reasoning_effort")
    return {
        name: value
        for name in fields
        if (value := msgspec.to_builtins(getattr(chat, name, None))) not in (None, {})
    }
