"""The numbers that choose a token, and how far each may go: in a request, and in a model's file.

Within them every step stays finite in float32, whatever a model's logits are: a penalty that divides by
next to nothing, or by what float32 takes for nothing, would leave no token to choose.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

INT32 = (1 << 31) - 1

Count = Annotated[int, Meta(ge=0, le=INT32)]
LookBack = Annotated[int, Meta(ge=-1, le=INT32)]  # -1: all of the text
# -1: as many as fit; -2: until the context is full, which is the same here.
TokenLimit = Annotated[int, Meta(ge=-2, le=INT32)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
# Logits are divided by it, or multiplied: both ways by a thousand at most.
RepeatPenalty = Annotated[float, Meta(ge=0.001, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]  # OpenAI's
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
DryBase = Annotated[float, Meta(ge=0, le=100)]  # below 1: llama.cpp's default, as in llama-server
Bias = Annotated[float, Meta(ge=-100, le=100)]  # OpenAI's
