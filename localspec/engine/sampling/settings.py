"""Sampling settings: those of the request, over those of the model's file, over llama.cpp's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from localspec.protocol.frames import Sampling
from localspec.protocol.requests import sampling_parameters


@dataclass(frozen=True, slots=True)
class Settings:
    """The complete sampling settings of one request. Every default is llama.cpp's."""

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
        """Whether nothing is drawn at random. With top-k 1 this holds at any temperature."""
        return self.top_k == 1 or (self.temperature <= 0.0 and self.dynatemp_range <= 0.0)

    @property
    def excludes(self) -> bool:
        """Whether XTC can exclude the likeliest tokens.

        It needs two tokens above its threshold, which cannot be if the threshold is above 0.5.
        """
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5

    @property
    def penalised(self) -> bool:
        """Whether any penalty on repetition applies."""
        return (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.dry_multiplier > 0.0
        )


def model_defaults(metadata: Callable[[str], str | None]) -> dict[str, float]:
    """Return the sampling defaults in a model's file, without values that a request could not have.

    metadata: returns the text of a GGUF key, or None if the file does not have it.
    """
    defaults: dict[str, float] = {}
    for name, kind, aliases in sampling_parameters():
        text = metadata(f"general.sampling.{aliases.gguf}") if aliases.gguf else None
        if text is None:
            continue
        try:
            value = float(text)
            is_integer = isinstance(getattr(Settings(), name), int)
            defaults[name] = msgspec.convert(int(value) if is_integer else value, kind)
        except (ValueError, OverflowError):  # Not a number, not finite, or out of range.
            continue
    return defaults


def default_settings(defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings of a request without any, by parameter name; `defaults` are the model's."""
    settings = resolve_settings(Sampling(), defaults)
    return {entry.name: getattr(settings, entry.name) for entry in sampling_parameters()}


def resolve_settings(request: Sampling, defaults: Mapping[str, float]) -> Settings:
    """Return the settings of a request, over the model's `defaults`, over llama.cpp's defaults."""
    overrides: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in Settings.__dataclass_fields__
        if (value := getattr(request, name)) is not None
    }
    if overrides.get("dry_base", 1.0) < 1.0:  # llama-server ignores such a base as well.
        del overrides["dry_base"]
    return replace(Settings(), **{**defaults, **overrides})
