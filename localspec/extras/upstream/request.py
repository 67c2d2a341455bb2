"""Convert a `Generate` to a body in OpenAI's shape, for one kind of server.

A field that the server does not know and that would change the answer is refused by its name. A field that
only shifts probabilities is left out, and a note with the answer says so. A hint that changes no text (use of
the cache, depth of drafts) is sent to the servers that know it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from localspec.chat.reader import AnswerReader, PlainReader
from localspec.errors import InvalidRequest
from localspec.extras.upstream.connection import MAX_ANSWER_BYTES, MAX_LINE_BYTES
from localspec.extras.upstream.dialects import Body, ServerDialect
from localspec.protocol import frames
from localspec.protocol.calls import ToolSet
from localspec.protocol.requests import sampling_parameters

Api = Literal["chat", "text", "native"]  # OpenAI's two APIs, and llama-server's own


@dataclass(slots=True)
class UpstreamRequest:
    """A request as it is sent. A path that begins with a slash is relative to the server's root.

    left_out: the fields that the server does not know.
    tops: how many of the likeliest tokens to return for each token; the server may be asked for more.
    only_read: the prompt is only read ahead; any text that the server writes is dropped.
    endless: the answer should have no limit, but the server has no field to say so.
    reader: reads what the server has not separated from the text.
    """

    api: Api
    path: str
    body: Body
    left_out: list[str] = field(default_factory=list)
    tops: int = 0
    only_read: bool = False
    endless: bool = False
    reader: AnswerReader | PlainReader = field(default_factory=PlainReader)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the answer may have, or None."""
        limit: int | None = self.body.get("n_predict", self.body.get("max_tokens"))
        return limit

    @property
    def max_bytes(self) -> int:
        """The most bytes that the stream of such an answer may have: four times the expected size.

        With log-probabilities each event is longer, by the size of the alternatives for each token.
        """
        event_bytes = 512 + 256 * self.tops
        max_bytes = MAX_ANSWER_BYTES * event_bytes // 512
        if self.max_tokens is None:
            return max_bytes
        return min(MAX_LINE_BYTES + 4 * event_bytes * self.max_tokens, max_bytes)

    @property
    def max_characters(self) -> int:
        """The most characters that the text of such an answer may have.

        The longest tokens of vocabularies have 128 to 256 characters.
        """
        return MAX_ANSWER_BYTES if self.max_tokens is None else (1 << 16) + 256 * self.max_tokens

    @property
    def note(self) -> str:
        """A note for the person on fields that were left out."""
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(self.left_out))
        left_out = f"The server does not know {names}; left out." if names else ""
        ending = "Without 'max_tokens' the server ends a text where it likes." * self.endless
        return f"{left_out} {ending}".strip()


def build_request(
    request: frames.Generate, dialect: ServerDialect, model: str, weights: str = ""
) -> UpstreamRequest:
    """Build the request for a server of this kind.

    `model` is the name of the model on that server, `weights` the model that it was made from, if known.

    Raises:
        InvalidRequest: The server cannot honour a field. The error names it.
    """
    sent = _convert_prompt(request.prompt, dialect, [model, weights])
    sent.body |= {"model": model, "stream": True}
    sent.tops, sent.only_read = request.top_logprobs or 0, request.max_tokens == 0
    if sent.api != "native":
        sent.body["stream_options"] = {"include_usage": True}
    _add_limits_and_sampling(sent, request, dialect)
    if (constraint := request.constraint) is not None:
        name = constraint.param or constraint.kind
        allowed = dialect.constraints if sent.api == "chat" else dialect.text_constraints
        if constraint.kind not in allowed:
            raise unsupported_field(name, dialect)
        if constraint.begun:
            raise unsupported_field(
                name, dialect, "it cannot constrain an answer that is continued"
            )
        dialect.constrain(sent.body, constraint)
    if isinstance(request.prompt, frames.ChatPrompt):
        _add_tools(sent.body, request.prompt, request.tools, dialect)
        _add_template_options(sent, request, request.prompt, dialect)
    _add_logprobs(sent, request, dialect)
    _add_hints(sent, request, dialect)
    dialect.add_fields(sent.body, request)
    return sent


def unsupported_field(field: str, dialect: ServerDialect, reason: str = "") -> InvalidRequest:
    """Return the error that a server cannot do what a field requests."""
    return InvalidRequest(
        f"The {dialect.name} that serves this pair does not support '{field}'"
        f"{f': {reason}' if reason else ''}; leave it out, or use a local pair.",
        param=field,
    )


