"""What to try if memory does not hold what was planned: less and less, until it fits.

The daemon plans by arithmetic on the files' headers (registry.fit). Only the driver knows how much memory is
really free, so a load that fails for lack of memory is tried again with a smaller plan. The target's layers
leave the GPU first, because each step of the draft delays every token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from localspec.protocol.frames import EngineSettings

MIN_CONTEXT = 2048  # tokens
# The number of layers if the target could not even be opened.
ASSUMED_LAYERS = 48


class Smaller(NamedTuple):
    """The next plan, what it reduces, and a sentence that says so."""

    settings: EngineSettings
    gives: Literal["layers", "context", "draft"]
    told: str


def smaller(settings: EngineSettings, layers: int, context: int, gpu: bool) -> Smaller | None:
    """Return the next plan; None if nothing is left to reduce.

    layers: of the target; 0: not known. context: the number of tokens that did not fit.
    """
    replace = msgspec.structs.replace
    if gpu and settings.n_gpu_layers:
        n_layers = (layers or ASSUMED_LAYERS) + 1  # the output counts as one
        n_placed = n_layers if settings.n_gpu_layers < 0 else min(settings.n_gpu_layers, n_layers)
        n_fewer = n_placed * 3 // 4 if n_placed > 4 else 0
        sentence = (
            f"Only {n_fewer} layers of the target are on the GPU, because its memory is full."
        )
        return Smaller(replace(settings, n_gpu_layers=n_fewer), "layers", sentence)
    if context > MIN_CONTEXT:
        n_ctx = max(MIN_CONTEXT, context // 2)
        sentence = f"The context is limited to {n_ctx} tokens, because memory is full."
        return Smaller(replace(settings, n_ctx=n_ctx), "context", sentence)
    if gpu and settings.draft_gpu_layers:
        sentence = "The draft runs on the CPU: the GPU is full."
        return Smaller(replace(settings, draft_gpu_layers=0), "draft", sentence)
    return None
