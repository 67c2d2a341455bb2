"""Does a pair fit in memory, and with how much context? How much memory is free is passed in."""

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
    takes,
)

SMALLEST_CONTEXT = 2048
USUAL_CONTEXT = 8192  # more of it goes before layers on the GPU and a draft, and less does not
USUAL_INPUT = 2048  # of an embedding model, one pass of which must have all of a text
AGENTS_CONTEXT = 65_536  # what programs that call tools are made for
_STEP = 1024  # tokens: a context that is chosen is a multiple of it
# Of free memory, the part that a chosen context leaves to other programs, and the least of it.
_MARGIN_SHARE = 8
_LEAST_MARGIN = 256 << 20
_MOST_OF_GPU = 1 << 30  # on a GPU there are few others
_PREFIX_SHARE = 4  # of what is left beside weights and buffers, prompts without a slot get one part
MIB = 1 << 20

Fits = Literal["yes", "partly", "no"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes: main memory, and GPU memory (0 without a GPU)."""

    ram: int
    vram: int = 0

    @property
    def shared(self) -> Memory:
        """What of it a context that we choose may have: other programs need some, too."""
        vram = self.vram - min(_margin(self.vram), _MOST_OF_GPU)
        return Memory(max(self.ram - _margin(self.ram), 0), max(vram, 0))


def _margin(free: int) -> int:
    return max(_LEAST_MARGIN, free // _MARGIN_SHARE)


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen. `gpu_layers` −1 means all.

    target, drafting: what each model needs; prefixes: bytes for prompts without a slot; needed: all of it,
    and the worker's own; on_gpu: what of it lies there. others: the context by other types of cache, where
    it would be longer. `notes` say in sentences what memory made give way, `beyond` where more context was
    asked for than the target knows.
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
    """Whether `free` holds so many bytes. "partly": not the GPU's memory, but with main memory."""
    if needed <= (free.vram or free.ram):
        return "yes"
    return "partly" if needed <= free.vram + free.ram else "no"


def needed(target: Model, draft: Model | None, load: Load) -> int:
    """Bytes in all with `load.context` tokens, but for prompts without a slot."""
    return need_of_target(target, load).total + _drafting(target, draft, load).total + RUNTIME


def _drafting(target: Model, draft: Model | None, load: Load) -> Need:
    """What drafts: the draft, or else the target's own heads, if it has some."""
    return need_of_draft(draft, load) if draft else need_of_heads(target, load)


def fit(target: Model, draft: Model | None, free: Memory, load: Load) -> Fit:
    """Choose context, GPU layers and whether the draft is loaded.

    A context that was asked for gives way first where memory does not hold it, down to SMALLEST_CONTEXT,
    then the draft. Otherwise the context is as long as fits, up to what the target was trained for, and
    leaves memory to other programs; a draft and layers on the GPU go before more than USUAL_CONTEXT.

    Raises:
        DoesNotFit: not even the target with the smallest context fits.
    """
    if target.pooling:
        most = load.context or (USUAL_INPUT if target.reads_whole else USUAL_CONTEXT)
        load = replace(load, context=min(most, target.context), prefixes=0, exact=False)
    longest = target.context  # what a draft says beyond its own is not accepted, and costs little
    chosen = _chosen(target, draft, free, load)
    if chosen is None:
        least = min(load.context or longest, longest, SMALLEST_CONTEXT)
        required = needed(target, None, replace(load, context=least))
        raise DoesNotFit(
            f"{target.name} needs {required // MIB} MiB with {least} "
            f"tokens of context, but only {(free.ram + free.vram) // MIB} MiB are free; "
            "choose a smaller pair (localspec catalogue --fits)."
        )
    others = []
    for kv_type in KV_BYTES:
        keys, values = load.kv_types
        smaller = KV_BYTES[kv_type] < KV_BYTES[keys] and keys == values and load.quantizes
        if smaller and takes(target, both := (kv_type, kv_type)):
            quantized = replace(load, kv_types=both, attention="auto", chosen=False)
            other = _chosen(target, draft, free, quantized)
            if other and other.context > chosen.context:
                others.append((kv_type, other.context))
    beyond = ""
    if target.pooling:
        return replace(chosen, others=())
    if load.context > longest:
        beyond = f"The model supports at most {longest} tokens of context; {load.context} were requested."
    chosen = replace(chosen, others=tuple(others), beyond=beyond)
    wanted = min(load.context or AGENTS_CONTEXT, longest)
    return replace(chosen, notes=tuple(_notes(chosen, wanted, load, draft is not None)))


def _notes(chosen: Fit, wanted: int, load: Load, had_draft: bool) -> Iterator[str]:
    if chosen.context < wanted:
        free = f"({chosen.needed // MIB} MiB of {chosen.free // MIB} MiB free)"
        by_type = next((each for each in chosen.others if each[1] >= wanted), None)
        by_type = by_type or (chosen.others[-1] if chosen.others else None)
        hint = f' With kv_type = "{by_type[0]}" it would be {by_type[1]}.' if by_type else ""
        if load.context:
            yield (
                f"Memory allows {chosen.context} tokens of context instead of {wanted} {free}.{hint}"
            )
        else:
            more = "agents usually need" if wanted == AGENTS_CONTEXT else "the model supports"
            yield f"Memory allows {chosen.context} tokens of context {free}; {more} {wanted}.{hint}"
    if had_draft and not chosen.draft:
        yield "There is not enough memory for the draft model; decoding will be plain."
    if chosen.gpu_layers > 0:
        yield f"{chosen.gpu_layers} layers of the target go to the GPU, the rest to main memory."


class _Try(NamedTuple):
    """A draft or none, the contexts to look among, and where all of it must lie."""

    draft: Model | None
    least: int
    most: int
    room: Memory
    on_gpu: bool = False


def _chosen(target: Model, draft: Model | None, free: Memory, load: Load) -> Fit | None:
    most = min(load.context or target.context, target.context)
    for tried in _tries(draft, free, load, most):
        if found := _largest(target, tried, load):
            return replace(found, free=free.ram + free.vram)
    return None


def _tries(draft: Model | None, free: Memory, load: Load, most: int) -> Iterator[_Try]:
    """In the order of preference."""
    usual, least = min(most, USUAL_CONTEXT), min(most, SMALLEST_CONTEXT)
    for each in (draft, None) if draft else (None,):
        if load.context:
            yield _Try(each, least, most, free)
            continue
        if free.vram:
            yield _Try(each, usual, most, free.shared, on_gpu=True)
        enough = usual if each else least
        yield _Try(each, enough, usual if free.vram else most, free.shared)
        yield _Try(each, enough, usual, free)


def _largest(target: Model, tried: _Try, load: Load) -> Fit | None:
    """With the longest context that fits."""

    def placed(context: int) -> Fit | None:
        return _place(target, tried, replace(load, context=context), kept_free)

    kept_free = 0 if load.context else _for_prefixes(target, tried, load)
    if found := placed(tried.most):
        return found
    found = placed(tried.least)
    fitting, too_long = tried.least // _STEP, -(-tried.most // _STEP)
    while found and too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if better := placed(middle * _STEP):
            fitting, found = middle, better
        else:
            too_long = middle
    return found


def _for_prefixes(target: Model, tried: _Try, load: Load) -> int:
    """What prompts without a slot get of the memory that is shared by caches."""
    weights = target.weights + (tried.draft.weights if tried.draft else 0)
    room = min(tried.room.ram, tried.room.ram + tried.room.vram - weights)
    return max(min(load.prefixes, room // _PREFIX_SHARE), 0)


def _place(target: Model, tried: _Try, load: Load, kept_free: int) -> Fit | None:
    """Both on the GPU as far as they go, the rest in main memory; None: does not fit."""
    ours = need_of_target(target, load)
    theirs = _drafting(target, tried.draft, load)
    models, room = ours.total + theirs.total, tried.room
    layers, draft_layers, on_gpu = 0, 0, 0
    if room.vram >= models:
        layers, draft_layers, on_gpu = -1, -1 if tried.draft else 0, models
    elif tried.on_gpu:
        return None
    elif room.vram:
        # The draft goes first: each of its steps is on the path of every token.
        draft_layers = -1 if tried.draft and theirs.total + ours.compute < room.vram else 0
        left = room.vram - ours.compute - (theirs.total if draft_layers else 0)
        per_layer = (ours.weights + ours.cache) / (target.layers + 1)  # output counts as one
        layers = max(0, min(target.layers, int(left / per_layer)))
        on_gpu = int(layers * per_layer) + (ours.compute if layers else 0)
        on_gpu += theirs.total if draft_layers else 0
    left = room.ram - RUNTIME - (models - on_gpu)
    if left < kept_free:
        return None
    prefixes = min(load.prefixes, max(left // 2, kept_free))
    return Fit(
        context=load.context,
        draft=tried.draft is not None,
        gpu_layers=layers,
        draft_gpu_layers=draft_layers,
        needed=models + RUNTIME + prefixes,
        free=0,
        target=ours,
        drafting=theirs,
        prefixes=prefixes,
        on_gpu=on_gpu,
    )
