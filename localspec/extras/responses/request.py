"""Translate a Responses request into a chat, and create its response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from localspec.daemon.completion.request import translate_request
from localspec.errors import InvalidRequest
from localspec.extras.responses.items import MessageBuilder, Resolve, ToolSet, translate_tools
from localspec.extras.responses.output import ItemStyle
from localspec.extras.responses.wire import (
    ReasoningOptions,
    ResponseExtra,
    ResponseObject,
    ResponsesRequest,
)
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    JsonSchema,
    ReasoningEffort,
    ResponseFormat,
)

_LOGPROBS_INCLUDE = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Fields that would change the answer, and what to use instead.
_REFUSED = {
    "conversation": "use 'previous_response_id' to go on from a response",
    "prompt": "there are no stored prompts here; send 'instructions' and 'input'",
}


def refuse_unsupported(request: ResponsesRequest) -> None:
    """Refuse what is not supported.

    Raises:
        InvalidRequest: a field would change the answer and is not supported.
    """
    if (request.n or 1) > 1:
        raise InvalidRequest("'n' must be 1: a response is one answer.", param="n")
    if request.background and request.store is False:
        raise background_not_stored("is false in this request")
    for name, instead in _REFUSED.items():
        if getattr(request, name):
            raise InvalidRequest(f"'{name}' is not supported: {instead}.", param=name)


def background_not_stored(store: str) -> InvalidRequest:
    """Return the error of a background response that would not be stored; `store` says why."""
    return InvalidRequest(
        f"'background' needs 'store' to be true, which {store}: its answer is read by its id.",
        param="background",
    )


@dataclass(frozen=True, slots=True)
class ParsedInput:
    """The content of a request's items; `messages` continue those of the responses before."""

    messages: list[ChatMessage]
    tools: ToolSet
    ignored: list[str]


def parse_input(request: ResponsesRequest, resolve: Resolve) -> ParsedInput:
    """Parse the items of the request; `resolve` returns the message that an item reference means.

    Raises:
        InvalidRequest: an item, a tool or a choice is invalid.
    """
    items = request.input if isinstance(request.input, list) else []
    tools = translate_tools(request.tools or [], request.tool_choice, items)
    messages = MessageBuilder(tools, resolve)
    if isinstance(request.input, str):
        messages.messages.append(ChatMessage("user", request.input))
    else:
        messages.add(request.input or [])
    return ParsedInput(
        messages.messages, tools, [*messages.ignored, *tools.ignored, *_ignored(request)]
    )


def _ignored(request: ResponsesRequest) -> list[str]:
    sentences = []
    if request.truncation == "auto":
        sentences.append("'truncation': nothing is dropped; an input that is too long is refused.")
    if request.text and request.text.verbosity not in (None, "medium"):
        sentences.append("'text.verbosity': this model does not know it.")
    effort = request.reasoning and request.reasoning.effort
    if effort and effort not in get_args(ReasoningEffort):
        sentences.append(f"'reasoning.effort': {effort[:80]!r} is not known here.")
    for include in request.include or []:
        if include not in (_LOGPROBS_INCLUDE, ENCRYPTED_REASONING):
            sentences.append(f"'include': {include[:80]!r} is not produced here.")
    if _summary(request):
        sentences.append("'reasoning.summary': the summary is the reasoning itself, uncut.")
    return sentences


def chat_request(
    request: ResponsesRequest, parsed: ParsedInput, before: Sequence[ChatMessage]
) -> ChatRequest:
    """Return the request as a chat; `before` are the messages of the responses that it continues.

    Raises:
        InvalidRequest: the input is empty, or the request has two formats of the answer.
    """
    messages = [*before, *parsed.messages]
    if not messages:
        raise InvalidRequest("'input' is missing.", param="input")
    if request.instructions:
        messages.insert(0, ChatMessage("system", request.instructions))
    chat = translate_request(
        ChatRequest,
        request,
        n=None,
        n_cmpl=None,
        localspec=None,
        stream_options=None,
        messages=messages,
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=False,
    )
    if request.max_output_tokens is not None:
        chat.max_tokens, chat.max_completion_tokens = request.max_output_tokens, None
    chat.tools = parsed.tools.offered or None
    chat.tool_choice = parsed.tools.choice if chat.tools else None
    chat.parallel_tool_calls = request.parallel_tool_calls
    if request.top_logprobs is not None or _LOGPROBS_INCLUDE in (request.include or []):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    _think(chat, request.reasoning or ReasoningOptions())
    if response_format := _format(request):
        chat.response_format = response_format
    return chat


def _think(chat: ChatRequest, options: ReasoningOptions) -> None:
    if options.effort in get_args(ReasoningEffort):
        chat.reasoning_effort = options.effort  # type: ignore[assignment] # checked just above
    if options.max_tokens is not None:
        chat.reasoning_budget_tokens = options.max_tokens
    if options.enabled is not None and chat.reasoning_budget_tokens is None:
        chat.reasoning_budget_tokens = None if options.effort else -1
    if options.enabled is False:
        chat.reasoning_budget_tokens = 0


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    text_format = request.text and request.text.format
    if not text_format:
        return None
    if text_format.type == "json_schema" and text_format.schema is None:
        raise InvalidRequest("'text.format.schema' is missing.", param="text.format.schema")
    if text_format.type != "json_schema":
        return ResponseFormat(text_format.type)
    return ResponseFormat(
        "json_schema", JsonSchema(text_format.schema or {}, text_format.name, text_format.strict)
    )


def item_style(request: ResponsesRequest, tools: ToolSet, key: str) -> ItemStyle:
    """Return how the items of the answer are written."""
    return ItemStyle(
        key, tools, bool(_summary(request)), ENCRYPTED_REASONING in (request.include or [])
    )


def _summary(request: ResponsesRequest) -> str | None:
    """Return the kind of summary that the request asks for; None if it asks for none."""
    options = request.reasoning or ReasoningOptions()
    summary = options.summary or options.generate_summary
    return None if summary == "none" else summary


def new_response(
    request: ResponsesRequest, key: str, model: str, ignored: list[str]
) -> ResponseObject:
    """Return the response before anything of it is written; it repeats fields of the request."""
    reasoning = request.reasoning or ReasoningOptions()
    text = msgspec.to_builtins(request.text) if request.text else {}
    text_format = {
        field: value
        for field, value in (text.get("format") or {"type": "text"}).items()
        if value is not None
    }
    return ResponseObject(
        id=f"resp_{key}",
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
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
        text={"format": text_format, "verbosity": text.get("verbosity") or "medium"},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
        localspec=ResponseExtra(ignored=ignored),
    )
