"""llama-server's /completion and /infill: its requests into frames, frames into its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from localspec.daemon.completion.answer import Answer, text_of
from localspec.daemon.completion.reply.parser import Piece
from localspec.daemon.completion.request import max_tokens, per_choice, prompts
from localspec.daemon.http.errors import told
from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import PromptProgress
from localspec.protocol.requests import InfillRequest, NativeCompletionRequest, NativeRequest
from localspec.protocol.sampling import parameters

# Older names and the one-letter form of llama-server's --sampling-seq.
_ALSO = {"typical_p": "typ_p", "k": "top_k", "p": "top_p", "m": "min_p", "y": "typ_p"}
_ALSO |= {"s": "top_n_sigma", "x": "xtc", "temp": "temperature", "nucleus": "top_p", "typ": "typ_p"}
_ALSO |= {"t": "temperature", "e": "penalties", "d": "dry", "i": "infill"}


def completion(request: NativeCompletionRequest) -> list[frames.Generate]:
    """One Generate per prompt and choice.

    Raises:
        InvalidRequest: as `per_choice` and `prompts`.
    """
    _use_samplers(request)
    wanted = per_choice(request, prompts(request.prompt), _logprobs(request), **_limits(request))
    return _ending_early(request, wanted)


def infill(request: InfillRequest) -> list[frames.Generate]:
    """An editor's request: it goes ahead of chat.

    Raises:
        InvalidRequest: as `per_choice`.
    """
    _use_samplers(request)
    prompt = frames.InfillPrompt(
        request.input_prefix,
        request.input_suffix,
        [(each.filename, each.text) for each in request.input_extra],
        request.prompt,
        max(request.n_predict or request.max_tokens or 0, 0),
    )
    wanted = per_choice(
        request, [prompt], _logprobs(request), priority="editor", **_limits(request)
    )
    return _ending_early(request, _others_drawn(request, wanted))


def _limits(request: NativeRequest) -> dict[str, Any]:
    return {
        "max_predict_ms": _milliseconds(request.t_max_predict_ms),
        "single_line_indent": request.n_indent or None,
        "return_tokens": request.return_tokens or request.stream,
    }


def _milliseconds(value: float | None) -> int | None:
    return round(value) if value and value > 0 else None


def _logprobs(request: NativeRequest) -> int | None:
    return request.n_probs or None


def _named(request: NativeRequest) -> set[str] | None:
    if request.samplers is None:
        return None
    return {_ALSO.get(name, name) for name in request.samplers}


def _use_samplers(request: NativeRequest) -> None:
    """Switch off what `samplers` leaves out.

    Where "infill" comes without a temperature, as editors send it, llama-server draws from the few
    tokens it leaves. The likeliest of them says the same thing again while somebody types; of several
    choices the others are drawn (see _others_drawn).
    """
    named = _named(request)
    if named is None:
        return
    for name, _, also in parameters():
        if also.sampler and also.sampler not in named and also.off is not None:
            setattr(request, name, also.off)
    if _likeliest(named):
        request.temperature = 0.0


def _likeliest(named: set[str] | None) -> bool:
    return named is not None and "infill" in named and "temperature" not in named


def _others_drawn(request: NativeRequest, wanted: list[frames.Generate]) -> list[frames.Generate]:
    """The same where each choice but the first may be another one."""
    if not _likeliest(_named(request)):
        return wanted
    first, *others = wanted
    replace = msgspec.structs.replace
    return [
        first,
        *(replace(each, sampling=replace(each.sampling, temperature=1.0)) for each in others),
    ]


def _ending_early(request: NativeRequest, wanted: list[frames.Generate]) -> list[frames.Generate]:
    """The same with the "infill" sampler, where it is asked for."""
    if "infill" not in (_named(request) or ()):
        return wanted
    replace = msgspec.structs.replace
    return [replace(each, sampling=replace(each.sampling, infill=True)) for each in wanted]


class LlamaServerShape:
    """Answers as llama-server gives them, with its paths of `response_fields` as keys."""

    def __init__(
        self,
        answer: Answer,
        request: NativeRequest,
        *,
        loaded: Callable[[], frames.Loaded | None],
        note: Callable[[], str | None],
        ignored: Sequence[str] = (),
    ) -> None:
        """`loaded`, the pair that answers, and `note` are asked for at the end. `ignored`: what of the
        request changed nothing.
        """
        self.answer = answer
        self._request = request
        self._loaded = loaded
        self._note = note
        self._ignored = list(ignored)

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Delta() if event.text or event.logprobs or event.ids:
                return [self._delta(index, event)]
            case frames.Done():
                return [self._final(index, event)]
        return ()

    def reading(self, index: int, now: PromptProgress) -> dict[str, Any]:
        """While the prompt of a choice is read."""
        timings = self.answer.choices[index].timings if self.answer.wants_timings else None
        delta = self._delta(index, frames.Delta(0, "", timings=timings))
        return {**delta, "prompt_progress": msgspec.to_builtins(now)}

    def end(self) -> Sequence[object]:
        return ()

    def failed(self, error: LocalspecError) -> Sequence[object]:
        return told(error)

    def whole(self) -> object:
        answers = []
        for index, choice in enumerate(self.answer.choices):
            if choice.done:
                tokens = choice.tokens if self._request.return_tokens else []
                said = {"content": choice.content, "tokens": tokens}
                said |= self._probabilities(choice.logprobs)
                answers.append(self._final(index, choice.done, **said))
        return answers[0] if len(answers) == 1 else answers

    def _delta(self, index: int, delta: frames.Delta) -> dict[str, Any]:
        return {
            "index": index,
            "content": delta.text,
            "tokens": delta.ids,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": delta.tokens,
            "tokens_evaluated": self.answer.choices[index].prompt_tokens,
            **({} if delta.timings is None else {"timings": msgspec.to_builtins(delta.timings)}),
            **self._probabilities(delta.logprobs),
        }

    def _final(self, index: int, done: frames.Done, **said: Any) -> dict[str, Any]:
        """The whole answer, or what ends a stream. `said`: what a stream has said already."""
        choice = self.answer.choices[index]
        answer = {
            "index": index,
            "content": "",
            "tokens": [],
            **said,
            "id_slot": 0,
            "stop": True,
            "model": self.answer.model,
            "tokens_predicted": done.completion_tokens,
            "tokens_evaluated": done.prompt_tokens,
            "generation_settings": settings(self._request, self._loaded(), choice.logit_bias),
            "prompt": _prompt(self._request),
            "has_new_line": "\n" in choice.content,
            "truncated": done.truncated,
            "stop_type": _stop_type(done),
            "stopping_word": done.stop_string or "",
            "tokens_cached": done.prompt_tokens + max(done.completion_tokens - 1, 0),
            "timings": msgspec.to_builtins(done.timings),
            "localspec": {"speculation": msgspec.to_builtins(done.speculation)},
        }
        if done.trace:
            answer["localspec"]["passes"] = msgspec.to_builtins(done.trace)
        if note := self.answer.news(self.answer.note(self._note())):
            answer["localspec"]["note"] = note
        if self._ignored:
            answer["localspec"]["ignored"] = self._ignored
        wanted = self._request.response_fields
        return answer if not wanted else _picked(answer, wanted)

    def _probabilities(self, logprobs: list[frames.TokenLogprob]) -> dict[str, Any]:
        if not self._request.n_probs or not logprobs:
            return {}
        tops = [[_probability(*top) for top in each.top] for each in logprobs]
        entries = [
            {**_probability(each.id, each.piece, each.logprob), "top_logprobs": top}
            for each, top in zip(logprobs, tops, strict=True)
        ]
        if self._request.post_sampling_probs:
            entries = [
                {**_linear(entry), "top_probs": [_linear(top) for top in entry["top_logprobs"]]}
                for entry in entries
            ]
        return {"completion_probabilities": entries}


def _probability(token: int, piece: bytes, logprob: float) -> dict[str, Any]:
    return {"id": token, "token": text_of(piece), "bytes": list(piece), "logprob": logprob}


def _linear(entry: dict[str, Any]) -> dict[str, Any]:
    """With the probability itself, as llama-server has those of the draw."""
    told = {key: entry[key] for key in ("id", "token", "bytes")}
    return {**told, "prob": math.exp(entry["logprob"])}


def settings(
    request: NativeRequest, loaded: frames.Loaded | None, logit_bias: Mapping[int, float]
) -> dict[str, Any]:
    """How the answer was written, in llama-server's names: what was asked for over what the pair does
    by itself. JSON has no infinity: a bias of null is that of a token that never comes."""
    asked = {each.name: getattr(request, each.name) for each in parameters()}
    predict = max_tokens(request)
    predict = -1 if predict is None else predict
    return {
        "n_ctx": loaded.n_ctx if loaded else 0,
        **_ABSENT,
        **(loaded.sampling_defaults if loaded else {}),
        **{name: value for name, value in asked.items() if value is not None},
        "ignore_eos": request.ignore_eos,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in logit_bias.items()],
        "max_tokens": predict,
        "n_predict": predict,
        "timings_per_token": request.timings_per_token,
        "post_sampling_probs": request.post_sampling_probs,
        "stream": request.stream,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
        "samplers": list(_CHAIN if request.samplers is None else request.samplers),
        "n_probs": request.n_probs,
        "n_indent": request.n_indent or 0,
    }


# The order in which they work, whatever the order in which a request names them.
_CHAIN = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
# What of llama-server's sampling there is not, at the values that leave it out.
_ABSENT = {
    "mirostat": 0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
}


def _prompt(request: NativeRequest) -> str:
    prompt = getattr(request, "prompt", "")
    return prompt if isinstance(prompt, str) else ""


def _stop_type(done: frames.Done) -> str:
    match done.finish_reason:
        case "length":
            return "limit"
        case "stop":
            return "word" if done.stop_string else "eos"
        case _:
            return "none"


def _picked(answer: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The values at those paths that lead somewhere; [""] is how llama.vim asks for none."""
    found = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[path] = value
    return found


_MISSING = object()
