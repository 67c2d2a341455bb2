"""Translate HTTP requests into frames: the one place where field names of both sides meet."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

import msgspec

from localspec.chat import tools
from localspec.chat.markers import REASONING_TOKENS
from localspec.chat.notations.call_readers import replace_halves
from localspec.chat.tools import read_constraint
from localspec.daemon.completion.files import PictureReader
from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.calls import EXPLAINED, CallFormat
from localspec.protocol.dialect import REASONING_MARKERS
from localspec.protocol.frames import Message, ThinkingLimit
from localspec.protocol.reading import BodyComplexity, TooComplex
from localspec.protocol.requests import (
    MAX_PROMPTS,
    TEMPLATE_SWITCHES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    GenerationRequest,
    OnePrompt,
    PromptObject,
    Prompts,
    SamplingParameters,
    SpeculativeOptions,
    TemplateRequest,
)

# Figures for a bill and a checksum of the request, which are of no use to a model.
_BILLING_HEADER = re.compile(r"\s*x-[a-z0-9-]*billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)
# A line that contains the current date or time and nothing else.
_DATE_LINE = re.compile(
    r"\s*(?:the )?(?:(?:current|local|system) (?:date|time)|today(?:'s date| is))\b"
    r"(?=[^\n]*\d)(?![^\n]*[.!?][ \t]+[a-z])[^\n]{0,100}(?:\n|\Z)",
    re.IGNORECASE,
)
# Such lines are looked for in this part of the instructions: a text of blanks alone would take seconds.
_MAX_HEADER_CHARS = 1 << 14


def stabilize_instructions(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a stable beginning: without billing headers, and with dates moved to the end.

    Agents put such lines before their instructions, and change them with every request. Everything behind a
    changed line has to be prefilled again, and here that would be the whole prompt. Only the instructions at
    the beginning of the conversation are changed.
    """
    instructions: list[Message] = []
    for index, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return [*instructions, *messages[index:]]
        text = _move_dates(message.content or "")
        if text == (message.content or ""):
            instructions.append(message)
        elif text:
            instructions.append(msgspec.structs.replace(message, content=text))
    return instructions or list(messages)


def _move_dates(text: str) -> str:
    dates: list[str] = []
    head = text[:_MAX_HEADER_CHARS]
    if len(text) > len(head):
        head = head[: head.rfind("\n") + 1]  # whole lines
    at = 0
    while match := _BILLING_HEADER.match(head, at) or _DATE_LINE.match(head, at):
        if match.re is _DATE_LINE:
            dates.append(match[0].strip())
        at = match.end()
    text = text[at:]
    return "\n\n".join([text.rstrip(), *dates]).lstrip() if dates else text


# Thinking tokens for each effort if the request has no budget, as in other servers.
_EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


def thinking_limit(request: ChatRequest, max_tokens: int | None) -> ThinkingLimit | None:
    """Return where the engine ends the reasoning; None if there is no budget or the answer ends before it.

    `max_tokens` is the maximum number of tokens in the answer, including reasoning.
    """
    budget = _budget(request)
    if budget is None or budget < 0 or (max_tokens is not None and budget >= max_tokens > 0):
        return None
    return ThinkingLimit(budget, list(REASONING_MARKERS))


def template_switches(request: ChatRequest | TemplateRequest) -> dict[str, Any]:
    """Return the template's own switches; families have different names for them and ignore unknown ones."""
    budget, effort = _budget(request), request.reasoning_effort
    if budget is None and effort is None:
        return {}
    enabled = budget != 0
    effort_switch = {"reasoning_effort": effort} if effort and enabled else {}
    return {**dict.fromkeys(TEMPLATE_SWITCHES, enabled), **effort_switch}


def _budget(request: ChatRequest | TemplateRequest) -> int | None:
    if request.reasoning_budget_tokens is not None:
        return request.reasoning_budget_tokens
    return _EFFORT_TOKENS.get(request.reasoning_effort or "")


_SEED_COUNT = (1 << 32) - 1  # llama.cpp's highest seed of 32 bits means "draw a random seed"
PREFIX_SEPARATOR = "\n\n"  # between the parts of a message that is continued, as in llama-server

