"""Decide whether a pair fits into memory, and with how much context. The free memory is passed in.

The need is computed from the headers of a pair, in the way llama.cpp allocates it:

    memory = weights + cache + compute buffers, of both models, + cached prompts + the worker's own memory

All sequences share one cache, so its size follows from the context. Sliding windows count in full, because
they are kept in full (`swa_full`). The compute buffer is what llama.cpp reserves for its widest pass: the
logits, the intermediate results of a layer for each row, and the attention mask.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from localspec.errors import DoesNotFit
from localspec.protocol.pairs import ForecastView, NeedView
from localspec.protocol.settings import (
    CPU_PASS_ROWS,
    KV_BLOCK_SIZE,
    SHORT_CONTEXT_TOKENS,
    FlashAttention,
    KvType,
)
from localspec.registry.header.architectures import is_hybrid
from localspec.registry.header.model import ModelInfo
from localspec.registry.header.rate import LayerBytes, Placement, RateEstimate, forecast
from localspec.registry.header.speeds import MemorySpeeds

# Bytes per cached number. A block of 32 numbers has a scale of two bytes, and in q5_1 also an offset.
KV_BYTES: dict[KvType, float] = {"f16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q4_0": 18 / 32}
F16: tuple[KvType, KvType] = "f16", "f16"
PASS_ROWS = 512  # of the widest pass (the engine's `n_batch`)
# The same where experts lie in main memory. A pass that reads a prompt copies them to the GPU, however many
# rows it has, so that few wide passes read it sooner.
WIDE_PASS_ROWS = 2048
# Rows of a pass of an embedding model: half as many if the model could also write text, and the whole context
# if a text must be read in one pass.
EMBEDDING_PASS_ROWS = 512
RUNTIME_BYTES = 128 << 20  # bytes of a worker's own memory, with the backends loaded
# Draft tokens in one pass, which need rows with logits: of each sequence, and those that a request or an
# n-gram match may add (the engine's MAX_DEPTH and MAX_DRAFTS).
_SEQUENCE_DRAFT_TOKENS, _ADDED_DRAFT_TOKENS = 15, 64
_STATES = 192  # target states that a sequence keeps for its draft (thrice the engine's TAIL_STATES)
# Copies of a recurrent state that the engine requests for models that roll back tokens by snapshots.
_SNAPSHOTS = 8
# Key lengths for which llama.cpp has CUDA kernels for flash attention (ggml-cuda's fattn.cu).
_FLASH_KEY_LENGTHS = frozenset({40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576})


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of loading a pair that affect memory.

    context: tokens, 0 if it is to be chosen. kv_types: the types of the cache's keys and values. parallel:
    the number of sequences. attention: "auto" on a device, else see
    `EngineSettings.cpu_flash_attention`. chosen: whether the CPU chose the attention. exact: whether
    there is a lane for exact mode, which has a cache of its own. prefixes: the maximum bytes for
    prompts without a slot. projector: the bytes that a projector for pictures needs. cuda: whether layers
    are on a GPU with CUDA's kernels. speeds: of both memories, by which placements are compared. foreseeable:
    whether it is known in which of them the layers will be. rows: of the target's widest pass.
    """

    context: int = 0
    kv_types: tuple[KvType, KvType] = F16
    parallel: int = 5
    attention: FlashAttention = "auto"
    chosen: bool = False
    exact: bool = False
    prefixes: int = 0
    projector: int = 0
    cuda: bool = False
    speeds: MemorySpeeds = field(default_factory=MemorySpeeds)
    foreseeable: bool = True
    rows: int = PASS_ROWS

    @property
    def quantizes(self) -> bool:
        """Whether another type of cache is possible."""
        return self.attention != "off" or self.chosen


NO_NEED = NeedView()


