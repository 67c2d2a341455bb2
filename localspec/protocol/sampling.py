"""The sampling parameters, each declared once: its type, its limits and its other names.

Requests and frames inherit the fields of `Sampled`, and everything else that names a parameter
reads it from here. The same limits hold in a request and in a model's file. Within them every step
stays finite in float32 for any logits. A penalty that divides by almost zero, or by a number that
float32 rounds to zero, would leave no token to choose.

To add a parameter: add its field here, its default in engine/sampling/settings.py beside the code
that applies it, and its option in cli/options.py if `localspec ask` is to have it.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from msgspec import Meta, Struct

INT32 = (1 << 31) - 1

Count = Annotated[int, Meta(ge=0, le=INT32)]
LookBack = Annotated[int, Meta(ge=-1, le=INT32)]  # tokens; -1: all of the text
# -1: as many tokens as fit; -2: until the context is full, which is the same thing here.
TokenLimit = Annotated[int, Meta(ge=-2, le=INT32)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
# Logits are divided or multiplied by it, so either way they change by a factor of 1000 at most.
RepeatPenalty = Annotated[float, Meta(ge=0.001, le=100)]
# Standard deviations of all logits. Zero and below switch it off, as in llama-server.
Sigmas = Annotated[float, Meta(ge=-1, le=100)]
Exponent = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]  # OpenAI's limits
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
# Below 1, llama.cpp's default is used, as in llama-server.
DryBase = Annotated[float, Meta(ge=0, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]  # OpenAI's limits


class Also(NamedTuple):
    """What a parameter is called elsewhere."""

    # Key below `general.sampling.` with which a model's file sets its default.
    gguf: str = ""
    # The one of llama-server's `samplers` that the parameter belongs to.
    sampler: str = ""
    # The value that switches that sampler off.
    off: float | None = None


class Sampled(Struct):
    """Sampling parameters of a request, with llama.cpp's names and meanings.

    None stands for the model's own default (`general.sampling.*` in its file), or else llama.cpp's.
    A temperature of 0 is greedy.
    """

    temperature: Annotated[Temperature, Also("temp", "temperature", 1.0)] | None = None
    top_k: Annotated[LookBack, Also("top_k", "top_k", 0)] | None = None
    top_p: Annotated[Probability, Also("top_p", "top_p", 1.0)] | None = None
    min_p: Annotated[Probability, Also("min_p", "min_p", 0.0)] | None = None
    typical_p: Annotated[Probability, Also("", "typ_p", 1.0)] | None = None
    top_n_sigma: Annotated[Sigmas, Also("", "top_n_sigma", -1.0)] | None = None
    xtc_probability: Annotated[Probability, Also("xtc_probability", "xtc", 0.0)] | None = None
    xtc_threshold: Annotated[Probability, Also("xtc_threshold")] | None = None
    dynatemp_range: Annotated[Temperature, Also("", "temperature", 0.0)] | None = None
    dynatemp_exponent: Exponent | None = None
    min_keep: Count | None = None
    repeat_penalty: Annotated[RepeatPenalty, Also("penalty_repeat", "penalties", 1.0)] | None = None
    repeat_last_n: Annotated[LookBack, Also("penalty_last_n")] | None = None
    frequency_penalty: Annotated[Penalty, Also("", "penalties", 0.0)] | None = None
    presence_penalty: Annotated[Penalty, Also("", "penalties", 0.0)] | None = None
    dry_multiplier: Annotated[DryMultiplier, Also("", "dry", 0.0)] | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: LookBack | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


class Parameter(NamedTuple):
    """One field of `Sampled`. `kind` is its type, including its limits."""

    name: str
    kind: Any
    also: Also


@cache
def parameters() -> tuple[Parameter, ...]:
    """Return all sampling parameters in the order of the fields."""
    hints = get_type_hints(Sampled, include_extras=True)
    result = []
    for name in Sampled.__struct_fields__:
        kind = next(member for member in get_args(hints[name]) if member is not type(None))
        also = next((mark for mark in get_args(kind) if isinstance(mark, Also)), Also())
        result.append(Parameter(name, kind, also))
    return tuple(result)