# The markers for infilling of model families, by the beginning of a model's name.
_INFILL_MARKERS = (
    (("qwen2.5-coder", "qwen3-coder", "codegemma", "codeqwen"),
     ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
    (("starcoder", "granite", "stable-code", "santacoder"),
     ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    (("codellama",), ("<PRE> ", " <SUF>", " <MID>")),
    (("deepseek-coder",), ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
)  # fmt: skip


def infill_markers(names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the infill markers of a model by its names, or None if its family is not known."""
    base_names = [name.rpartition("/")[2].lower() for name in names]
    for prefixes, markers in _INFILL_MARKERS:
        if any(name.startswith(prefixes) for name in base_names):
            return markers
    return None


def _convert_prompt(
    prompt: frames.Prompt, dialect: ServerDialect, names: list[str]
) -> UpstreamRequest:
    """Convert a prompt, for llama-server's own paths where there are some.

    These also return the stop text and token ids, and know the model's infill markers.
    """
    text: object
    left_out = []
    match prompt:
        case frames.ChatPrompt():
            if prompt.pictures:
                raise InvalidRequest(
                    "Pictures are not passed on to the server that serves this pair; leave them out, or "
                    "use a local pair.",
                    param="messages",
                )
            body: Body = {"messages": [_convert_message(message) for message in prompt.messages]}
            if prompt.continued and not dialect.continue_message(body, prompt.continued):
                raise unsupported_field("messages", dialect, "it cannot continue an answer")
            return UpstreamRequest("chat", "chat/completions", body)
        case frames.TextPrompt():
            text = prompt.text
        case frames.TokenPrompt():
            text = prompt.tokens
        case frames.MixedPrompt():
            if "mixed_prompts" not in dialect.known_fields:
                reason = "it accepts text or token ids, but not both"
                raise unsupported_field("prompt", dialect, reason)
            text = prompt.parts
        case frames.InfillPrompt() if dialect.has_native_api:
            body = {"input_prefix": prompt.prefix, "input_suffix": prompt.suffix}
            extra = [{"filename": name, "text": text} for name, text in prompt.extra]
            body |= {"prompt": prompt.prompt, "input_extra": extra}
            return UpstreamRequest("native", "/infill", body)
        case frames.InfillPrompt():
            if (markers := infill_markers(names)) is None:
                reason = f"the infill markers of '{names[0][:80]}' are not known"
                raise unsupported_field("input_suffix", dialect, reason)
            before, after, middle = markers
            text = f"{before}{prompt.prefix}{prompt.prompt}{after}{prompt.suffix}{middle}"
            left_out = ["input_extra"] if prompt.extra else []
    if dialect.has_native_api:
        return UpstreamRequest("native", "/completion", {"prompt": text})
    return UpstreamRequest("text", "completions", {"prompt": text}, left_out)


def _convert_message(message: frames.Message) -> Body:
    """Return a message whose calls have their arguments as JSON text, which is what servers expect."""
    body: Body = {"role": message.role, "content": message.content, **message.extra}
    calls = []
    for call in message.extra.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**call["function"], "arguments": arguments}
        calls.append({"type": "function", **call, "function": function})
    return body | {"tool_calls": calls} if calls else body


def _add_limits_and_sampling(
    sent: UpstreamRequest, request: frames.Generate, dialect: ServerDialect
) -> None:
    body, known, sampling = sent.body, dialect.known_fields, request.sampling
    if request.max_tokens is not None:
        body["n_predict" if sent.api == "native" else "max_tokens"] = request.max_tokens
    elif sent.api == "text":
        sent.endless = True
    if request.stop:
        body["stop"] = request.stop
    for name, value in (
        ("min_tokens", request.min_tokens),
        ("stop_token_ids", request.stop_token_ids),
        ("exact", request.exact),
        ("ignore_eos", sampling.ignore_eos),
    ):
        if value and name not in known:
            raise unsupported_field(name, dialect)
        if value:
            body[name] = value

    def add_known(name: str, value: object) -> None:
        if value is not None and name in known:
            body[name] = value
        elif value is not None:
            sent.left_out.append(name)

    add_known("t_max_predict_ms", request.max_predict_ms)
    add_known("n_indent", request.single_line_indent)
    add_known("loop_guard", request.loop_guard)
    for name, _, bounds in sampling_parameters():
        parameter = getattr(sampling, name)
        if parameter is not None and name in dialect.sampling:
            body[dialect.sampling[name]] = parameter
        elif parameter not in (None, bounds.off):
            sent.left_out.append(name)
    if sampling.infill:
        add_known("samplers", ["top_k", "typ_p", "top_p", "min_p", "infill"])
    if sampling.text_bias and not dialect.accepts_text_bias:
        raise unsupported_field("logit_bias", dialect, "it accepts token ids only")
    if biases := [*sampling.logit_bias.items(), *sampling.text_bias.items()]:
        if dialect.accepts_text_bias:
            body["logit_bias"] = [[key, bias != -math.inf and bias] for key, bias in biases]
        else:
            body["logit_bias"] = {str(token): max(bias, -100.0) for token, bias in biases}


def _add_tools(
    body: Body, prompt: frames.ChatPrompt, allowed: ToolSet | None, dialect: ServerDialect
) -> None:
    if not prompt.tools or allowed is None:
        return
    body["tools"] = prompt.tools
    if allowed.required:
        names = list(allowed.schemas)
        body["tool_choice"] = "required"
        if len(names) == 1 and dialect.can_require_named_tool:
            body["tool_choice"] = {"type": "function", "function": {"name": names[0]}}
        elif len(names) < len(prompt.tools):
            # Tools that may not be called must not be shown either.
            body["tools"] = [tool for tool in prompt.tools if tool["function"]["name"] in names]
    if not allowed.parallel:
        body["parallel_tool_calls"] = False


def _add_template_options(
    sent: UpstreamRequest,
    request: frames.Generate,
    prompt: frames.ChatPrompt,
    dialect: ServerDialect,
) -> None:
    options = prompt.template_kwargs
    if options and dialect.template_kwargs:
        sent.body["chat_template_kwargs"] = options
    elif options:
        if effort := options.get("reasoning_effort"):
            sent.body["reasoning_effort"] = effort
        if options.keys() - {"reasoning_effort", "enable_thinking", "thinking"}:
            raise unsupported_field("chat_template_kwargs", dialect)
        if options.get("enable_thinking") is False:
            sent.left_out.append("reasoning_effort")
    if not request.thoughts and "reasoning_format" in dialect.known_fields:
        sent.body["reasoning_format"] = "none"
    if request.thinking is not None and "thinking" not in dialect.known_fields:
        sent.left_out.append("reasoning_budget_tokens")
    if not prompt.add_generation_prompt and not prompt.continued:
        raise unsupported_field("add_generation_prompt", dialect)


def _add_logprobs(sent: UpstreamRequest, request: frames.Generate, dialect: ServerDialect) -> None:
    if request.post_sampling:
        raise InvalidRequest(
            "A pair that another server answers for does not support 'post_sampling_probs'.",
            param="post_sampling_probs",
        )
    if request.return_tokens and sent.api == "native":
        sent.body["return_tokens"] = True
    elif request.return_tokens and dialect.returns_token_ids:
        sent.body["return_token_ids"] = True
    elif request.return_tokens:
        sent.left_out.append("return_tokens")
    if request.prompt_logprobs is not None:
        raise unsupported_field("logprobs", dialect, "only local pairs compute those of a prompt")
    if request.top_logprobs is not None:
        # With zero alternatives llama-server returns no log-probabilities at all.
        tops = max(request.top_logprobs, 1) if dialect.has_native_api else request.top_logprobs
        sent.body |= {
            "chat": {"logprobs": True, "top_logprobs": tops},
            "text": {"logprobs": tops},
            "native": {"n_probs": tops},
        }[sent.api]


def _add_hints(sent: UpstreamRequest, request: frames.Generate, dialect: ServerDialect) -> None:
    """Add the fields that change no text."""
    known, prediction = dialect.known_fields, request.speculative.prediction
    if "cache_prompt" in known:
        sent.body["cache_prompt"] = request.cache_prompt
        if request.n_cache_reuse:
            sent.body["n_cache_reuse"] = request.n_cache_reuse
    if request.timings and dialect.has_native_api:
        sent.body["timings_per_token"] = True
    if prediction is not None and "prediction" in known:
        sent.body["prediction"] = {"type": "content", "content": prediction}
    speculative = msgspec.structs.replace(request.speculative, prediction=None)
    if speculative != frames.SpeculationSettings() and "speculative" not in known:
        sent.left_out.append("speculative")
