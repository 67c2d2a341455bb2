"""What Ollama's clients ask, as the chat or the text completion that we have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from localspec.errors import InvalidRequest
from localspec.protocol.clients.ollama import (
    Asked,
    AskedMessage,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    Options,
)
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
)
from localspec.protocol.sampling import parameters

_ZERO = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
_SAMPLED = [each.name for each in parameters()]


def chat(request: OllamaChatRequest, model: str) -> ChatRequest:
    """The same chat as ours, of the pair `model`.

    Raises:
        InvalidRequest: an image, or a format that is none.
    """
    return ChatRequest(
        messages=_messages(request.messages or []),
        tools=request.tools,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        **_thinking(request),
        **_shared(request, model),
    )


def generate(request: OllamaGenerateRequest, model: str) -> ChatRequest | CompletionRequest:
    """A chat of one question, or with `raw` or a `suffix` a text that is gone on with.

    Raises:
        InvalidRequest: as `chat`, and what is not offered here.
    """
    _no_images(request.images, "images")
    for name in ("template", "context"):
        if getattr(request, name):
            raise InvalidRequest(
                f"'{name}' is not supported; send the messages of the conversation to /api/chat.",
                param=name,
            )
    if request.raw or request.suffix:
        if request.system:
            raise InvalidRequest("'system' needs a chat template; leave out 'raw' and 'suffix'.")
        return CompletionRequest(
            prompt=request.prompt,
            suffix=request.suffix or None,
            logprobs=request.top_logprobs if request.logprobs else None,
            **_shared(request, model),
        )
    messages = [AskedMessage("user", request.prompt)]
    if request.system:
        messages.insert(0, AskedMessage("system", request.system))
    asked = {name: getattr(request, name) for name in Asked.__struct_fields__}
    return chat(OllamaChatRequest(**asked, messages=messages), model)


def unloads(request: Asked | OllamaEmbedRequest | OllamaEmbeddingsRequest) -> bool:
    """Whether the model is to be unloaded as soon as it has answered."""
    text = str(request.keep_alive)
    return request.keep_alive is not None and bool(_ZERO.fullmatch(text))


def ignored(request: Asked, n_ctx: int | None) -> list[str]:
    """Return the declared fields that were sent and change nothing; `n_ctx`: the context, if known."""
    options = request.options or Options()
    found = ["options.num_ctx"] if n_ctx and (options.num_ctx or 0) > n_ctx else []
    return [*found, *kept_alive(request)]


def kept_alive(request: Asked | OllamaEmbedRequest | OllamaEmbeddingsRequest) -> list[str]:
    """Name `keep_alive` where it asks for a time: the configuration says when an idle pair leaves."""
    return [] if request.keep_alive is None or unloads(request) else ["keep_alive"]


def _shared(request: Asked, model: str) -> dict[str, Any]:
    options = request.options or Options()
    return {
        **{name: getattr(options, name) for name in _SAMPLED},
        "model": model,
        "stream": request.stream,
        "max_tokens": options.num_predict,
        "stop": options.stop,
        "response_format": _format(request.format),
    }


def _format(wanted: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not wanted:
        return None
    if isinstance(wanted, dict):
        return ResponseFormat("json_schema", schema=wanted)
    if wanted == "json":
        return ResponseFormat("json_object")
    raise InvalidRequest(
        f"'format' must be \"json\" or a JSON schema, not {wanted[:40]!r}.", param="format"
    )


def _thinking(request: Asked) -> dict[str, Any]:
    """`think` as ours: whether, or how much."""
    if request.think is None:
        return {}
    if isinstance(request.think, str):
        return {"reasoning_effort": request.think}
    return {"reasoning_budget_tokens": -1 if request.think else 0}


def _messages(asked: Sequence[AskedMessage]) -> list[ChatMessage]:
    """Calls and their results belong together by ids, which Ollama's clients mostly leave out."""
    messages, calls = [], 0
    waiting: list[tuple[str, str]] = []  # calls without a result yet, by id and name
    for index, each in enumerate(asked):
        _no_images(each.images, f"messages[{index}].images")
        message = ChatMessage(each.role, each.content, reasoning_content=each.thinking)
        if each.tool_calls:
            # Nine characters: Mistral's templates refuse every other id.
            waiting = [
                (call.id or f"call{calls + at:05d}", call.function.name)
                for at, call in enumerate(each.tool_calls)
            ]
            calls += len(waiting)
            message.tool_calls = [
                {"id": own, "type": "function", "function": msgspec.to_builtins(call.function)}
                for (own, _), call in zip(waiting, each.tool_calls, strict=True)
            ]
        elif each.role == "tool":
            message.name = each.tool_name
            message.tool_call_id = each.tool_call_id or _answered(waiting, each.tool_name)
        if each.content is None and not (each.tool_calls or each.thinking):
            message.content = ""
        messages.append(message)
    return messages


def _answered(waiting: list[tuple[str, str]], tool: str | None) -> str | None:
    """The call a result is of: the first of that tool, else the first; it waits no longer."""
    found = next((each for each in waiting if each[1] == tool), waiting[0] if waiting else None)
    if found is None:
        return None
    waiting.remove(found)
    return found[0]


def _no_images(images: list[Any] | None, path: str) -> None:
    if images:
        raise InvalidRequest(
            f"'{path}' contains images; localspec's models read text only.", param=path
        )
