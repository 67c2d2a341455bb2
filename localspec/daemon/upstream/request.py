"""A `Generate` as a body of OpenAI's shape, for one kind of server.

What a server does not know, and would change what an answer is, is refused by the name of its field. What
only makes a likely answer more or less likely is left out, and the answer says so. What changes no text
(where the cache is, how deep drafts are) goes where it is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from localspec.daemon.upstream.connection import MAX_ANSWER_BYTES, MAX_LINE
from localspec.daemon.upstream.dialects.base import Body, Dialect
from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.calls import Tools
from localspec.protocol.sampling import parameters

Api = Literal["chat", "text", "native"]  # OpenAI's two, and llama-server's own


@dataclass(slots=True)
class Asked:
    """What is sent. A path that begins with a slash is of the server's root. `left_out`: the fields.

    tops: how many likeliest tokens are wanted beside each; a server may be asked for more. only_read: no
    text is wanted, though a server may write some. endless: it should have no limit, which cannot be said.
    """

    api: Api
    path: str
    body: Body
    left_out: list[str] = field(default_factory=list)
    tops: int = 0
    only_read: bool = False
    endless: bool = False

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the answer may have, if that is limited."""
        limit: int | None = self.body.get("n_predict", self.body.get("max_tokens"))
        return limit

    @property
    def most_bytes(self) -> int:
        """Bytes of a stream that holds such an answer, four times over.

        Log-probabilities make each event longer by what each token beside it takes.
        """
        event = 512 + 256 * self.tops
        most = MAX_ANSWER_BYTES * event // 512
        if self.max_tokens is None:
            return most
        return min(MAX_LINE + 4 * event * self.max_tokens, most)

    @property
    def most_characters(self) -> int:
        """Characters of such an answer's text; the longest tokens of vocabularies have 128 to 256."""
        if self.max_tokens is None:
            return MAX_ANSWER_BYTES
        return (1 << 16) + 256 * self.max_tokens

    @property
    def note(self) -> str:
        """What a person should know of it."""
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(self.left_out))
        left_out = f"The server does not know {names}; left out." if names else ""
        ends = "Without 'max_tokens' the server ends a text where it likes." * self.endless
        return f"{left_out} {ends}".strip()


def asked(request: frames.Generate, dialect: Dialect, model: str, weights: str = "") -> Asked:
    """What a server of this kind is sent. model: its name there, `weights`: what it is made of, if known.

    Raises:
        InvalidRequest: a field that it cannot hold to, by its name.
    """
    found = _prompted(request.prompt, dialect, [model, weights])
    found.body |= {"model": model, "stream": True}
    found.tops, found.only_read = request.top_logprobs or 0, request.max_tokens == 0
    if found.api != "native":
        found.body["stream_options"] = {"include_usage": True}
    _limited(found, request, dialect)
    _sampled(found, request.sampling, dialect)
    _biased(found.body, request.sampling, dialect)
    if request.constraint is not None:
        _constrained(found, request.constraint, dialect)
    if isinstance(request.prompt, frames.ChatPrompt):
        _with_tools(found.body, request.prompt, request.tools, dialect)
        _with_template(found, request, request.prompt, dialect)
    _probable(found, request, dialect)
    _hinted(found, request, dialect)
    dialect.more(found.body, request)
    return found


def refusal(field: str, dialect: Dialect, why: str = "") -> InvalidRequest:
    """That a server cannot do what a field asks for."""
    return InvalidRequest(
        f"'{field}' cannot be held to by the {dialect.name} that serves this pair"
        f"{f': {why}' if why else ''}; leave it out, or use a local pair.",
        param=field,
    )


# ------------------------------------------------------------------------ what is answered


def _prompted(prompt: frames.Prompt, dialect: Dialect, names: list[str]) -> Asked:
    match prompt:
        case frames.ChatPrompt():
            body: Body = {"messages": [_message(each) for each in prompt.messages]}
            part = prompt.continued
            if part and not dialect.goes_on(body, part):
                raise refusal("messages", dialect, "it starts no answer in the middle")
            return Asked("chat", "chat/completions", body)
        case frames.TextPrompt():
            return _text(prompt.text, dialect)
        case frames.TokenPrompt():
            return _text(prompt.tokens, dialect)
        case frames.MixedPrompt():
            if "mixed_prompts" not in dialect.known:
                raise refusal("prompt", dialect, "it takes text or token ids, and not both")
            return _text(prompt.parts, dialect)
        case frames.InfillPrompt():
            return _infill(prompt, dialect, names)


