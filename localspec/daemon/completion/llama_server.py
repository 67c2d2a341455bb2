"""Translate llama-server's /completion and /infill into frames, and frames into its answers.

Beside that: end an editor's older /infill when its newer one arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from localspec.chat.token_report import decode_piece
from localspec.daemon.completion.answer import PendingAnswer, Shape
from localspec.daemon.completion.request import engine_requests, max_tokens, parse_prompts
from localspec.daemon.http.connection import UNIX_HOST
from localspec.daemon.worker.process import Event
from localspec.errors import Cancelled
from localspec.protocol import frames
from localspec.protocol.answers import PromptProgress
from localspec.protocol.pieces import Piece
from localspec.protocol.requests import (
    InfillRequest,
    NativeCompletionRequest,
    NativeRequest,
    SamplingParameters,
    sampling_parameters,
)

# Editors show no completion that took longer, so an unwanted one costs at most this much time.
UNSURE_TIMEOUT_S = 3.0


class EditorPosition(NamedTuple):
    """The position where somebody types; `is_unique` means that no other editor can have this `editor`."""

    editor: Hashable
    text: int  # a hash of the text around the cursor's line
    is_unique: bool
    # The number of the request. Bodies may arrive in another order than the keys were typed.
    arrival: int


def editor_position(request: Request, body: InfillRequest, arrival: int) -> EditorPosition:
    """Return which editor waits for a completion, and where.

    Over the Unix socket an editor is identified by the process at the other end, over TCP by `user`.
    Otherwise it is a program on a host, which may run twice, so only the same text counts as the same
    editor.
    """
    client = request.client
    text = hash((body.input_prefix, body.input_suffix))
    slot = body.id_slot if body.id_slot >= 0 else hash(body.input_prefix)
    editor: Hashable = body.user, slot
    is_socket = client is not None and client.host == UNIX_HOST
    if is_socket:
        editor = client, body.user, slot
    elif not body.user:
        program = request.headers.get("user-agent")
        editor = client.host if client else None, program, body.id_slot, text
    return EditorPosition(editor, text, is_socket or bool(body.user), arrival)


class _Typing(NamedTuple):
    """A completion under way, and its time limit."""

    place: EditorPosition
    limit: asyncio.Timeout


class Editors:
    """The newest completion that each editor is waiting for.

    An older one ends at once only if both certainly come from the same editor. A program sends the same name
    and slot from every window, and two windows may show the same file, so those prove nothing. Without better
    evidence the older completion first gets the time in which an editor would still show it.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._newest: dict[Hashable, _Typing] = {}

    def next_arrival(self) -> int:
        """Return a number for a request whose head has just been read."""
        return next(self._arrivals)

    @contextlib.asynccontextmanager
    async def completing(self, place: EditorPosition) -> AsyncIterator[None]:
        """Mark a completion for `place` as under way; an older one of the same editor is cancelled.

        Raises:
            Cancelled: a newer completion replaced this one. Editors would store an empty answer as a valid
                completion, so this has to be an error.
        """
        entry = _Typing(place, asyncio.timeout(None))
        try:
            async with entry.limit:
                self._enter(entry)
                yield
        except TimeoutError:
            if not entry.limit.expired():
                raise
            message = "A newer completion request from the same editor replaced this one."
            raise Cancelled(message) from None
        finally:
            if self._newest.get(place.editor) is entry:
                del self._newest[place.editor]

    def _enter(self, entry: _Typing) -> None:
        """Register `entry`, and end the older one of it and its editor's current completion."""
        current = self._newest.setdefault(entry.place.editor, entry)
        if current is entry:
            return
        older, newer = sorted((current, entry), key=lambda typing: typing.place.arrival)
        sure = entry.place.is_unique and older.place.text == newer.place.text
        patience_s = 0.0 if sure else UNSURE_TIMEOUT_S
        older.limit.reschedule(asyncio.get_running_loop().time() + patience_s)
        self._newest[entry.place.editor] = newer


