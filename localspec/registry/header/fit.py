"""Does a pair fit in memory? Arithmetic on headers; how much is free is passed in.

    memory = weights + cache + compute buffers, of both models

Cache per token: Σ over layers of kv_heads · (key_length + value_length) · bytes. Sliding windows
are counted whole, because they are kept whole (`swa_full`). The compute buffer is what
llama.cpp reserves for its widest batch: mostly one row of logits per token of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from localspec.errors import DoesNotFit
from localspec.registry.header.model import Model

# Bytes per cached number; q8_0 keeps 32 numbers in 34 bytes.
KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32}
UBATCH = 512  # llama.cpp's default physical batch
SMALLEST_CONTEXT = 2048
# More than most conversations need, and the caches of larger ones crowd out the weights.
USUAL_CONTEXT = 32_768
RUNTIME = 128 << 20  # a worker's own memory, backends loaded
MIB = 1 << 20

Fits = Literal["yes", "partly", "no"]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes one model needs at one context length."""

    weights: int
    cache: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes: main memory, and GPU memory (0 without a GPU)."""

    ram: int
    vram: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen. `gpu_layers` −1 means all; `notes` say in sentences what memory made give way, and
    `beyond` where more context was asked for than the models know.
    """

    context: int
    draft: bool
    gpu_layers: int
    draft_gpu_layers: int
    needed: int
    free: int
    notes: tuple[str, ...] = ()
    beyond: str = ""


def fits(needed: int, free: Memory) -> Fits:
    """Whether `free` holds so many bytes. "partly": not the GPU's memory, but with main memory."""
    if needed <= (free.vram or free.ram):
        return "yes"
    return "partly" if needed <= free.vram + free.ram else "no"


def cached_layers(model: Model) -> int:
    """Layers that keep a cache; in hybrid models every n-th."""
    return max(1, model.layers // model.attention_interval)


def cache_per_token(model: Model, kv_type: str = "f16") -> float:
    """Bytes of cache per token of context."""
    per_head = (model.key_length + model.value_length) * KV_BYTES[kv_type]
    return sum(model.kv_heads) * per_head * cached_layers(model) / model.layers


def need(model: Model, context: int, *, kv_type: str = "f16", parallel: int = 1) -> Need:
    """Bytes for `parallel` sequences of `context` tokens each."""
    logits = UBATCH * model.vocabulary * 4
    activations = UBATCH * (8 * model.width + 3 * model.feed_forward) * 4
    mask = UBATCH * context * 4
    return Need(
        weights=model.weights,
        cache=int(cache_per_token(model, kv_type) * context * parallel),
        compute=logits + activations + mask,
    )


def longest_context(target: Model, draft: Model | None) -> int:
    """The smaller of the two trained contexts."""
    return min(target.context, draft.context) if draft else target.context


def fit(
    target: Model,
    draft: Model | None,
    free: Memory,
    *,
    context: int = 0,
    kv_type: str = "f16",
    parallel: int = 1,
) -> Fit:
    """Choose context, GPU layers and whether the draft is loaded.

    `context` 0 chooses one: the trained one, at most USUAL_CONTEXT. First the context is halved,
    down to SMALLEST_CONTEXT, then the draft is left out.

    Raises:
        DoesNotFit: not even the target with the smallest context fits.
    """
    longest = longest_context(target, draft)
    wanted = min(context or USUAL_CONTEXT, longest)
    beyond = ""
    if context > longest:
        beyond = (
            f"The models support at most {longest} tokens of context; {context} were requested."
        )
    for with_draft in (draft, None) if draft else (None,):
        size = wanted
        while True:
            chosen = _place(target, with_draft, free, size, kv_type, parallel)
            if chosen is not None:
                notes = _what_gave(chosen, wanted, draft is not None)
                return replace(chosen, notes=tuple(notes), beyond=beyond)
            if size <= SMALLEST_CONTEXT:
                break
            size = max(SMALLEST_CONTEXT, size // 2)
    least = need(target, min(wanted, SMALLEST_CONTEXT), kv_type=kv_type).total + RUNTIME
    raise DoesNotFit(
        f"{target.name} needs {least // MIB} MiB with {min(wanted, SMALLEST_CONTEXT)} "
        f"tokens of context, but only {(free.ram + free.vram) // MIB} MiB are free; "
        "choose a smaller pair (localspec catalogue --fits)."
    )


def _place(
    target: Model, draft: Model | None, free: Memory, context: int, kv_type: str, parallel: int
) -> Fit | None:
    """Both on the GPU as far as they go, the rest in main memory; None: does not fit."""
    ours = need(target, context, kv_type=kv_type, parallel=parallel)
    theirs = need(draft, context, kv_type=kv_type, parallel=parallel) if draft else Need(0, 0, 0)
    total = ours.total + theirs.total + RUNTIME
    both = Fit(context, draft is not None, -1, -1 if draft else 0, total, free.ram + free.vram)
    if free.vram >= total - RUNTIME and free.ram >= RUNTIME:
        return both
    if total > free.ram + free.vram:
        return None
    if not free.vram:
        return replace(both, gpu_layers=0, draft_gpu_layers=0)
    # The draft goes first: each of its steps is on the path of every token.
    draft_layers = -1 if draft and theirs.total + ours.compute < free.vram else 0
    left = free.vram - ours.compute - (theirs.total if draft_layers else 0)
    per_layer = (ours.weights + ours.cache) / (target.layers + 1)  # output counts as one
    layers = max(0, min(target.layers, int(left / per_layer)))
    on_gpu = int(layers * per_layer) + (ours.compute if layers else 0)
    on_gpu += theirs.total if draft_layers else 0
    if total - on_gpu > free.ram:
        return None
    return replace(both, gpu_layers=layers, draft_gpu_layers=draft_layers)


def _what_gave(chosen: Fit, wanted: int, had_draft: bool) -> list[str]:
    notes = []
    if chosen.context < wanted:
        notes.append(
            f"Memory allows {chosen.context} tokens of context instead of {wanted} "
            f"({chosen.needed // MIB} MiB of {chosen.free // MIB} MiB free)."
        )
    if had_draft and not chosen.draft:
        notes.append("There is not enough memory for the draft model; decoding will be plain.")
    if chosen.gpu_layers > 0:
        notes.append(
            f"{chosen.gpu_layers} layers of the target go to the GPU, the rest to main memory."
        )
    return notes
