"""Compute how much memory a pair needs, from its headers and in the way llama.cpp allocates it.

    memory = weights + cache + compute buffers, of both models, + cached prompts + the worker's own memory

All sequences share one cache, so its size follows from the context. Sliding windows count in full, because
they are kept in full (`swa_full`). The compute buffer is what llama.cpp reserves for its widest pass: the
logits, the intermediate results of a layer for each row, and the attention mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localspec.protocol.settings import KV_BLOCK, SCORED_ROWS, SHORT, FlashAttention, KvType
from localspec.registry.header.architectures import is_hybrid
from localspec.registry.header.model import Model

# Bytes per cached number. A block of 32 numbers has a scale of two bytes, and in q5_1 also an offset.
KV_BYTES: dict[KvType, float] = {"f16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q4_0": 18 / 32}
F16: tuple[KvType, KvType] = "f16", "f16"
PASS_ROWS = 512  # of the widest pass (the engine's `n_batch`)
# Rows of a pass of an embedding model: half as many if the model could also write text, and the whole context
# if a text must be read in one pass.
EMBEDDING_PASS_ROWS = 512
RUNTIME = 128 << 20  # bytes of a worker's own memory, with the backends loaded
# Draft tokens in one pass, which need rows with logits: of each sequence, and those that a request or an
# n-gram match may add (the engine's MAX_DEPTH and MAX_LIMIT).
_SEQUENCE_DRAFT_TOKENS, _ADDED_DRAFT_TOKENS = 15, 64
# Target states that MTP heads may still read, per sequence (the engine's MOST_BYTES).
_HEAD_STATE_BYTES = 32 << 20
# Copies of a recurrent state that the engine requests for models that roll back tokens by snapshots.
_SNAPSHOTS = 8


# Key lengths for which llama.cpp has CUDA kernels for flash attention (ggml-cuda's fattn.cu).
_FLASH_KEY_LENGTHS = frozenset({40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576})


@dataclass(frozen=True, slots=True)
class Load:
    """The options of loading a pair that affect memory.

    context: tokens, 0 if it is to be chosen. kv_types: the types of the cache's keys and values. parallel:
    the number of sequences. attention: "auto" on a device, else as the settings' `on_cpu`. chosen: whether
    the CPU chose the attention. exact: whether there is a lane for exact mode, which has a cache of its own.
    prefixes: the maximum bytes for prompts without a slot. cuda: whether layers are on a GPU with CUDA's
    kernels.
    """

    context: int = 0
    kv_types: tuple[KvType, KvType] = F16
    parallel: int = 5
    attention: FlashAttention = "auto"
    chosen: bool = False
    exact: bool = False
    prefixes: int = 0
    cuda: bool = False

    @property
    def quantizes(self) -> bool:
        """Whether another type of cache is possible."""
        return self.attention != "off" or self.chosen


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that one model needs at one context length."""

    weights: int
    cache: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute


NOTHING = Need(0, 0, 0)


def supports_kv_types(model: Model, kv_types: tuple[KvType, KvType]) -> bool:
    """Return whether the model's cache can have these types."""
    pairs = zip(model.kept.heads, kv_types, strict=True)
    return not any(
        kv_type != "f16" and any(length % KV_BLOCK for length in heads) for heads, kv_type in pairs
    )


def cache_per_token(model: Model, kv_types: tuple[KvType, KvType] = F16) -> float:
    """Return the bytes of cache per token of context."""
    return _cache_bytes((model.kept.keys, model.kept.values), kv_types)


def _cache_bytes(counts: tuple[int, int], kv_types: tuple[KvType, KvType]) -> float:
    """Return the bytes of these counts of key numbers and value numbers."""
    return sum(count * KV_BYTES[kv_type] for count, kv_type in zip(counts, kv_types, strict=True))