# Older names of samplers, and the letters of llama-server's --sampling-seq.
_SAMPLER_ALIASES = {"typical_p": "typ_p", "k": "top_k", "p": "top_p", "m": "min_p", "y": "typ_p"}
_SAMPLER_ALIASES |= {"s": "top_n_sigma", "x": "xtc", "temp": "temperature", "nucleus": "top_p"}
_SAMPLER_ALIASES |= {
    "typ": "typ_p",
    "t": "temperature",
    "e": "penalties",
    "d": "dry",
    "i": "infill",
}


def completion_requests(request: NativeCompletionRequest) -> list[frames.Generate]:
    """Return one engine request per prompt and choice. Raises InvalidRequest."""
    return _native_requests(request, lambda: parse_prompts(request.prompt))


def infill_requests(request: InfillRequest) -> list[frames.Generate]:
    """Return the engine requests of an editor, which have priority over chats. Raises InvalidRequest.

    With `localspec.ahead` it is the request that reads the same prompt while nobody waits.
    """
    prompt = frames.InfillPrompt(
        request.input_prefix,
        request.input_suffix,
        [(chunk.filename, chunk.text) for chunk in request.input_extra],
        request.prompt,
        max(request.n_predict or request.max_tokens or 0, 0),
    )
    requests = _native_requests(request, lambda: [prompt], "editor")
    if request.localspec is not None and request.localspec.ahead:
        return [msgspec.structs.replace(requests[0], priority="ahead", max_tokens=0)]
    return requests


def _native_requests(
    request: NativeRequest,
    prompts: Callable[[], Sequence[frames.Prompt]],
    priority: Literal["chat", "editor"] = "chat",
) -> list[frames.Generate]:
    """Return the engine requests, with the samplers switched off that `samplers` leaves out.

    Editors send "infill" without a temperature. llama-server then draws from the few tokens that are left.
    localspec takes the likeliest one, so that a completion does not change while somebody types. Only
    further choices of the same request are drawn, because all would be equal.
    """
    names = None
    if request.samplers is not None:
        names = {_SAMPLER_ALIASES.get(name, name) for name in request.samplers}
        for name, _, parameter in sampling_parameters():
            if parameter.sampler and parameter.sampler not in names and parameter.off is not None:
                setattr(request, name, parameter.off)
    has_infill = names is not None and "infill" in names
    is_greedy = has_infill and "temperature" not in (names or ())
    if is_greedy:
        request.temperature = 0.0
    limit_ms = request.t_max_predict_ms
    requests = engine_requests(
        request,
        prompts(),
        request.n_probs or None,
        priority=priority,
        max_predict_ms=round(limit_ms) if limit_ms and limit_ms > 0 else None,
        single_line_indent=request.n_indent or None,
        return_tokens=request.return_tokens or request.stream,
    )
    for index, generate in enumerate(requests):
        generate.sampling.infill = has_infill
        if is_greedy and index and priority == "editor":
            generate.sampling.temperature = 1.0
    return requests


