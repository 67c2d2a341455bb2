"""How a request is sampled: what it asked for, over what the model's file says, over llama.cpp's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from localspec.protocol.frames import Sampling
from localspec.protocol.sampling import parameters


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling as it will be done; every default is llama.cpp's."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    min_keep: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    infill: bool = False
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Is there nothing to draw? Of one candidate there is not, at any temperature."""
        return self.top_k == 1 or (self.temperature <= 0.0 and self.dynatemp_range <= 0.0)

    @property
    def excludes(self) -> bool:
        """Whether XTC may pass over the likeliest tokens; above 0.5 no two are that likely."""
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5

    @property
    def penalised(self) -> bool:
        return (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.dry_multiplier > 0.0
        )


def model_defaults(metadata: Callable[[str], str | None]) -> dict[str, float]:
    """The settings a model's file asks for; left out is a value that no request may have either."""
    found: dict[str, float] = {}
    for name, kind, also in parameters():
        text = metadata(f"general.sampling.{also.gguf}") if also.gguf else None
        if text is None:
            continue
        try:
            value = float(text)
            whole = isinstance(getattr(Settings(), name), int)
            found[name] = msgspec.convert(int(value) if whole else value, kind)
        except (ValueError, OverflowError):  # no number, none that is finite, or beyond the limits
            continue
    return found


def unasked(defaults: Mapping[str, float]) -> dict[str, Any]:
    """How a request is sampled that says nothing of it, in the names of requests; `defaults` are the
    model's."""
    settings = resolve(Sampling(), defaults)
    return {each.name: getattr(settings, each.name) for each in parameters()}


def resolve(asked: Sampling, defaults: Mapping[str, float]) -> Settings:
    """What was asked, over what the model's file says, over llama.cpp's defaults."""
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in Settings.__dataclass_fields__
        if (value := getattr(asked, name)) is not None
    }
    if told.get("dry_base", 1.0) < 1.0:  # as llama-server
        del told["dry_base"]
    return replace(Settings(), **{**defaults, **told})