def supports_kv_types(model: ModelInfo, kv_types: tuple[KvType, KvType]) -> bool:
    """Return whether the model's cache can have these types."""
    pairs = zip(model.kept.heads, kv_types, strict=True)
    return all(
        kv_type == "f16" or not any(length % KV_BLOCK_SIZE for length in heads)
        for heads, kv_type in pairs
    )


def cache_per_token(model: ModelInfo, kv_types: tuple[KvType, KvType] = F16) -> float:
    """Return the bytes of cache per token of context."""
    return _cache_bytes((model.kept.keys, model.kept.values), kv_types)


def _cache_bytes(counts: tuple[int, int], kv_types: tuple[KvType, KvType]) -> float:
    return sum(count * KV_BYTES[kv_type] for count, kv_type in zip(counts, kv_types, strict=True))


def need_of_target(model: ModelInfo, load: LoadOptions) -> NeedView:
    """Return the bytes for the model that answers, with `load.context` tokens."""
    if model.pooling:
        return _need_of_embedding(model, load)
    rows = load.parallel * (_SEQUENCE_DRAFT_TOKENS + 1) + _ADDED_DRAFT_TOKENS
    need = _compute_need(model, load, load.parallel, rows, load.rows)
    need = msgspec.structs.replace(need, weights=need.weights + load.projector)
    if not load.exact:
        return need
    exact_load = replace(load, attention="auto") if load.chosen else load
    exact = _compute_need(model, exact_load, 1, PASS_ROWS)
    return msgspec.structs.replace(
        need, cache=need.cache + exact.cache, compute=need.compute + exact.compute
    )


def need_of_draft(model: ModelInfo, load: LoadOptions) -> NeedView:
    """Return the bytes for the draft. If it does not support the cache types, f16 is used for it."""
    if not supports_kv_types(model, load.kv_types):
        load = replace(load, kv_types=F16)
    sequences = load.parallel + 2  # one for the exact lane, one to look ahead
    need = _compute_need(model, load, sequences, max(sequences, 16))
    if model.sidecar and not model.reads_target_cache:
        # What the target's layers have read leaves each of its passes.
        layer_bytes = len(model.target_layers) * model.width * PASS_ROWS * 4
        cache = need.cache + _state_bytes(model, load, len(model.target_layers))
        need = msgspec.structs.replace(need, cache=cache, compute=need.compute + layer_bytes)
    if model.reads_target_cache and load.exact:
        # It reads the exact lane's cache in separate passes.
        return msgspec.structs.replace(need, compute=2 * need.compute)
    return need


def need_of_heads(model: ModelInfo, load: LoadOptions) -> NeedView:
    """Return the bytes for the model's own MTP heads, without their weights."""
    if not any(model.kept.ahead):
        return NO_NEED
    sequences = load.parallel + 2  # as for a draft
    need = _compute_need(model, load, 0, max(sequences, 16))
    cache = int(_cache_bytes(model.kept.ahead, load.kv_types) * load.context)
    return NeedView(0, cache + _state_bytes(model, load), need.compute)


def _state_bytes(model: ModelInfo, load: LoadOptions, layers: int = 1) -> int:
    """Return the bytes of the target's states that a draft has yet to read, of so many layers.

    They are those of a pass over prompts, and the last ones of each sequence.
    """
    return max(layers, 1) * model.width * 4 * (PASS_ROWS + load.parallel * _STATES)