class LlamaServerShape(Shape):
    """Formats answers as llama-server does; `response_fields` selects their keys."""

    def __init__(
        self,
        answer: PendingAnswer,
        request: NativeRequest,
        loaded: Callable[[], frames.Loaded | None],
    ) -> None:
        """Create the shape. `loaded` returns the pair that answers; it is called at the end."""
        super().__init__(answer)
        self._request = request
        self._loaded = loaded

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Delta() if event.text or event.logprobs or event.ids:
                return [self._delta(index, event)]
            case frames.Done():
                return [self._final(index, event)]
        return ()

    def reading(self, index: int, now: PromptProgress) -> dict[str, Any]:
        """Return the chunk that reports how much of a choice's prompt is read."""
        timings = self.answer.choices[index].timings if self.answer.wants_timings else None
        delta = self._delta(index, frames.Delta(0, timings=timings))
        return {**delta, "prompt_progress": msgspec.to_builtins(now)}

    def complete(self) -> object:
        answers = []
        for index, choice in enumerate(self.answer.choices):
            if choice.done:
                tokens = choice.tokens if self._request.return_tokens else []
                content = {"content": choice.content, "tokens": tokens}
                content |= self._probabilities(choice.logprobs)
                answers.append(self._final(index, choice.done, **content))
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

    def _final(self, index: int, done: frames.Done, **content: Any) -> dict[str, Any]:
        """Return the whole answer, whose text is in `content`, or the last chunk of a stream."""
        choice, prompt = self.answer.choices[index], getattr(self._request, "prompt", "")
        stop_types = {"length": "limit", "stop": "word" if done.stop_string else "eos"}
        answer = {
            "index": index,
            "content": "",
            "tokens": [],
            **content,
            "id_slot": 0,
            "stop": True,
            "model": self.answer.model,
            "tokens_predicted": done.completion_tokens,
            "tokens_evaluated": done.prompt_tokens,
            "generation_settings": sampling_settings(
                self._request, self._loaded(), choice.logit_bias
            ),
            "prompt": prompt if isinstance(prompt, str) else "",
            "has_new_line": "\n" in choice.content,
            "truncated": done.truncated,
            "stop_type": stop_types.get(done.finish_reason, "none"),
            "stopping_word": done.stop_string or "",
            "tokens_cached": done.prompt_tokens + max(done.completion_tokens - 1, 0),
            "timings": msgspec.to_builtins(done.timings),
            "localspec": {"speculation": msgspec.to_builtins(done.speculation)},
        }
        if done.trace:
            answer["localspec"]["passes"] = msgspec.to_builtins(done.trace)
        if note := self.answer.note():
            answer["localspec"]["note"] = note
        if ignored := self.answer.notes.ignored():
            answer["localspec"]["ignored"] = ignored
        if not self._request.response_fields:
            return answer
        # The values at the paths that exist; llama.vim sends [""] to get none.
        fields = {}
        for path in self._request.response_fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
            if value is not UNSET:
                fields[path] = value
        return fields

    def _probabilities(self, logprobs: list[frames.TokenLogprob]) -> dict[str, Any]:
        if not self._request.n_probs or not logprobs:
            return {}
        tops = [[_probability(*top) for top in token.top] for token in logprobs]
        entries = [
            {**_probability(token.id, token.piece, token.logprob), "top_logprobs": top}
            for token, top in zip(logprobs, tops, strict=True)
        ]
        if self._request.post_sampling_probs:
            entries = [
                {**_linear(entry), "top_probs": [*map(_linear, entry["top_logprobs"])]}
                for entry in entries
            ]
        return {"completion_probabilities": entries}


def _probability(token: int, piece: bytes, logprob: float) -> dict[str, Any]:
    return {"id": token, "token": decode_piece(piece), "bytes": list(piece), "logprob": logprob}


def _linear(entry: dict[str, Any]) -> dict[str, Any]:
    """Replace the log-probability by the probability, as llama-server does after sampling."""
    fields = {key: entry[key] for key in ("id", "token", "bytes")}
    return {**fields, "prob": math.exp(entry["logprob"])}


def sampling_settings(
    request: NativeRequest, loaded: frames.Loaded | None, logit_bias: Mapping[int, float]
) -> dict[str, Any]:
    """Return the sampling settings of an answer in llama-server's names.

    The request's values override the pair's defaults. JSON has no infinity, so a bias of null stands for a
    token that is never generated.
    """
    requested = {name: getattr(request, name) for name in SamplingParameters.__struct_fields__}
    limit = max_tokens(request)
    n_predict = -1 if limit is None else limit
    return {
        "n_ctx": loaded.n_ctx if loaded else 0,
        **_UNSUPPORTED_SETTINGS,
        **(loaded.sampling_defaults if loaded else {}),
        **{name: value for name, value in requested.items() if value is not None},
        "ignore_eos": request.ignore_eos,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in logit_bias.items()],
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "timings_per_token": request.timings_per_token,
        "post_sampling_probs": request.post_sampling_probs,
        "stream": request.stream,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
        "samplers": list(_SAMPLER_ORDER if request.samplers is None else request.samplers),
        "n_probs": request.n_probs,
        "n_indent": request.n_indent or 0,
    }


# The order in which samplers are applied, whatever the order in the request.
_SAMPLER_ORDER = "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature".split()
# Settings of llama-server that localspec does not have, with the values that switch them off.
_UNSUPPORTED_SETTINGS = {"mirostat": 0, "adaptive_target": -1.0, "adaptive_decay": 0.9}
_UNSUPPORTED_SETTINGS |= {"n_keep": 0, "n_discard": 0}