def _text(prompt: object, dialect: Dialect) -> Asked:
    """By llama-server's own path where there is one: it says which stop text came, and tokens' ids."""
    if dialect.native:
        return Asked("native", "/completion", {"prompt": prompt})
    return Asked("text", "completions", {"prompt": prompt})


def _message(message: frames.Message) -> Body:
    said: Body = {"role": message.role, "content": message.content, **message.extra}
    if calls := message.extra.get("tool_calls"):
        said["tool_calls"] = [_called(call) for call in calls]
    return said


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """An earlier call with its arguments as their JSON, as servers want it."""
    function = call["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": text}}


# How families write what is to be filled in: by the beginning of a model's name.
_MIDDLES = (
    (("qwen2.5-coder", "qwen3-coder", "codegemma", "codeqwen"),
     ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
    (("starcoder", "granite", "stable-code", "santacoder"),
     ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    (("codellama",), ("<PRE> ", " <SUF>", " <MID>")),
    (("deepseek-coder",), ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
)  # fmt: skip


def fills_in(names: Sequence[str]) -> tuple[str, str, str] | None:
    """The markers of a model by what it is called."""
    last = [name.rpartition("/")[2].lower() for name in names]
    found = (marks for starts, marks in _MIDDLES if any(each.startswith(starts) for each in last))
    return next(found, None)


def _infill(prompt: frames.InfillPrompt, dialect: Dialect, names: list[str]) -> Asked:
    """By the server itself, else with its model's markers."""
    if dialect.native:
        body = {"input_prefix": prompt.prefix, "input_suffix": prompt.suffix}
        extra = [{"filename": name, "text": text} for name, text in prompt.extra]
        return Asked("native", "/infill", {**body, "prompt": prompt.prompt, "input_extra": extra})
    marks = fills_in(names)
    if marks is None:
        raise refusal("input_suffix", dialect, f"how '{names[0][:80]}' fills in is not known")
    before, after, middle = marks
    text = f"{before}{prompt.prefix}{prompt.prompt}{after}{prompt.suffix}{middle}"
    return Asked("text", "completions", {"prompt": text}, ["input_extra"] if prompt.extra else [])


# ------------------------------------------------------------------------ how


def _limited(found: Asked, request: frames.Generate, dialect: Dialect) -> None:
    if request.max_tokens is not None:
        name = "n_predict" if found.api == "native" else "max_tokens"
        found.body[name] = request.max_tokens
    elif found.api == "text":
        found.endless = True
    if request.stop:
        found.body["stop"] = request.stop
    for name in ("min_tokens", "stop_token_ids"):
        if bound := getattr(request, name):
            if name not in dialect.known:
                raise refusal(name, dialect)
            found.body[name] = bound
    ours = (
        ("t_max_predict_ms", request.max_predict_ms),
        ("n_indent", request.single_line_indent),
    )
    for name, value in ours:
        if value is not None and name in dialect.known:
            found.body[name] = value
        elif value is not None:
            found.left_out.append(name)
    if request.exact and "exact" not in dialect.known:
        raise refusal("exact", dialect)


def _sampled(found: Asked, sampling: frames.Sampling, dialect: Dialect) -> None:
    for name, _, also in parameters():
        value = getattr(sampling, name)
        if value is None:
            continue
        if name in dialect.sampling:
            found.body[dialect.sampling[name]] = value
        elif value != also.off:
            found.left_out.append(name)
    if sampling.infill and "samplers" in dialect.known:
        named = ["top_k", "typ_p", "top_p", "min_p", "infill"]
        found.body["samplers"] = named
    elif sampling.infill:
        found.left_out.append("samplers")
    if sampling.ignore_eos:
        if "ignore_eos" not in dialect.known:
            raise refusal("ignore_eos", dialect)
        found.body["ignore_eos"] = True


def _biased(body: Body, sampling: frames.Sampling, dialect: Dialect) -> None:
    if sampling.text_bias and not dialect.bias_of_texts:
        raise refusal("logit_bias", dialect, "it takes token ids")
    if dialect.bias_of_texts:
        both = [*sampling.logit_bias.items(), *sampling.text_bias.items()]
        if both:
            body["logit_bias"] = [
                [key, False if value == -math.inf else value] for key, value in both
            ]
    elif sampling.logit_bias:
        body["logit_bias"] = {
            str(token): max(value, -100.0) for token, value in sampling.logit_bias.items()
        }


def _constrained(found: Asked, constraint: frames.Constraint, dialect: Dialect) -> None:
    field = constraint.param or constraint.kind
    allowed = dialect.constraints if found.api == "chat" else dialect.text_constraints
    if constraint.kind not in allowed:
        raise refusal(field, dialect)
    if constraint.begun:
        raise refusal(field, dialect, "an answer that goes on cannot be constrained there")
    schema = msgspec.json.decode(constraint.source) if constraint.kind == "json_schema" else None
    dialect.constrain(found.body, constraint, schema)


def _with_tools(
    body: Body, prompt: frames.ChatPrompt, allowed: Tools | None, dialect: Dialect
) -> None:
    if not prompt.tools or allowed is None:
        return
    body["tools"] = prompt.tools
    if allowed.required:
        names = list(allowed.schemas)
        body["tool_choice"] = "required"
        if len(names) == 1 and dialect.names_tools:
            body["tool_choice"] = {"type": "function", "function": {"name": names[0]}}
        elif len(names) < len(prompt.tools):  # those that may not be called are not shown, either
            body["tools"] = [each for each in prompt.tools if each["function"]["name"] in names]
    if not allowed.parallel:
        body["parallel_tool_calls"] = False


def _with_template(
    found: Asked, request: frames.Generate, prompt: frames.ChatPrompt, dialect: Dialect
) -> None:
    told = prompt.template_kwargs
    if told and dialect.template_kwargs:
        found.body["chat_template_kwargs"] = told
    elif told:
        if effort := told.get("reasoning_effort"):
            found.body["reasoning_effort"] = effort
        theirs = told.keys() - {"reasoning_effort", "enable_thinking", "thinking"}
        if theirs:
            raise refusal("chat_template_kwargs", dialect)
        if told.get("enable_thinking") is False:
            found.left_out.append("reasoning_effort")
    if not request.thoughts and "reasoning_format" in dialect.known:
        found.body["reasoning_format"] = "none"
    if request.thinking is not None and "thinking" not in dialect.known:
        found.left_out.append("reasoning_budget_tokens")
    if not prompt.add_generation_prompt and not prompt.continued:
        raise refusal("add_generation_prompt", dialect)


def _probable(found: Asked, request: frames.Generate, dialect: Dialect) -> None:
    if request.post_sampling:
        raise InvalidRequest(
            "'post_sampling_probs' cannot be had of a pair that another server answers for.",
            param="post_sampling_probs",
        )
    if request.return_tokens and found.api == "native":
        found.body["return_tokens"] = True
    elif request.return_tokens and dialect.names_tokens:
        found.body["return_token_ids"] = True
    elif request.return_tokens:
        found.left_out.append("return_tokens")
    if request.prompt_logprobs is not None:
        raise refusal("logprobs", dialect, "those of a prompt are computed by local pairs only")
    if request.top_logprobs is None:
        return
    # To llama-server none beside the token itself are no log-probabilities at all.
    tops = max(request.top_logprobs, 1) if dialect.native else request.top_logprobs
    match found.api:
        case "chat":
            found.body |= {"logprobs": True, "top_logprobs": tops}
        case "text":
            found.body["logprobs"] = tops
        case "native":
            found.body["n_probs"] = tops


def _hinted(found: Asked, request: frames.Generate, dialect: Dialect) -> None:
    """What changes no text."""
    if "cache_prompt" in dialect.known:
        found.body["cache_prompt"] = request.cache_prompt
        if request.n_cache_reuse:
            found.body["n_cache_reuse"] = request.n_cache_reuse
    if request.timings and dialect.native:
        found.body["timings_per_token"] = True
    if request.speculative.prediction is not None and "prediction" in dialect.known:
        found.body["prediction"] = {"type": "content", "content": request.speculative.prediction}
    asked = msgspec.structs.replace(request.speculative, prediction=None)
    if asked != frames.Speculative() and "speculative" not in dialect.known:
        found.left_out.append("speculative")
