"""Decide whether a pair fits into memory, and with how much context.

The amount of free memory is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from localspec.errors import DoesNotFit
from localspec.protocol.settings import KvType
from localspec.registry.header.model import Model
from localspec.registry.header.need import (
    KV_BYTES,
    NOTHING,
    RUNTIME,
    Load,
    Need,
    need_of_draft,
    need_of_heads,
    need_of_target,
    supports_kv_types,
)

# Contexts, in tokens.
SMALLEST_CONTEXT = 2048
# A draft and layers on the GPU are given up for this much context, but not for more.
USUAL_CONTEXT = 8192
USUAL_INPUT = 2048  # for an embedding model that must read a text in one pass
AGENTS_CONTEXT = 65_536  # what programs that call tools usually need
_CONTEXT_STEP = 1024  # a chosen context is a multiple of it
# A chosen context leaves 1/8 of the free memory to other programs, and at least 256 MiB.
_MARGIN_DIVISOR = 8
_MIN_MARGIN_BYTES = 256 << 20
_MAX_GPU_MARGIN_BYTES = 1 << 30  # less is left of a GPU, which few other programs use
# Prompts without a slot get 1/4 of the memory that weights and buffers leave.
_PREFIX_DIVISOR = 4
MIB = 1 << 20

Fits = Literal["yes", "partly", "no"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Free memory in bytes: main memory and GPU memory (0 without a GPU)."""

    ram: int
    vram: int = 0

    @property
    def shared(self) -> Memory:
        """The memory that a chosen context may use, so that some is left to other programs."""
        vram = self.vram - min(_reserve_margin(self.vram), _MAX_GPU_MARGIN_BYTES)
        return Memory(max(self.ram - _reserve_margin(self.ram), 0), max(vram, 0))