def need_of_target(model: Model, load: Load) -> Need:
    """Return the bytes for the model that answers, with `load.context` tokens."""
    if model.pooling:
        return _need_of_embedding(model, load)
    rows = load.parallel * (_SEQUENCE_DRAFT_TOKENS + 1) + _ADDED_DRAFT_TOKENS
    need = _compute_need(model, load, load.parallel, rows)
    if not load.exact:
        return need
    exact_need = _compute_need(
        model, replace(load, attention="auto") if load.chosen else load, 1, PASS_ROWS
    )
    return replace(
        need, cache=need.cache + exact_need.cache, compute=need.compute + exact_need.compute
    )


def need_of_draft(model: Model, load: Load) -> Need:
    """Return the bytes for the draft. If it does not support the cache types, f16 is used for it."""
    if not supports_kv_types(model, load.kv_types):
        load = replace(load, kv_types=F16)
    sequences = load.parallel + 2  # one for the exact lane, one to look ahead
    need = _compute_need(model, load, sequences, max(sequences, 16))
    if model.sidecar and load.exact:  # it reads the exact lane's cache in separate passes
        return replace(need, compute=2 * need.compute)
    return need


def need_of_heads(model: Model, load: Load) -> Need:
    """Return the bytes for the model's own MTP heads, without their weights."""
    if not any(model.kept.ahead):
        return NOTHING
    sequences = load.parallel + 2  # as for a draft
    need = _compute_need(model, load, 0, max(sequences, 16))
    cache = int(_cache_bytes(model.kept.ahead, load.kv_types) * load.context)
    return Need(0, cache + load.parallel * _HEAD_STATE_BYTES, need.compute)


def _need_of_embedding(model: Model, load: Load) -> Need:
    """Return the bytes for a model that turns texts of at most `load.context` tokens into numbers.

    llama.cpp reserves a row of logits for each token of a pass, and if the model could write text, computes
    them too.
    """
    can_write = not model.has_no_cache
    rows = max(EMBEDDING_PASS_ROWS // (1 + can_write), load.context if model.reads_whole else 0)
    layer_bytes = rows * (8 * model.width + 3 * model.feed_forward) * 4
    mask_cells = rows * max(rows, load.context)
    has_scores = load.attention == "off" and not load.chosen
    attention_bytes = 4 * mask_cells * (model.heads + 1) if has_scores else 2 * mask_cells
    cache_bytes = cache_per_token(model) * max(rows, load.context) if can_write else 0
    return Need(
        weights=model.weights,
        cache=int(cache_bytes) + model.kept.state,
        compute=(1 + can_write) * rows * model.vocabulary * 4 + layer_bytes + attention_bytes,
    )


def _compute_need(model: Model, load: Load, sequences: int, rows: int) -> Need:
    """Return the bytes of a model that decodes `sequences`, with logits for `rows` rows."""
    copies = 1 + _SNAPSHOTS * (model.rollback == "snapshots")
    logit_bytes = rows * model.vocabulary * 4
    layer_bytes = PASS_ROWS * (8 * model.width + 3 * model.feed_forward + model.kept.beside) * 4
    # With a window there are two masks, one with it and one without.
    mask_cells = load.context * (2 if model.rollback == "short" or model.sidecar else 1)
    always_flash = is_hybrid(model.architecture) or load.context <= SHORT
    has_scores = load.attention == "off" and not (load.chosen and always_flash)
    # llama.cpp turns flash attention off without a kernel.
    if load.cuda and load.attention == "auto":
        has_scores = not model.kept.heads[0] <= _FLASH_KEY_LENGTHS
    scored_rows = SCORED_ROWS if load.chosen else PASS_ROWS
    attention_bytes = (
        4 * mask_cells * scored_rows * (model.heads + 1)
        if has_scores
        else 2 * mask_cells * PASS_ROWS
    )
    return Need(
        weights=model.weights,
        cache=int(cache_per_token(model, load.kv_types) * load.context)
        + model.kept.state * sequences * copies,
        # The logits count twice: in the buffer of the pass, and where they are read.
        compute=2 * logit_bytes + layer_bytes + attention_bytes,
    )
