"""How far each setting may go, said once.

A person's configuration, models.toml, the engine's settings and a request's options have these types, so
that what one of them accepts the next one takes. The limits are those of what uses a number in the end.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from msgspec import Meta

# llama.cpp makes no fewer cells, and a prompt has a system message, a question and an answer.
LEAST_CONTEXT = 256  # tokens
MAX_CONTEXT = 1 << 24
MAX_PARALLEL = 64
MAX_DRAFTED = 64

Context = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]  # tokens; 0: chosen
Parallel = Annotated[int, Meta(ge=1, le=MAX_PARALLEL)]
# Of the engine: with the places that the daemon keeps for editors. llama.cpp's own limit is 256.
Sequences = Annotated[int, Meta(ge=1, le=2 * MAX_PARALLEL)]
Threads = Annotated[int, Meta(ge=0, le=512)]  # GGML_MAX_N_THREADS; 0: chosen
Layers = Annotated[int, Meta(ge=-1, le=10_000)]  # -1: all
Gpu = Annotated[int, Meta(ge=0, le=15)]  # GGML_CUDA_MAX_DEVICES
Drafted = Annotated[int, Meta(ge=0, le=MAX_DRAFTED)]  # tokens drafted at once
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 24)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 44)]
SplitMode = Literal["layer", "row", "none"]
KvType = Literal["f16", "q8_0", "q5_1", "q4_0"]  # the largest first
KvTypeV = Literal["same", KvType]  # "same" as the keys'
KV_BLOCK = 32  # numbers of a cache that share a scale, but for f16
FlashAttention = Literal["auto", "on", "off"]


class Limits(NamedTuple):
    """What a type allows: numbers from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def limits(kind: Any) -> Limits:
    """Those of a type of this module, or of one made of it."""
    base, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    found = Limits(choices=get_args(base) if get_origin(base) is Literal else ())
    for each in marks:
        if isinstance(each, Meta):
            found = Limits(each.ge, each.le)
    return found