def _need_of_embedding(model: ModelInfo, load: LoadOptions) -> NeedView:
    """Return the bytes for a model that turns texts of at most `load.context` tokens into numbers.

    llama.cpp reserves a row of logits for each token of a pass, and if the model could write text, computes
    them too.
    """
    can_write = not model.has_no_cache
    whole_text = load.context if model.needs_whole_text else 0
    rows = max(EMBEDDING_PASS_ROWS // (1 + can_write), whole_text)
    layer_bytes = rows * (8 * model.width + 3 * model.feed_forward) * 4
    mask_cells = rows * max(rows, load.context)
    has_scores = load.attention == "off" and not load.chosen
    attention_bytes = 4 * mask_cells * (model.heads + 1) if has_scores else 2 * mask_cells
    cache_bytes = cache_per_token(model) * max(rows, load.context) if can_write else 0
    return NeedView(
        weights=model.weights,
        cache=int(cache_bytes) + model.kept.state,
        compute=(1 + can_write) * rows * model.vocabulary * 4 + layer_bytes + attention_bytes,
    )


def _compute_need(
    model: ModelInfo, load: LoadOptions, sequences: int, rows: int, widest: int = PASS_ROWS
) -> NeedView:
    """Return the bytes of a model that decodes `sequences`, with logits for `rows` of a pass's rows."""
    copies = 1 + _SNAPSHOTS * (model.rollback == "snapshots")
    logit_bytes = rows * model.vocabulary * 4
    layer_bytes = widest * (8 * model.width + 3 * model.feed_forward + model.kept.beside) * 4
    # With a window there are two masks, one with it and one without.
    mask_cells = load.context * (2 if model.rollback == "short" or model.reads_target_cache else 1)
    always_flash = is_hybrid(model.architecture) and not model.sidecar
    always_flash = always_flash or load.context <= SHORT_CONTEXT_TOKENS
    has_scores = load.attention == "off" and not (load.chosen and always_flash)
    # llama.cpp turns flash attention off without a kernel.
    if load.cuda and load.attention == "auto":
        has_scores = not model.kept.heads[0] <= _FLASH_KEY_LENGTHS
    scored_rows = CPU_PASS_ROWS if load.chosen else widest
    score_bytes = 4 * mask_cells * scored_rows * (model.heads + 1)
    attention_bytes = score_bytes if has_scores else 2 * mask_cells * widest
    return NeedView(
        weights=model.weights,
        cache=int(cache_per_token(model, load.kv_types) * load.context)
        + model.kept.state * sequences * copies,
        # The logits count twice: in the buffer of the pass, and where they are read.
        compute=2 * logit_bytes + layer_bytes + attention_bytes,
    )


# Contexts, in tokens.
SMALLEST_CONTEXT = 2048
# A draft and layers on the GPU are given up for this much context, but not for more.
USUAL_CONTEXT = 8192
USUAL_INPUT = 2048  # for an embedding model that must read a text in one pass
AGENTS_CONTEXT = 65_536  # what programs that call tools usually need
_CONTEXT_STEP = 1024  # a chosen context is a multiple of it
# The first plan is only left for one that is estimated to be so much faster, and a context beyond the usual
# one may cost no more.
_MIN_RATE_GAIN = 1.02
# The share of the rate that must remain where the buffers of wide passes take memory from experts.
_MIN_WIDE_RATE = 0.95
# Tokens of text whose cache a pass is assumed to read, where placements are compared.
_ATTENDED_TOKENS = 4096
# A chosen context leaves 1/8 of the free memory to other programs, and at least 256 MiB.
_MARGIN_DIVISOR = 8
_MIN_MARGIN_BYTES = 256 << 20
_MAX_GPU_MARGIN_BYTES = 1 << 30  # less is left of a GPU, which few other programs use
# Prompts without a slot get 1/4 of the memory that weights and buffers leave.
_PREFIX_DIVISOR = 4
MIB = 1 << 20

Fits = Literal["yes", "partly", "no"]


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory in bytes: main memory and GPU memory (0 without a GPU)."""

    ram: int
    vram: int = 0

    @property
    def shared(self) -> FreeMemory:
        """The memory that a chosen context may use, so that some is left to other programs."""
        ram_margin, vram_margin = (
            max(_MIN_MARGIN_BYTES, free // _MARGIN_DIVISOR) for free in (self.ram, self.vram)
        )
        vram = self.vram - min(vram_margin, _MAX_GPU_MARGIN_BYTES)
        return FreeMemory(max(self.ram - ram_margin, 0), max(vram, 0))


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The chosen context and placement of a pair.

    target, drafting: the memory needs of the models. prefixes: bytes for prompts without a slot. needed: the
    sum of these and of the worker's own memory. free: the free bytes. on_gpu: the part of the needed bytes on
    the GPU. rate: estimated tokens per second. cpu_moe_layers: the first layers, whose experts lie in main
    memory in whole or in part, although the layers are on the GPU. rows: of the widest pass. apart: a
    sentence about experts in main memory. compared: a sentence about drafts and layers that compete for the
    GPU. others: the contexts that other types of KV cache allow, if longer. notes: sentences about what was
    limited by memory. beyond: a sentence if more context was requested than the target supports.
    """

    context: int
    placed: Placement
    needed: int
    free: int
    target: NeedView = NO_NEED
    drafting: NeedView = NO_NEED
    prefixes: int = 0
    on_gpu: int = 0
    rate: float = 0.0
    cpu_moe_layers: int = 0
    rows: int = PASS_ROWS
    apart: str = ""
    compared: str = ""
    others: Mapping[KvType, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    beyond: str = ""

    @property
    def draft(self) -> bool:
        """Whether the draft, or the target's own heads, are loaded."""
        return self.placed.drafts

    @property
    def gpu_layers(self) -> int:
        """The target's layers on the GPU; −1: all."""
        return self.placed.layers


def judge_fit(needed: int, free: FreeMemory) -> Fits:
    """Return whether `free` can hold so many bytes.

    "partly" means that it needs main memory besides the GPU's.
    """
    if needed <= (free.vram or free.ram):
        return "yes"
    return "partly" if needed <= free.vram + free.ram else "no"


def total_need(target: ModelInfo, draft: ModelInfo | None, load: LoadOptions) -> int:
    """Return the bytes needed with `load.context` tokens, without prompts that have no slot."""
    return sum(need.total for need in _list_needs(target, draft, load, drafts=True)) + RUNTIME_BYTES


def min_need(target: ModelInfo, load: LoadOptions) -> int:
    """Return the bytes needed with `load.context` tokens if nothing drafts."""
    return sum(need.total for need in _list_needs(target, None, load, drafts=False)) + RUNTIME_BYTES


def _list_needs(
    target: ModelInfo, draft: ModelInfo | None, load: LoadOptions, *, drafts: bool
) -> tuple[NeedView, NeedView]:
    """Return the needs of the target and of what drafts: the draft, or the target's own heads if any.

    drafts: if False, neither the draft nor the heads are loaded.
    """
    need = need_of_target(target, load)
    if drafts and draft is None:
        return need, need_of_heads(target, load)
    need = msgspec.structs.replace(need, weights=need.weights - target.head_weights)
    return need, need_of_draft(draft, load) if drafts and draft else NO_NEED


def has_drafts(target: ModelInfo, draft: ModelInfo | None) -> bool:
    """Whether a pair has a draft model, a sidecar, or heads of its own."""
    return draft is not None or any(target.kept.ahead)


def can_foresee(built: str | None, free: FreeMemory) -> bool:
    """Return whether it is known which memory a pair will lie in. `built`: llama.cpp's backend."""
    return built in (None, "cpu") or free.vram > 0


def forecast_fit(
    target: ModelInfo, draft: ModelInfo | None, fitted: MemoryFit, load: LoadOptions
) -> ForecastView | None:
    """Return how fast a pair should be as it fits; None for a model that writes no text."""
    if target.pooling or not load.foreseeable:
        return None
    return forecast(RateEstimate(target, draft, load.speeds), fitted.placed)


def fit_pair(
    target: ModelInfo, draft: ModelInfo | None, free: FreeMemory, load: LoadOptions
) -> MemoryFit:
    """Choose the context, the GPU layers and whether the draft is loaded.

    If memory is short, a requested context is reduced first, down to SMALLEST_CONTEXT, then the draft is
    dropped. If no context is requested, it is as long as fits, up to what the target was trained for, and
    leaves memory to other programs. A draft and layers on the GPU are preferred to more than USUAL_CONTEXT.

    Raises:
        DoesNotFit: not even the target with the smallest context fits.
    """
    if target.pooling:
        requested = load.context or (USUAL_INPUT if target.needs_whole_text else USUAL_CONTEXT)
        load = replace(load, context=min(requested, target.context), prefixes=0, exact=False)
    # A draft with a shorter context writes nonsense beyond it, which is rejected and costs little.
    max_context = target.context
    chosen = _choose(target, draft, free, load)
    if chosen is None:
        min_context = min(load.context or max_context, max_context, SMALLEST_CONTEXT)
        required = min_need(target, replace(load, context=min_context))
        raise DoesNotFit(
            f"{target.name} needs {required // MIB} MiB with {min_context} "
            f"tokens of context, but only {(free.ram + free.vram) // MIB} MiB are free; "
            "choose a smaller pair (localspec catalogue --fits)."
        )
    others: dict[KvType, int] = {}
    is_longest = chosen.context >= min(load.context or max_context, max_context)
    for kv_type in () if is_longest else KV_BYTES:
        keys, values = load.kv_types
        smaller = KV_BYTES[kv_type] < KV_BYTES[keys] and keys == values and load.quantizes
        if smaller and supports_kv_types(target, same_types := (kv_type, kv_type)):
            quantized = replace(load, kv_types=same_types, attention="auto", chosen=False)
            alternative = _choose(target, draft, free, quantized)
            if alternative and alternative.context > chosen.context:
                others[kv_type] = alternative.context
    beyond = ""
    if target.pooling:
        return chosen
    if load.context > max_context:
        beyond = f"The model supports at most {max_context} tokens of context; {load.context} were requested."
    chosen = replace(chosen, others=others, beyond=beyond)
    requested_context = min(load.context or AGENTS_CONTEXT, max_context)
    dropped = "draft model" if draft else "model's MTP heads"
    dropped = dropped if has_drafts(target, draft) and not chosen.draft else ""
    return replace(chosen, notes=tuple(_describe_limits(chosen, requested_context, load, dropped)))


def _describe_limits(
    chosen: MemoryFit, requested: int, load: LoadOptions, dropped: str
) -> Iterator[str]:
    if chosen.context < requested:
        free = f"({chosen.needed // MIB} MiB of {chosen.free // MIB} MiB free)"
        others = [*chosen.others.items()]
        option = next((item for item in others if item[1] >= requested), None)
        option = option or (others[-1] if others else None)
        hint = f' With kv_type = "{option[0]}" it would be {option[1]}.' if option else ""
        if load.context:
            yield (
                f"Memory allows {chosen.context} tokens of context instead of {requested} {free}.{hint}"
            )
        else:
            claim = "agents usually need" if requested == AGENTS_CONTEXT else "the model supports"
            yield f"Memory allows {chosen.context} tokens of context {free}; {claim} {requested}.{hint}"
    if chosen.compared:
        yield chosen.compared
    elif dropped:
        yield f"There is not enough memory for the {dropped}; decoding will be plain."
    if chosen.apart:
        yield chosen.apart
    elif chosen.gpu_layers > 0:
        yield f"{chosen.gpu_layers} layers of the target go to the GPU, the rest to main memory."


class _Attempt(NamedTuple):
    """Whether drafts are loaded, the contexts to search, and the memory that must hold everything.

    on_gpu: that of the GPU must. steady: a context beyond the first may cost little speed.
    """

    drafts: bool
    min_context: int
    max_context: int
    memory: FreeMemory
    on_gpu: bool = False
    steady: bool = False


def _choose(
    target: ModelInfo, draft: ModelInfo | None, free: FreeMemory, load: LoadOptions
) -> MemoryFit | None:
    max_context = min(load.context or target.context, target.context)
    attended = cache_per_token(target, load.kv_types) * min(max_context, _ATTENDED_TOKENS)
    pair = RateEstimate(target, draft, load.speeds, attended)
    attempts = _list_attempts(pair, free, load, max_context)
    fitting = (_find_longest_context(pair, attempt, load) for attempt in attempts)
    fitted = next(filter(None, fitting), None)
    reads_states = fitted and fitted.draft and (draft is None or draft.sidecar)
    if fitted and fitted.placed.cpu_experts and load.rows < WIDE_PASS_ROWS and not reads_states:
        wide = _choose(target, draft, free, replace(load, rows=WIDE_PASS_ROWS))
        if wide and wide.draft == fitted.draft and wide.rate >= fitted.rate * _MIN_WIDE_RATE:
            return wide
    return replace(fitted, free=free.ram + free.vram, rows=load.rows) if fitted else None


def _list_attempts(
    pair: RateEstimate[ModelInfo], free: FreeMemory, load: LoadOptions, max_context: int
) -> Iterator[_Attempt]:
    can_draft = has_drafts(pair.target, pair.draft)
    steady = free.vram > 0 and len(pair.weights.trunk.experts) > 0
    usual_context, min_context = min(max_context, USUAL_CONTEXT), min(max_context, SMALLEST_CONTEXT)
    for drafts in (True, False) if can_draft else (False,):
        if load.context:
            yield _Attempt(drafts, min_context, max_context, free)
            continue
        if free.vram:
            yield _Attempt(drafts, usual_context, max_context, free.shared, on_gpu=True)
        acceptable = usual_context if drafts else min_context
        longest = usual_context if free.vram and not steady else max_context
        yield _Attempt(drafts, acceptable, longest, free.shared, steady=steady)
        yield _Attempt(drafts, acceptable, usual_context, free)


def _find_longest_context(
    pair: RateEstimate[ModelInfo], attempt: _Attempt, load: LoadOptions
) -> MemoryFit | None:
    reserved = 0
    if not load.context:  # prompts without a slot get a share of the memory that the caches have
        drafts = pair.draft.weights if pair.draft and attempt.drafts else 0
        free = attempt.memory.ram + attempt.memory.vram - pair.target.weights - drafts
        available = min(attempt.memory.ram, free)
        reserved = max(min(load.prefixes, available // _PREFIX_DIVISOR), 0)

    min_rate = 0.0

    def try_context(context: int) -> MemoryFit | None:
        plan = _place_pair(pair, attempt, replace(load, context=context), reserved)
        return plan if plan and plan.rate >= min_rate else None

    if attempt.steady and (usual := try_context(min(attempt.max_context, USUAL_CONTEXT))):
        min_rate = usual.rate / _MIN_RATE_GAIN
    if longest := try_context(attempt.max_context):
        return longest
    longest = try_context(attempt.min_context)
    fitting_steps = attempt.min_context // _CONTEXT_STEP
    failing_steps = -(-attempt.max_context // _CONTEXT_STEP)
    while longest and failing_steps - fitting_steps > 1:
        middle = (fitting_steps + failing_steps) // 2
        if longer := try_context(middle * _CONTEXT_STEP):
            fitting_steps, longest = middle, longer
        else:
            failing_steps = middle
    return longest


def _place_pair(
    pair: RateEstimate[ModelInfo], attempt: _Attempt, load: LoadOptions, reserved: int
) -> MemoryFit | None:
    """Place both models, in the fastest way where drafts and layers of the target compete for the GPU.

    reserved: bytes that must stay free for prompts. Returns None if that does not fit.
    """

    def place(placed: Placement) -> MemoryFit | None:
        return _place_target(pair, attempt, load, reserved, placed)

    if not attempt.drafts:
        return place(Placement(draft_layers=0, drafts=False))
    # The draft on the GPU comes first: of equals, the first is taken.
    plans = [place(Placement())]
    if pair.draft_weights and (plans[0] is None or _is_divided(plans[0])):
        if experts := pair.draft_weights.trunk.experts:
            plan = place(Placement(draft_cpu_experts=len(experts)))
            if plan and not _is_divided(plan):
                spare = attempt.memory.vram - plan.on_gpu
                plan = place(Placement(draft_cpu_experts=_count_apart(experts, spare)))
            plans.append(plan)
        plans.append(place(Placement(draft_layers=0)))
    fitting = [plan for plan in plans if plan]
    first = fitting[0] if fitting else None
    if first is None or not attempt.memory.vram or not _is_divided(first):
        return first
    if plain := place(Placement(draft_layers=0, drafts=False)):
        fitting.append(plain)
    return _choose_fastest(fitting, pair)


def _is_divided(plan: MemoryFit) -> bool:
    return plan.gpu_layers >= 0 or plan.placed.cpu_experts > 0


def _choose_fastest(plans: Sequence[MemoryFit], pair: RateEstimate[ModelInfo]) -> MemoryFit:
    """Return the fastest plan, with a sentence about the one it is compared with.

    The first has the draft on the GPU.
    """
    rates = [plan.rate for plan in plans]
    best = max(range(len(plans)), key=rates.__getitem__)
    if rates[best] < rates[0] * _MIN_RATE_GAIN:
        best = 0
    other = 0 if best else len(plans) - 1
    chosen, rejected = plans[best], plans[other]
    if chosen.placed[:2] == rejected.placed[:2]:
        return chosen
    what, layers = (
        "draft" if pair.draft else "MTP heads",
        _describe_layers(chosen, " of the target"),
    )
    place = "experts of the draft lie" if chosen.placed.draft_cpu_experts else f"{what} runs"
    claims = {
        (True, True): f"The {what} and {layers} share the GPU",
        (True, False): f"The {place} on the CPU, which leaves the GPU to the target",
        (False, False): f"Without drafts, {layers} are on the GPU",
    }
    drafts_on_gpu = chosen.placed.draft_layers != 0 and not chosen.placed.draft_cpu_experts
    return replace(
        chosen,
        compared=(
            f"{claims[chosen.draft, drafts_on_gpu]}: about {rates[best]:.3g} tokens/s, "
            f"instead of {rates[other]:.3g} with {_describe_layers(rejected)} there"
            f"{'' if rejected.draft else ' and no drafts'} (estimated)."
        ),
    )


def _describe_layers(plan: MemoryFit, of_model: str = "") -> str:
    layers = "all layers" if plan.gpu_layers < 0 else f"{plan.gpu_layers} layers"
    apart = f" but the experts of the first {plan.cpu_moe_layers}" if plan.cpu_moe_layers else ""
    return f"{layers}{of_model}{apart}"


def _place_target(
    pair: RateEstimate[ModelInfo],
    attempt: _Attempt,
    load: LoadOptions,
    reserved: int,
    placed: Placement,
) -> MemoryFit | None:
    """Place the target on the GPU beside its drafts, as far as possible, in the fastest way.

    reserved: bytes that must stay free for prompts. placed: where the draft lies. If the GPU does not hold
    that, it lies in main memory. Returns None if memory does not hold all.
    """
    need, draft_need = _list_needs(pair.target, pair.draft, load, drafts=placed.drafts)
    memory, draft_on_gpu, draft = attempt.memory, 0, pair.draft_weights
    if placed.draft_layers:
        apart = draft.inputs + sum(draft.trunk.experts[: placed.draft_cpu_experts]) if draft else 0
        draft_on_gpu = draft_need.total - int(apart)
        if draft_on_gpu > memory.vram or not memory.vram:
            placed, draft_on_gpu = placed._replace(draft_layers=0, draft_cpu_experts=0), 0
    plans: list[MemoryFit] = []
    for division in _divide_target(pair, need, placed.drafts, memory.vram - draft_on_gpu):
        all_on_gpu = division.layers < 0 and not division.cpu_experts
        compute, on_gpu = need.compute + division.copied, draft_on_gpu + division.on_gpu
        divided = msgspec.structs.replace(need, compute=compute)
        needed = divided.total + draft_need.total + RUNTIME_BYTES
        remaining = memory.ram - (needed - on_gpu)
        if remaining < reserved or (attempt.on_gpu and not all_on_gpu):
            continue
        where = placed._replace(layers=division.layers, cpu_experts=division.cpu_experts)
        prefixes = min(load.prefixes, max(remaining // 2, reserved))
        plans.append(
            MemoryFit(
                context=load.context,
                placed=where,
                needed=needed + prefixes,
                free=0,
                target=divided,
                drafting=draft_need,
                prefixes=prefixes,
                on_gpu=on_gpu,
                rate=pair.tokens_per_second(where),
                cpu_moe_layers=pair.weights.count_moe_layers(division.cpu_experts),
            )
        )
    return _choose_division(plans) if plans else None


def _choose_division(plans: Sequence[MemoryFit]) -> MemoryFit:
    """Return the fastest plan, with a sentence about experts in main memory. The first has whole layers."""
    best, whole = max(plans, key=lambda plan: plan.rate), plans[0]
    if not best.cpu_moe_layers:
        return best
    other = f", instead of {whole.rate:.3g} with {_describe_layers(whole)} on the GPU"
    apart = (
        f"The experts of the first {best.cpu_moe_layers} layers lie in main memory: about "
        f"{best.rate:.3g} tokens/s{'' if whole is best else other} (estimated)."
    )
    return replace(best, apart=apart)


class _Division(NamedTuple):
    """The target's layers on the GPU, the experts of these that are not, and the bytes there.

    copied: the part of the bytes for experts that wide passes copy to the GPU.
    """

    layers: int
    cpu_experts: int
    on_gpu: int
    copied: int = 0


def _divide_target(
    pair: RateEstimate[ModelInfo], need: NeedView, drafts: bool, vram: int
) -> Iterator[_Division]:
    """Yield how `vram` bytes of a GPU can be used: for all, for whole layers, or for layers before experts.

    The layers count as equally large. A byte of dense weights or of the cache is read by every pass, and one
    of experts by few, so the experts of all layers leave the GPU before the first layer does.
    """
    weights, n_layers = pair.weights, pair.count_layers(drafts)
    heads = weights.heads if n_layers > pair.target.trunk_layers else LayerBytes()
    experts = (*weights.trunk.experts, *heads.experts)
    dense, sum_of_experts = weights.trunk.dense + heads.dense + need.cache, sum(experts)
    fixed = need.total - weights.inputs - dense - sum_of_experts  # the output and the buffers
    skipped = pair.target.layers - n_layers  # heads without weights still count as layers
    if vram and fixed + dense + sum_of_experts <= vram:
        yield _Division(-1, 0, int(need.total - weights.inputs))
        return
    per_layer, layers = (dense + sum_of_experts) / n_layers, 0
    if count := max(int((vram - fixed) / per_layer), 0) if per_layer else 0:
        layers = count + 1 + skipped
    yield _Division(layers, 0, int(fixed + count * per_layer) if count else 0)
    if not vram or not experts:
        return
    copied = max(experts)
    spare = vram - fixed - copied - dense
    if spare >= 0:
        apart = _count_apart(experts, spare)
        on_gpu = fixed + copied + dense + sum(experts[apart:])
        yield _Division(-1, apart, int(on_gpu), int(copied))
    elif count := max(int((spare + dense) * n_layers / dense), 0):
        on_gpu = fixed + copied + count * dense / n_layers
        yield _Division(count + 1 + skipped, len(experts), int(on_gpu), int(copied))


def _count_apart(experts: Sequence[float], spare: float) -> int:
    """Return how many tensors of experts must leave for the others to fit into `spare` bytes."""
    sizes = list(accumulate(reversed(experts), initial=0.0))  # bytes of the last n tensors
    return len(sizes) - bisect.bisect_right(sizes, spare)
