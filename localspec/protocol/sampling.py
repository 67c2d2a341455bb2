"""The sampling parameters, each declared once: its type, how far it may go, and its other names.

Requests and frames have the fields of `Sampled`; what is said of a parameter anywhere else is read from
here. The limits hold in a request and in a model's file alike. Within them every step stays finite in
float32, whatever a model's logits are: a penalty that divides by next to nothing, or by what float32
takes for nothing, would leave no token to choose.

To add one: its field here, its default in engine/sampling/settings.py beside what it does, and where `ask`
is to have it, its option in cli/options.py.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from msgspec import Meta, Struct

INT32 = (1 << 31) - 1

Count = Annotated[int, Meta(ge=0, le=INT32)]
LookBack = Annotated[int, Meta(ge=-1, le=INT32)]  # -1: all of the text
# -1: as many as fit; -2: until the context is full, which is the same here.
TokenLimit = Annotated[int, Meta(ge=-2, le=INT32)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
# Logits are divided by it, or multiplied: both ways by a thousand at most.
RepeatPenalty = Annotated[float, Meta(ge=0.001, le=100)]
# Standard deviations of all logits; 0 and below: off, as in llama-server.
Sigmas = Annotated[float, Meta(ge=-1, le=100)]
Exponent = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]  # OpenAI's
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
DryBase = Annotated[float, Meta(ge=0, le=100)]  # below 1: llama.cpp's default, as in llama-server
Bias = Annotated[float, Meta(ge=-100, le=100)]  # OpenAI's


class Also(NamedTuple):
    """A parameter elsewhere.

    `gguf`: the key below `general.sampling.` by which a model's file gives its default. `sampler`: the one
    of llama-server's `samplers` that it belongs to, and `off` the value that switches that off.
    """

    gguf: str = ""
    sampler: str = ""
    off: float | None = None


class Sampled(Struct):
    """Sampling as asked. None: the model's own default (`general.sampling.*`), else llama.cpp's.

    temperature 0 is greedy. Names and meanings are llama.cpp's.
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
    """One field of `Sampled`; `kind` is its type with its limits."""

    name: str
    kind: Any
    also: Also


@cache
def parameters() -> tuple[Parameter, ...]:
    """All of them, in the order of the fields."""
    hints = get_type_hints(Sampled, include_extras=True)
    found = []
    for name in Sampled.__struct_fields__:
        kind = next(each for each in get_args(hints[name]) if each is not type(None))
        also = next((each for each in get_args(kind) if isinstance(each, Also)), Also())
        found.append(Parameter(name, kind, also))
    return tuple(found)
