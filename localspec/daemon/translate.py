"""From HTTP requests to frames: the one place where field names of the two worlds meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.http import (
    MAX_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    GenerationRequest,
    SpeculativeOptions,
    TemplateRequest,
)

# llama.cpp's seeds are 32 bits wide, and the highest one means "draw one".
_SEEDS = (1 << 32) - 1
# Names that are the same on both sides.
_SAMPLING = tuple(
    field for field in frames.Sampling.__struct_fields__ if field not in ("seed", "logit_bias")
)


def chat(request: ChatRequest) -> list[frames.Generate]:
    """One Generate per choice.

    Raises:
        InvalidRequest: fields that are right alone and wrong together.
    """
    top = request.top_logprobs
    if top and not request.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    prompt = chat_prompt(request)
    return choices(request, [prompt], (top or 0) if request.logprobs else None)


def completion(request: CompletionRequest) -> list[frames.Generate]:
    """One Generate per prompt and choice; all choices of the first prompt come first."""
    return choices(request, prompts(request.prompt, request.suffix), request.logprobs)


def chat_prompt(request: ChatRequest | TemplateRequest) -> frames.ChatPrompt:
    messages = [_message(message, index) for index, message in enumerate(request.messages)]
    return frames.ChatPrompt(messages, template_kwargs=request.chat_template_kwargs)


def choices(
    request: GenerationRequest,
    prompts: Sequence[frames.Prompt],
    top_logprobs: int | None,
    **more: Any,
) -> list[frames.Generate]:
    """One Generate per prompt and choice; `more` are further fields of all of them."""
    shared: dict[str, Any] = {
        **more,
        "max_tokens": max_tokens(request),
        "stop": [request.stop] if isinstance(request.stop, str) else list(request.stop or []),
        "constraint": _constraint(request),
        "speculative": _speculative(request),
        "top_logprobs": top_logprobs,
        "exact": request.exact,
        "cache_prompt": request.cache_prompt,
        "reveal_draft": request.reveal_draft,
    }
    shared["stop"] = [text for text in shared["stop"] if text]  # "" would stop at once
    return [
        frames.Generate(id=0, prompt=prompt, sampling=_sampling(request, choice), **shared)
        for prompt in prompts
        for choice in range(request.n or 1)
    ]


def _sampling(request: GenerationRequest, choice: int) -> frames.Sampling:
    """The sampling fields; later choices get seeds of their own, or all would be equal."""
    seed = request.seed
    if seed is not None:
        seed = None if seed == -1 else (seed + choice) % _SEEDS
    bias = {_token(key): value for key, value in (request.logit_bias or {}).items()}
    same = {name: getattr(request, name) for name in _SAMPLING}
    return frames.Sampling(seed=seed, logit_bias=bias, **same)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise InvalidRequest(
            f"'logit_bias': the keys are token ids, not {key[:40]!r}.", param="logit_bias"
        )
    return int(key)


def max_tokens(request: GenerationRequest) -> int | None:
    for value in (request.max_completion_tokens, request.max_tokens, request.n_predict):
        if value is not None:
            return None if value < 0 else value
    return None


def _constraint(request: GenerationRequest) -> frames.Constraint | None:
    found: list[tuple[str, frames.Constraint]] = []
    wanted = request.response_format
    if wanted and wanted.type == "json_object" and wanted.schema is None:
        found.append(("response_format", frames.Constraint("json_object")))
    elif wanted and wanted.type != "text":
        schema = wanted.json_schema.schema if wanted.json_schema else wanted.schema
        if schema is None:
            raise InvalidRequest(
                "'response_format.json_schema' is missing.", param="response_format.json_schema"
            )
        found.append(("response_format", _schema(schema)))
    if request.json_schema is not None:
        found.append(("json_schema", _schema(request.json_schema)))
    if request.grammar:
        found.append(("grammar", frames.Constraint("grammar", request.grammar)))
    if request.regex:
        found.append(("regex", frames.Constraint("regex", request.regex)))
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise InvalidRequest(f"{names} exclude each other.", param=found[1][0])
    return found[0][1] if found else None


def _schema(schema: dict[str, Any]) -> frames.Constraint:
    return frames.Constraint("json_schema", msgspec.json.encode(schema).decode())


def _speculative(request: GenerationRequest) -> frames.Speculative:
    wanted = request.speculative or SpeculativeOptions()
    prediction = None
    if request.prediction:
        prediction = _text(request.prediction.content, "prediction.content")
    return frames.Speculative(
        enabled=wanted.enabled,
        depth=None if wanted.depth == "auto" else wanted.depth,
        kind=wanted.kind,
        verification=wanted.verification,
        prediction=prediction,
    )


def _message(message: ChatMessage, index: int) -> frames.Message:
    extra = {
        name: value
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content")
        if (value := getattr(message, name)) is not None
    }
    # OpenAI's newer name for the same thing; the models' templates know the old one.
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is not None:
        content = _text(content, f"messages[{index}].content")
    elif not message.tool_calls:
        raise InvalidRequest(
            f"'messages[{index}].content' is missing.", param=f"messages[{index}].content"
        )
    return frames.Message(role, content, extra)


def _text(content: str | list[ContentPart], path: str) -> str:
    """Multi-part content as one text; a part that is no text is refused."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"'{path}[{index}]' must be a part of type \"text\" with a 'text'; "
                "this model reads nothing else.",
                param=f"{path}[{index}].type",
            )
        texts.append(part.text)
    return "".join(texts)


def prompts(
    prompt: str | list[str | int | list[int]], suffix: str | None = None
) -> list[frames.Prompt]:
    """OpenAI's `prompt` in all its forms."""
    if isinstance(prompt, str):
        return [_text_prompt(prompt, suffix)]
    if all(isinstance(item, int) for item in prompt):
        prompt = [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"'prompt' may hold at most {MAX_PROMPTS} prompts, not {len(prompt)}.", param="prompt"
        )
    return [_one_prompt(item, index, suffix) for index, item in enumerate(prompt)]


def _one_prompt(item: str | int | list[int], index: int, suffix: str | None) -> frames.Prompt:
    if isinstance(item, str):
        return _text_prompt(item, suffix)
    if isinstance(item, int):
        raise InvalidRequest("'prompt' mixes token ids with other prompts.", param="prompt")
    if not item or min(item) < 0 or max(item) >= 1 << 31:
        raise InvalidRequest(
            f"'prompt[{index}]' must hold token ids, whole numbers from 0.",
            param=f"prompt[{index}]",
        )
    if suffix is not None:
        raise InvalidRequest("'suffix' needs a 'prompt' of text.", param="suffix")
    return frames.TokenPrompt(item)


def _text_prompt(text: str, suffix: str | None) -> frames.Prompt:
    if suffix is None:
        return frames.TextPrompt(text)
    return frames.InfillPrompt(text, suffix)