_Request = TypeVar("_Request", bound=GenerationRequest)


def translate_request(kind: type[_Request], *sources: msgspec.Struct, **fields: Any) -> _Request:
    """Return a request of our own API for one of another protocol.

    It gets each field of `GenerationRequest` that a source has under the same name. `fields` are those that
    the protocol names or means differently, and they win.
    """
    shared = {
        name: getattr(source, name)
        for source in sources
        for name in GenerationRequest.__struct_fields__
        if name in source.__struct_fields__
    }
    return kind(**{**shared, **fields})


def chat_frames(
    request: ChatRequest, form: CallFormat = EXPLAINED, conversation: str | None = None
) -> list[frames.Generate]:
    """Return one engine request per choice.

    `form` is the model's notation of calls, which matters only with tools. The first choice is the one that
    is stored in `conversation`. Raises InvalidRequest if fields contradict each other.
    """
    top_logprobs = request.top_logprobs
    if top_logprobs and not request.logprobs:
        raise InvalidRequest.at("top_logprobs", "needs 'logprobs': true.")
    prompt, offer = chat_prompt(request), tools.NO_OFFER
    reasoning = request.reasoning_format != "none"
    shown = REASONING_TOKENS if reasoning else []
    if uses_tools(request):
        offer = tools.offer_tools(request, form)
        prompt.tools = offer.tools or None
        _put_tools_into_messages(prompt, request, offer.form)
    calls = offer.calls
    required = calls is not None and calls.required
    if required and (own := read_constraint(request)) and own.kind in ("grammar", "regex"):
        raise InvalidRequest.at(
            "tool_choice", "requires a call, so no grammar of your own can be held to."
        )
    if offer.tools:
        shown = [*shown, *tools.control_tokens(offer.form)]
    requests = engine_requests(
        request,
        [prompt],
        (top_logprobs or 0) if request.logprobs else None,
        shown=shown,
        thinking=thinking_limit(request, max_tokens(request)),
        tools=calls,
        thoughts=list(REASONING_MARKERS) if reasoning else [],
    )
    requests[0].conversation = conversation
    return requests


def template_prompt(request: TemplateRequest, form: CallFormat) -> frames.ChatPrompt:
    """Return the prompt that /apply-template shows: what a chat with these fields would read."""
    prompt = chat_prompt(request)
    _put_tools_into_messages(prompt, request, form)
    return prompt


def _put_tools_into_messages(
    prompt: frames.ChatPrompt, request: ChatRequest | TemplateRequest, form: CallFormat
) -> None:
    """Put the tools into the messages if the template does not support tools."""
    if form.told and uses_tools(request):
        prompt.messages = tools.explain_tools(prompt.messages, prompt.tools or [])
        prompt.tools = None


def uses_tools(request: ChatRequest | TemplateRequest) -> bool:
    """Return whether tools are offered, or were called earlier in the conversation."""
    return bool(request.tools) or any(
        message.role == "tool" or message.tool_calls for message in request.messages
    )


def completion_frames(request: CompletionRequest) -> list[frames.Generate]:
    """Return one engine request per prompt and choice; all choices of the first prompt come first."""
    scores = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        scores = max(request.logprobs, scores or 0)
    if scores is not None and request.suffix is not None:
        message = "Log-probabilities of a prompt cannot be computed with a 'suffix'."
        raise InvalidRequest(message, param="suffix")
    if (request.best_of or 1) > (request.n or 1):
        raise InvalidRequest.at(
            "best_of", "must not be greater than 'n'; every choice is returned."
        )
    all_prompts = parse_prompts(request.prompt, request.suffix)
    return engine_requests(request, all_prompts, request.logprobs, prompt_logprobs=scores)