def _reserve_margin(free: int) -> int:
    return max(_MIN_MARGIN_BYTES, free // _MARGIN_DIVISOR)


@dataclass(frozen=True, slots=True)
class Fit:
    """The chosen context and placement of a pair. `gpu_layers` −1 means all.

    target, drafting: the memory needs of the models. prefixes: bytes for prompts without a slot. needed: the
    sum of these and of the worker's own memory. free: the free bytes. on_gpu: the part of the needed bytes
    on the GPU. others: the contexts that other types of KV cache allow, if longer. notes: sentences about
    what was limited by memory. beyond: a sentence if more context was requested than the target supports.
    """

    context: int
    draft: bool
    gpu_layers: int
    draft_gpu_layers: int
    needed: int
    free: int
    target: Need = NOTHING
    drafting: Need = NOTHING
    prefixes: int = 0
    on_gpu: int = 0
    others: tuple[tuple[KvType, int], ...] = ()
    notes: tuple[str, ...] = ()
    beyond: str = ""


def fits(needed: int, free: Memory) -> Fits:
    """Return whether `free` can hold so many bytes.

    "partly" means that it needs main memory besides the GPU's.
    """
    if needed <= (free.vram or free.ram):
        return "yes"
    return "partly" if needed <= free.vram + free.ram else "no"


def needed(target: Model, draft: Model | None, load: Load) -> int:
    """Return the bytes needed with `load.context` tokens, without prompts that have no slot."""
    return need_of_target(target, load).total + _drafting_need(target, draft, load).total + RUNTIME


def _drafting_need(target: Model, draft: Model | None, load: Load) -> Need:
    """Return the needs of what drafts: the draft, or the target's own heads if it has any."""
    return need_of_draft(draft, load) if draft else need_of_heads(target, load)


def fit(target: Model, draft: Model | None, free: Memory, load: Load) -> Fit:
    """Choose the context, the GPU layers and whether the draft is loaded.

    If memory is short, a requested context is reduced first, down to SMALLEST_CONTEXT, then the draft is
    dropped. If no context is requested, it is as long as fits, up to what the target was trained for, and
    leaves memory to other programs. A draft and layers on the GPU are preferred to more than USUAL_CONTEXT.

    Raises:
        DoesNotFit: not even the target with the smallest context fits.
    """
    if target.pooling:
        requested = load.context or (USUAL_INPUT if target.reads_whole else USUAL_CONTEXT)
        load = replace(load, context=min(requested, target.context), prefixes=0, exact=False)
    # A draft with a shorter context writes nonsense beyond it, which is rejected and costs little.
    max_context = target.context
    chosen = _choose(target, draft, free, load)
    if chosen is None:
        min_context = min(load.context or max_context, max_context, SMALLEST_CONTEXT)
        required = needed(target, None, replace(load, context=min_context))
        raise DoesNotFit(
            f"{target.name} needs {required // MIB} MiB with {min_context} "
            f"tokens of context, but only {(free.ram + free.vram) // MIB} MiB are free; "
            "choose a smaller pair (localspec catalogue --fits)."
        )
    alternatives = []
    for kv_type in KV_BYTES:
        keys, values = load.kv_types
        smaller = KV_BYTES[kv_type] < KV_BYTES[keys] and keys == values and load.quantizes
        if smaller and supports_kv_types(target, same_types := (kv_type, kv_type)):
            quantized = replace(load, kv_types=same_types, attention="auto", chosen=False)
            alternative = _choose(target, draft, free, quantized)
            if alternative and alternative.context > chosen.context:
                alternatives.append((kv_type, alternative.context))
    beyond = ""
    if target.pooling:
        return replace(chosen, others=())
    if load.context > max_context:
        beyond = f"The model supports at most {max_context} tokens of context; {load.context} were requested."
    chosen = replace(chosen, others=tuple(alternatives), beyond=beyond)
    requested_context = min(load.context or AGENTS_CONTEXT, max_context)
    return replace(
        chosen, notes=tuple(_describe_limits(chosen, requested_context, load, draft is not None))
    )


def _describe_limits(chosen: Fit, requested: int, load: Load, has_draft: bool) -> Iterator[str]:
    """Yield sentences about what was limited by memory."""
    if chosen.context < requested:
        free = f"({chosen.needed // MIB} MiB of {chosen.free // MIB} MiB free)"
        option = next((item for item in chosen.others if item[1] >= requested), None)
        option = option or (chosen.others[-1] if chosen.others else None)
        hint = f' With kv_type = "{option[0]}" it would be {option[1]}.' if option else ""
        if load.context:
            yield (
                f"Memory allows {chosen.context} tokens of context instead of {requested} {free}.{hint}"
            )
        else:
            claim = "agents usually need" if requested == AGENTS_CONTEXT else "the model supports"
            yield f"Memory allows {chosen.context} tokens of context {free}; {claim} {requested}.{hint}"
    if has_draft and not chosen.draft:
        yield "There is not enough memory for the draft model; decoding will be plain."
    if chosen.gpu_layers > 0:
        yield f"{chosen.gpu_layers} layers of the target go to the GPU, the rest to main memory."


class _Attempt(NamedTuple):
    """A draft or none, the range of contexts to search, and the memory that must hold everything."""

    draft: Model | None
    min_context: int
    max_context: int
    memory: Memory
    on_gpu: bool = False


def _choose(target: Model, draft: Model | None, free: Memory, load: Load) -> Fit | None:
    """Return the first fit in the order of preference, or None."""
    max_context = min(load.context or target.context, target.context)
    for attempt in _list_attempts(draft, free, load, max_context):
        if fitted := _find_longest_context(target, attempt, load):
            return replace(fitted, free=free.ram + free.vram)
    return None


def _list_attempts(
    draft: Model | None, free: Memory, load: Load, max_context: int
) -> Iterator[_Attempt]:
    """Yield the attempts in the order of preference."""
    usual_context, min_context = min(max_context, USUAL_CONTEXT), min(max_context, SMALLEST_CONTEXT)
    for candidate in (draft, None) if draft else (None,):
        if load.context:
            yield _Attempt(candidate, min_context, max_context, free)
            continue
        if free.vram:
            yield _Attempt(candidate, usual_context, max_context, free.shared, on_gpu=True)
        acceptable_context = usual_context if candidate else min_context
        yield _Attempt(
            candidate, acceptable_context, usual_context if free.vram else max_context, free.shared
        )
        yield _Attempt(candidate, acceptable_context, usual_context, free)


def _find_longest_context(target: Model, attempt: _Attempt, load: Load) -> Fit | None:
    """Return the fit with the longest context that fits, or None."""

    def try_context(context: int) -> Fit | None:
        return _place_models(target, attempt, replace(load, context=context), reserved)

    reserved = 0 if load.context else _reserve_for_prefixes(target, attempt, load)
    if longest := try_context(attempt.max_context):
        return longest
    longest = try_context(attempt.min_context)
    fitting_steps, failing_steps = (
        attempt.min_context // _CONTEXT_STEP,
        -(-attempt.max_context // _CONTEXT_STEP),
    )
    while longest and failing_steps - fitting_steps > 1:
        middle = (fitting_steps + failing_steps) // 2
        if longer := try_context(middle * _CONTEXT_STEP):
            fitting_steps, longest = middle, longer
        else:
            failing_steps = middle
    return longest


def _reserve_for_prefixes(target: Model, attempt: _Attempt, load: Load) -> int:
    """Return the bytes that prompts without a slot get of the memory shared by caches."""
    weights = target.weights + (attempt.draft.weights if attempt.draft else 0)
    available = min(attempt.memory.ram, attempt.memory.ram + attempt.memory.vram - weights)
    return max(min(load.prefixes, available // _PREFIX_DIVISOR), 0)


def _place_models(target: Model, attempt: _Attempt, load: Load, reserved: int) -> Fit | None:
    """Place both models on the GPU as far as possible and the others in main memory.

    reserved: bytes that must stay free for prompts. Returns None if that does not fit.
    """
    target_need = need_of_target(target, load)
    draft_need = _drafting_need(target, attempt.draft, load)
    model_bytes, memory = target_need.total + draft_need.total, attempt.memory
    layers, draft_layers, on_gpu = 0, 0, 0
    if memory.vram >= model_bytes:
        layers, draft_layers, on_gpu = -1, -1 if attempt.draft else 0, model_bytes
    elif attempt.on_gpu:
        return None
    elif memory.vram:
        # The draft goes first: each of its steps is on the path of every token.
        draft_layers = (
            -1 if attempt.draft and draft_need.total + target_need.compute < memory.vram else 0
        )
        remaining = memory.vram - target_need.compute - (draft_need.total if draft_layers else 0)
        # The output matrix counts as one more layer.
        per_layer = (target_need.weights + target_need.cache) / (target.layers + 1)
        layers = max(0, min(target.layers, int(remaining / per_layer)))
        on_gpu = int(layers * per_layer) + (target_need.compute if layers else 0)
        on_gpu += draft_need.total if draft_layers else 0
    remaining = memory.ram - RUNTIME - (model_bytes - on_gpu)
    if remaining < reserved:
        return None
    prefixes = min(load.prefixes, max(remaining // 2, reserved))
    return Fit(
        context=load.context,
        draft=attempt.draft is not None,
        gpu_layers=layers,
        draft_gpu_layers=draft_layers,
        needed=model_bytes + RUNTIME + prefixes,
        free=0,
        target=target_need,
        drafting=draft_need,
        prefixes=prefixes,
        on_gpu=on_gpu,
    )
