"""Translate the requests of Ollama's clients into localspec's chats and text completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from localspec.daemon.completion.files import read_picture
from localspec.daemon.completion.request import translate_request
from localspec.errors import InvalidRequest
from localspec.extras.ollama.wire import (
    AskedMessage,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
)
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    ResponseFormat,
)

_SEPARATOR = "\n\n"  # between the contents of joined messages
_ZERO_DURATION = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")


def chat(request: OllamaChatRequest, model: str) -> ChatRequest:
    """Return the request as a chat with the pair `model`. Raises InvalidRequest."""
    thinking: dict[str, Any] = {}
    if isinstance(request.think, str):
        thinking["reasoning_effort"] = request.think
    elif request.think is not None:
        thinking["reasoning_budget_tokens"] = -1 if request.think else 0
    return translate_request(
        ChatRequest,
        request.options or Options(),
        messages=_messages(request.messages or []),
        tools=request.tools,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        **thinking,
        **_shared(request, model),
    )


def generate(request: OllamaGenerateRequest, model: str) -> ChatRequest | CompletionRequest:
    """Return a chat of one question, or with `raw` or `suffix` a text completion. Raises InvalidRequest."""
    if request.images and (request.raw or request.suffix):
        raise InvalidRequest("'images' need a chat template; leave out 'raw' and 'suffix'.")
    _check_images(request.images, "images")
    for name in ("template", "context"):
        if getattr(request, name):
            problem = "is not supported; send the messages of the conversation to /api/chat."
            raise InvalidRequest.at(name, problem)
    if request.raw or request.suffix:
        if request.system:
            raise InvalidRequest("'system' needs a chat template; leave out 'raw' and 'suffix'.")
        return translate_request(
            CompletionRequest,
            request.options or Options(),
            prompt=request.prompt,
            suffix=request.suffix or None,
            logprobs=request.top_logprobs if request.logprobs else None,
            **_shared(request, model),
        )
    messages = [AskedMessage("user", request.prompt, images=request.images)]
    if request.system:
        messages.insert(0, AskedMessage("system", request.system))
    fields = {name: getattr(request, name) for name in OllamaRequest.__struct_fields__}
    return chat(OllamaChatRequest(**fields, messages=messages), model)


def unloads(request: OllamaRequest | OllamaEmbedRequest | OllamaEmbeddingsRequest) -> bool:
    """Return whether the model has to be unloaded right after its answer."""
    text = str(request.keep_alive)
    return request.keep_alive is not None and bool(_ZERO_DURATION.fullmatch(text))


def ignored_fields(request: OllamaRequest, n_ctx: int | None) -> list[str]:
    """Return the known fields that were sent and have no effect; `n_ctx` is the context, if known."""
    options = request.options or Options()
    names = ["options.num_ctx"] if n_ctx and (options.num_ctx or 0) > n_ctx else []
    return [*names, *ignored_keep_alive(request)]


def ignored_keep_alive(
    request: OllamaRequest | OllamaEmbedRequest | OllamaEmbeddingsRequest,
) -> list[str]:
    """Return "keep_alive" if it was sent with a duration; the configuration decides when a pair unloads."""
    return [] if request.keep_alive is None or unloads(request) else ["keep_alive"]


def _shared(request: OllamaRequest, model: str) -> dict[str, Any]:
    form, response_format = request.format, None
    if form == "json":
        response_format = ResponseFormat("json_object")
    elif isinstance(form, str) and form:
        raise InvalidRequest.at("format", f'must be "json" or a JSON schema, not {form[:40]!r}.')
    elif form:
        response_format = ResponseFormat("json_schema", schema=form)
    return {
        "model": model,
        "stream": request.stream,
        "max_tokens": request.options and request.options.num_predict,
        "response_format": response_format,
    }


def _messages(ollama_messages: Sequence[AskedMessage]) -> list[ChatMessage]:
    """Translate the messages, and add the ids of calls that Ollama's clients mostly leave out."""
    messages: list[ChatMessage] = []
    call_count = 0
    pending: list[tuple[str, str]] = []  # id and name of each call without a result yet
    for index, source in enumerate(ollama_messages):
        _check_images(source.images, f"messages[{index}].images")
        content: str | list[ContentPart] | None = source.content
        if source.images:
            pictures = [
                ContentPart("image_url", image_url=_to_url(image)) for image in source.images
            ]
            content = [*pictures, ContentPart("text", source.content or "")]
        message = ChatMessage(source.role, content, reasoning_content=source.thinking)
        if source.tool_calls:
            # Mistral's templates refuse ids that do not have nine characters.
            calls = [
                (call.id or f"call{call_count + number:05d}", call.function.name)
                for number, call in enumerate(source.tool_calls)
            ]
            call_count += len(calls)
            is_next = bool(messages) and messages[-1].role == source.role  # and is joined
            pending = [*pending, *calls] if is_next else [*calls]
            message.tool_calls = [
                {"id": call_id, "type": "function", "function": msgspec.to_builtins(call.function)}
                for (call_id, _), call in zip(calls, source.tool_calls, strict=True)
            ]
        elif source.role == "tool":
            message.name = source.tool_name
            message.tool_call_id = source.tool_call_id or _pop_call_id(pending, source.tool_name)
        if source.content is None and not (source.tool_calls or source.thinking):
            message.content = ""
        # Neighbours of one role are joined, except results of tools, as Ollama does for its templates.
        if messages and messages[-1].role == message.role != "tool":
            _append_message(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _append_message(message: ChatMessage, more: ChatMessage) -> None:
    if isinstance(message.content, list) or isinstance(more.content, list):
        parts = [
            [*content]
            if isinstance(content, list)
            else [ContentPart("text", content)] * bool(content)
            for content in (message.content, more.content)
        ]
        separator = [ContentPart("text", _SEPARATOR)] if all(parts) else []
        message.content = [*parts[0], *separator, *parts[1]]
    else:
        texts = [text for text in (message.content, more.content) if text]
        message.content = _SEPARATOR.join(texts) if texts else message.content
    thoughts = filter(None, (message.reasoning_content, more.reasoning_content))
    message.reasoning_content = _SEPARATOR.join(thoughts) or None
    message.tool_calls = [*(message.tool_calls or []), *(more.tool_calls or [])] or None


def _pop_call_id(pending: list[tuple[str, str]], tool: str | None) -> str | None:
    """Remove the first call of this tool, or the first of all if there is none, and return its id."""
    if not pending:
        return None
    call = next((entry for entry in pending if entry[1] == tool), pending[0])
    pending.remove(call)
    return call[0]


def _check_images(images: Sequence[Any] | None, path: str) -> None:
    for index, image in enumerate(images or []):
        if not isinstance(image, str):
            raise InvalidRequest(f"'{path}[{index}]' must be a picture file in base64.", param=path)
        read_picture(_to_url(image), f"{path}[{index}]")


def _to_url(image: str) -> str:
    """Return the data URL of an image, which Ollama's clients send as base64 alone, or as such a URL."""
    return image if ":" in image[:20] else f"data:;base64,{image}"