def chat_prompt(request: ChatRequest | TemplateRequest) -> frames.ChatPrompt:
    """Return the messages as the model's template reads them. Raises InvalidRequest for an invalid one."""
    inner = BodyComplexity()  # limits the size of JSON inside of strings
    pictures = PictureReader()
    messages = [
        _message(message, index, inner, pictures) for index, message in enumerate(request.messages)
    ]
    part, prefix = continued_part(request), ""
    if part == "content":
        path, content = f"messages[{len(messages) - 1}].content", request.messages[-1].content
        prefix = content_text(content or "", path, "assistant", between=PREFIX_SEPARATOR)
    elif part:
        prefix = messages[-1].extra["reasoning_content"]
    documents = {} if request.documents is None else {"documents": request.documents}
    return frames.ChatPrompt(
        stabilize_instructions(messages),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=[tool.template_object() for tool in request.tools or []] or None,
        template_kwargs={
            **template_switches(request),
            **documents,
            **request.chat_template_kwargs,
        },
        answer_prefix=prefix,
        continued=part,
        parse_special=request.parse_special,
        pictures=pictures.files,
        picture_mark=pictures.mark if pictures.files else "",
    )


def continued_part(
    request: ChatRequest | TemplateRequest,
) -> Literal["", "content", "reasoning_content"]:
    """Return which part of the last message the answer continues, by llama-server's rules."""
    if not request.messages:
        raise InvalidRequest.at("messages", "must have at least 1 item.")
    option, last = request.continue_final_message, request.messages[-1]
    if option is False or (option is None and last.role != "assistant"):
        return ""
    is_double = len(request.messages) > 1 and request.messages[-2].role == "assistant"
    part: Literal["content", "reasoning_content"] = "content"
    if isinstance(option, str):
        part = option
    elif last.reasoning_content and not last.content:
        part = "reasoning_content"
    problem = ""
    if option and request.add_generation_prompt:
        problem = "'add_generation_prompt' and 'continue_final_message' cannot be used together."
    elif last.role != "assistant":
        problem = "The last message cannot be continued: its role is "
        problem += f"'{last.role}', not 'assistant'."
    elif last.tool_calls:
        problem = "The last message, of the role 'assistant', cannot be continued: it contains "
        problem += "'tool_calls', whose results must follow."
    elif option is None and is_double:
        problem = "Two messages of the role 'assistant' at the end cannot be continued; join them."
    elif part == "reasoning_content" and not last.reasoning_content:
        problem = "The last message has no 'reasoning_content' to continue."
    if problem:
        raise InvalidRequest(problem, param="continue_final_message" if option else "messages")
    return part


def begin_question(request: frames.Generate) -> frames.Generate:
    """Return a request that reads a chat up to the end of its last message, which is still being written."""
    assert isinstance(request.prompt, frames.ChatPrompt)
    begun = request.prompt.messages[-1].content or ""
    prompt = msgspec.structs.replace(request.prompt, continued="content", answer_prefix=begun)
    return msgspec.structs.replace(request, prompt=prompt, priority="ahead", max_tokens=0)


def continue_constraint(requests: list[frames.Generate], beginning: str) -> None:
    """Apply the constraint to the whole answer, whose beginning `beginning` is already written."""
    for generate in requests:
        if generate.constraint is not None:
            generate.constraint = msgspec.structs.replace(generate.constraint, begun=beginning)


def engine_requests(
    request: GenerationRequest,
    prompts: Sequence[frames.Prompt],
    top_logprobs: int | None,
    **more: Any,
) -> list[frames.Generate]:
    """Return one engine request per prompt and choice; `more` are further fields of all of them.

    Raises:
        InvalidRequest: the request has two constraints, a bias for something else than a token, or a
            prediction that is not text.
    """
    _refuse_unsupported(request)
    minimum, maximum = request.min_tokens or 0, max_tokens(request)
    if maximum is not None and minimum > maximum:
        raise InvalidRequest.at(
            "min_tokens", f"is {minimum}, but the answer may have at most {maximum} tokens."
        )
    private = request.localspec is not None and request.localspec.private
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    shared: dict[str, Any] = {
        **more,
        "max_tokens": maximum,
        "min_tokens": minimum,
        "stop_token_ids": request.stop_token_ids or [],
        "stop": [text for text in stop if text],  # "" would end the answer at once
        "constraint": read_constraint(request),
        "speculative": _speculative(request),
        "top_logprobs": top_logprobs,
        "post_sampling": request.post_sampling_probs,
        "exact": request.exact,
        "loop_guard": request.loop_guard,
        "cache_prompt": request.cache_prompt,
        "n_cache_reuse": request.n_cache_reuse,
        "private": private,
        "read_ahead": not private and not is_on_battery(),
        "reveal_draft": request.reveal_draft,
        "timings": request.timings_per_token,
        "progress": request.return_progress,
    }
    return [
        frames.Generate(id=0, prompt=prompt, sampling=_sampling(request, choice), **shared)
        for prompt in prompts
        for choice in range(request.n or 1)
    ]


