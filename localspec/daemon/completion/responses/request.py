"""A Responses request into a chat's, and the response that is to come of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from localspec.daemon.completion.responses.items import Messages, Resolve
from localspec.daemon.completion.responses.output import Style
from localspec.daemon.completion.responses.tools import Tools, translated
from localspec.errors import InvalidRequest
from localspec.protocol.clients.responses.items import ResponseExtra, ResponseObject
from localspec.protocol.clients.responses.requests import (
    ReasoningOptions,
    ResponsesRequest,
)
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    Effort,
    GenerationRequest,
    JsonSchema,
    ResponseFormat,
)

_LOGPROBS = "message.output_text.logprobs"
OPAQUE = "reasoning.encrypted_content"
# What would change the answer in a way that no field of it could make good.
_REFUSED = {
    "background": "the answer comes in this connection; send 'stream': true to see it being written",
    "conversation": "use 'previous_response_id' to go on from a response",
    "prompt": "there are no stored prompts here; send 'instructions' and 'input'",
}


def refuse(request: ResponsesRequest) -> None:
    """What is not to be had here.

    Raises:
        InvalidRequest: a field that is refused by its name.
    """
    if (request.n or 1) > 1:
        raise InvalidRequest("'n' must be 1: a response is one answer.", param="n")
    for name, instead in _REFUSED.items():
        if getattr(request, name):
            raise InvalidRequest(f"'{name}' is not supported: {instead}.", param=name)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the items of a request say. `messages` go on from those before them."""

    messages: list[ChatMessage]
    tools: Tools
    ignored: list[str]


def asked(request: ResponsesRequest, resolve: Resolve) -> Asked:
    """The items of the request; `resolve` finds what an item reference means.

    Raises:
        InvalidRequest: an item, a tool or a choice that is none.
    """
    tools = translated(request.tools or [], request.tool_choice)
    messages = Messages(tools, resolve)
    if isinstance(request.input, str):
        messages.said.append(ChatMessage("user", request.input))
    else:
        messages.add(request.input or [])
    return Asked(messages.said, tools, [*messages.ignored, *tools.ignored, *_ignored(request)])


def _ignored(request: ResponsesRequest) -> list[str]:
    found = []
    if request.truncation == "auto":
        found.append("'truncation': nothing is dropped; an input that is too long is refused.")
    if request.text and request.text.verbosity not in (None, "medium"):
        found.append("'text.verbosity': this model does not know it.")
    effort = request.reasoning and request.reasoning.effort
    if effort and effort not in get_args(Effort):
        found.append(f"'reasoning.effort': {effort[:80]!r} is not known here.")
    for each in request.include or []:
        if each not in (_LOGPROBS, OPAQUE):
            found.append(f"'include': {each[:80]!r} is not produced here.")
    if _summary(request):
        found.append("'reasoning.summary': the summary is the reasoning itself, uncut.")
    return found


def chat_request(
    request: ResponsesRequest, found: Asked, before: Sequence[ChatMessage]
) -> ChatRequest:
    """The one request there is; `before` are the messages of the responses it goes on from.

    Raises:
        InvalidRequest: nothing is asked, or two forms of the answer at once.
    """
    messages = [*before, *found.messages]
    if not messages:
        raise InvalidRequest("'input' is missing.", param="input")
    if request.instructions:
        messages.insert(0, ChatMessage("system", request.instructions))
    same: dict[str, Any] = {
        name: getattr(request, name) for name in GenerationRequest.__struct_fields__
    }
    same |= {"n": None, "n_cmpl": None, "localspec": None, "stream_options": None}
    chat = ChatRequest(**same, messages=messages, continue_final_message=False)
    if request.max_output_tokens is not None:
        chat.max_tokens, chat.max_completion_tokens = request.max_output_tokens, None
    chat.tools = found.tools.offered or None
    chat.tool_choice = found.tools.choice if chat.tools else None
    chat.parallel_tool_calls = request.parallel_tool_calls
    chat.chat_template_kwargs = request.chat_template_kwargs
    if request.top_logprobs is not None or _LOGPROBS in (request.include or []):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    effort = request.reasoning and request.reasoning.effort
    if effort in get_args(Effort):
        chat.reasoning_effort = effort  # type: ignore[assignment] # one of these
    if form := _format(request):
        chat.response_format = form
    return chat


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text and request.text.format
    if not wanted:
        return None
    if wanted.type == "json_schema" and wanted.schema is None:
        raise InvalidRequest("'text.format.schema' is missing.", param="text.format.schema")
    if wanted.type != "json_schema":
        return ResponseFormat(wanted.type)
    return ResponseFormat(
        "json_schema", JsonSchema(wanted.schema or {}, wanted.name, wanted.strict)
    )


def style(request: ResponsesRequest, tools: Tools, key: str) -> Style:
    return Style(key, tools, bool(_summary(request)), OPAQUE in (request.include or []))


def _summary(request: ResponsesRequest) -> str | None:
    """The summary that is asked for."""
    wanted = request.reasoning or ReasoningOptions()
    summary = wanted.summary or wanted.generate_summary
    return None if summary == "none" else summary


def opening(request: ResponsesRequest, key: str, model: str, ignored: list[str]) -> ResponseObject:
    """The response before anything of it has come: what was asked, said again."""
    reasoning = request.reasoning or ReasoningOptions()
    text = msgspec.to_builtins(request.text) if request.text else {}
    form = {k: v for k, v in (text.get("format") or {"type": "text"}).items() if v is not None}
    return ResponseObject(
        id=f"resp_{key}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": _summary(request)},
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=request.temperature,
        text={"format": form, "verbosity": text.get("verbosity") or "medium"},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
        localspec=ResponseExtra(ignored=ignored),
    )
