"""llama-server's own requests, /completion and /infill, as editors' plug-ins send them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from localspec.protocol.http import MAX_LOGPROBS, GenerationRequest
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.sampling import INT32, Count

_SLOT = Annotated[int, Meta(ge=-1, le=INT32)]
_MILLISECONDS = Annotated[float, Meta(ge=-1, le=1e9)]


class NativeRequest(GenerationRequest, kw_only=True):
    """What both share.

    `samplers` names those that work; "infill" among them ends a completion where
    writing on is not likely.
    `response_fields` picks fields of the answer by path; the paths become its keys.
    `id_slot` chooses no slot here (the longest cached prefix does); with `user` it tells editors apart.
    """

    samplers: list[str] | str | None = None
    n_probs: OrDefault[Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]] = 0
    n_indent: Count | None = None
    t_max_prompt_ms: _MILLISECONDS | None = None
    t_max_predict_ms: _MILLISECONDS | None = None
    response_fields: list[str] | None = None
    return_tokens: OrDefault[bool] = False
    id_slot: OrDefault[_SLOT] = -1
    user: str | None = None


class NativeCompletionRequest(NativeRequest, kw_only=True):
    """`prompt`: a text, token ids, or several of either."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class ExtraFile(Request):
    """A piece of another file."""

    text: str
    filename: OrDefault[str] = "tmp"


class InfillRequest(NativeRequest, kw_only=True):
    """`prompt` is the part of the cursor's line before it, `input_prefix` the lines above."""

    input_prefix: OrDefault[str] = ""
    input_suffix: OrDefault[str] = ""
    input_extra: OrDefault[Annotated[list[ExtraFile], Meta(max_length=10_000)]] = field(
        default_factory=list
    )
    prompt: OrDefault[str] = ""
