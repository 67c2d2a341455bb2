"""What to try where memory does not hold what was planned: less and less, until it fits.

The daemon plans by arithmetic on the files' headers (registry.fit). Only the driver knows what is
really free, so a load that fails for want of memory is tried again with a smaller plan. The target's
layers leave the GPU first: each step of the draft is on the path of every token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from localspec.protocol.frames import EngineSettings

SMALLEST_CONTEXT = 2048
# Where the target could not be opened, so that its number of layers is not known.
USUAL_LAYERS = 48


class Smaller(NamedTuple):
    """The next plan, what it gives up of, and a sentence that tells it."""

    settings: EngineSettings
    gives: Literal["layers", "context", "draft"]
    told: str


def smaller(settings: EngineSettings, layers: int, context: int, gpu: bool) -> Smaller | None:
    """The next plan; None where nothing is left to give.

    layers: of the target, 0 where they are not known. context: tokens that did not fit.
    """
    replace = msgspec.structs.replace
    if gpu and settings.n_gpu_layers:
        every = (layers or USUAL_LAYERS) + 1  # the output counts as one
        placed = every if settings.n_gpu_layers < 0 else min(settings.n_gpu_layers, every)
        fewer = placed * 3 // 4 if placed > 4 else 0
        told = f"Only {fewer} layers of the target are on the GPU, because its memory is full."
        return Smaller(replace(settings, n_gpu_layers=fewer), "layers", told)
    if context > SMALLEST_CONTEXT:
        less = max(SMALLEST_CONTEXT, context // 2)
        told = f"The context is limited to {less} tokens, because memory is full."
        return Smaller(replace(settings, n_ctx=less), "context", told)
    if gpu and settings.draft_gpu_layers:
        told = "The draft runs on the CPU: the GPU is full."
        return Smaller(replace(settings, draft_gpu_layers=0), "draft", told)
    return None