def _refuse_unsupported(request: GenerationRequest) -> None:
    # Mirostat and adaptive-p depend on every token that was drawn before. Drafted tokens are verified
    # together, before any of them is drawn.
    is_adaptive = request.adaptive_target is not None and request.adaptive_target >= 0.0
    unsupported = {
        "mirostat": request.mirostat,
        "adaptive_target": is_adaptive,
        "lora": request.lora,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise InvalidRequest.at(name, "is not supported; leave it out.")


def is_on_battery() -> bool:
    """Whether the machine runs on its battery, as of this minute."""
    return _is_on_battery(int(time.monotonic() // 60))


@lru_cache(1)
def _is_on_battery(_minute: int) -> bool:
    """Whether the machine runs on its battery, asked once a minute."""
    from localspec.machine import Host, is_on_battery

    return is_on_battery(Host.current())


def _sampling(request: GenerationRequest, choice: int) -> frames.Sampling:
    """Return the sampling fields; each choice has a seed of its own, or all would be equal.

    In biases a number or a string of digits is a token's id, and any other string is text. Those of the same
    token or text add up.
    """
    fields = {name: getattr(request, name) for name in SamplingParameters.__struct_fields__}
    if (seed := request.seed) is not None:
        fields["seed"] = None if seed == -1 else (seed + choice) % _SEED_COUNT
    sampling = frames.Sampling(**fields, ignore_eos=request.ignore_eos)
    biases = request.logit_bias or {}
    for key, value in biases.items() if isinstance(biases, dict) else biases:
        if value is True:
            path = f"logit_bias[{json.dumps(key)}]"
            raise InvalidRequest.at(path, "must be a number or false, not true.")
        amount = -math.inf if value is False else value
        if isinstance(key, str) and not (key.isascii() and key.isdigit() and len(key) < 10):
            sampling.text_bias[key] = sampling.text_bias.get(key, 0.0) + amount
        else:
            token = int(key)
            sampling.logit_bias[token] = sampling.logit_bias.get(token, 0.0) + amount
    return sampling


def max_tokens(request: GenerationRequest) -> int | None:
    """Return the maximum number of tokens of the answer; None if it has no limit."""
    for value in (request.max_completion_tokens, request.max_tokens, request.n_predict):
        if value is not None:
            return None if value < 0 else value
    return None


def _speculative(request: GenerationRequest) -> frames.SpeculationSettings:
    options, prediction = request.speculative or SpeculativeOptions(), None
    if request.prediction:
        prediction = content_text(request.prediction.content, "prediction.content")
    return frames.SpeculationSettings(
        enabled=options.enabled,
        depth=None if options.depth == "auto" else options.depth,
        kind=options.kind,
        verification=options.verification,
        prediction=prediction,
    )


def _message(
    message: ChatMessage, index: int, inner: BodyComplexity, pictures: PictureReader
) -> frames.Message:
    extra = {
        name: value
        for name in ("name", "tool_call_id", "reasoning_content")
        if (value := getattr(message, name)) is not None
    }
    if message.tool_calls:
        extra["tool_calls"] = [_template_call(call, index, inner) for call in message.tool_calls]
    # "developer" is OpenAI's newer name of this role; templates know only the older one.
    role = "system" if message.role == "developer" else message.role
    content, path = message.content, f"messages[{index}].content"
    if content is not None:
        content = content_text(content, path, message.role, read_picture=pictures.read)
    elif message.lacks_content and not (message.tool_calls or message.reasoning_content):
        raise InvalidRequest.at(path, "is missing.")
    elif not (message.tool_calls or message.reasoning_content or message.role == "tool"):
        raise InvalidRequest.at(path, "is null; it must be a string or a list of parts.")
    if content is None and not message.tool_calls:
        content = ""  # templates read the text without checking that there is one
    return frames.Message(role, content, extra)


def _template_call(call: dict[str, Any], index: int, inner: BodyComplexity) -> dict[str, Any]:
    """Return an earlier call as templates expect it: the arguments as an object instead of JSON text."""
    function, path = call.get("function"), f"messages[{index}].tool_calls"
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest.at(path, "must contain calls with a 'function' and its name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            inner.count_text(arguments.encode())
        except TooComplex as error:
            raise InvalidRequest(str(error), param=path) from None
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(replace_halves(arguments))
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def content_text(
    content: str | list[ContentPart],
    path: str,
    role: str = "",
    between: str = "\n",
    read_picture: Callable[[ContentPart, str], str] | None = None,
) -> str:
    """Return multi-part content as one text, one line per part as in llama-server.

    A refusal of the assistant, which is a part of its own in OpenAI's format, is text of its message.
    read_picture: returns what stands for a picture, from its part and its path. There are no new lines around
    it. None: there may be no pictures.

    Raises:
        InvalidRequest: a part is neither text nor a picture that can be read.
    """
    if isinstance(content, str):
        return content
    text, is_after_picture = "", False
    for index, part in enumerate(content):
        if read_picture is not None and part.type == "image_url":
            text += read_picture(part, f"{path}[{index}]")
            is_after_picture = True
            continue
        part_text = part.refusal if part.type == "refusal" and role == "assistant" else None
        part_text = part.text if part.type == "text" else part_text
        if part_text is None:
            other = "" if read_picture is None else ', or of type "image_url" or "file"'
            raise InvalidRequest(
                f"'{path}[{index}]' must be a part of type \"text\" with a 'text'{other}; this model accepts "
                "nothing else.",
                param=f"{path}[{index}].type",
            )
        text += between + part_text if text and not is_after_picture else part_text
        is_after_picture = False
    return text


def parse_prompts(prompt: Prompts, suffix: str | None = None) -> list[frames.Prompt]:
    """Return all prompts of `prompt`, which has any of OpenAI's and llama-server's forms."""
    if not isinstance(prompt, list):
        return [_one_prompt(prompt, "prompt", suffix)]
    # Fast even for a million ids, since no other request is served in the meantime.
    kinds = set(map(type, prompt))
    if int in kinds:
        if not kinds <= {int, str}:
            problem = "mixes token ids with whole prompts; put the ids into a list of their own."
            raise InvalidRequest.at("prompt", problem)
        return [_one_prompt(cast(list[str | int], prompt), "prompt", suffix)]
    if len(prompt) > MAX_PROMPTS:
        problem = f"may contain at most {MAX_PROMPTS} prompts, not {len(prompt)}."
        raise InvalidRequest.at("prompt", problem)
    items = cast(list[OnePrompt], prompt)
    return [_one_prompt(item, f"prompt[{index}]", suffix) for index, item in enumerate(items)]


def _one_prompt(item: OnePrompt, path: str, suffix: str | None) -> frames.Prompt:
    if isinstance(item, PromptObject):
        if item.multimodal_data:
            problem = "is not supported: the models here read text only."
            raise InvalidRequest.at(f"{path}.multimodal_data", problem)
        return _one_prompt(item.prompt_string, f"{path}.prompt_string", suffix)
    if isinstance(item, str):
        return frames.TextPrompt(item) if suffix is None else frames.InfillPrompt(item, suffix)
    is_ids_only = set(map(type, item)) == {int}
    ids = cast(list[int], item if is_ids_only else [part for part in item if isinstance(part, int)])
    if not item or (ids and (min(ids) < 0 or max(ids) >= 1 << 31)):
        raise InvalidRequest.at(path, "must contain token ids, which are whole numbers from 0.")
    if suffix is not None:
        raise InvalidRequest.at("suffix", "needs a 'prompt' of text.")
    return frames.TokenPrompt(ids) if is_ids_only else frames.MixedPrompt(item)
