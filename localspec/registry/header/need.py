"""How much memory a pair needs. Arithmetic on headers, as llama.cpp allocates.

    memory = weights + cache + compute buffers, of both models, + prompts that have no slot + the worker's own

The cache is one for all sequences, so its size is that of the context. Sliding windows are counted whole,
because they are kept whole (`swa_full`). The compute buffer is what llama.cpp reserves for its widest
pass: the rows of logits, what a layer makes of each row, and which cells each row may look at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localspec.protocol.settings import KV_BLOCK, SCORED_ROWS, SHORT, FlashAttention, KvType
from localspec.registry.header.architectures import is_hybrid
from localspec.registry.header.model import Model

# Bytes per cached number. A block of 32 has a scale of two bytes, of q5_1 an offset, too.
KV_BYTES: dict[KvType, float] = {"f16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q4_0": 18 / 32}
F16: tuple[KvType, KvType] = "f16", "f16"
PASS = 512  # rows of the widest one (the engine's `n_batch`)
EMBEDDING_PASS = (
    512  # half as many where the model could write; all of a text that must be read at once
)
RUNTIME = 128 << 20  # a worker's own memory, backends loaded
# Rows with logits in one pass: each sequence's drafts, and those that a request or a lookup may bring
# (the engine's MAX_DEPTH and MAX_LIMIT).
_DRAFTED, _MOST_DRAFTED = 15, 64
_STATES = 32 << 20  # of a target that heads may still read, of each text (the engine's MOST_BYTES)
# Copies of a recurrent state that the engine asks for, where the model can take tokens back by them.
_SNAPSHOTS = 8


# Lengths of a head's keys for which llama.cpp has CUDA kernels for flash attention (ggml-cuda's fattn.cu).
_FLASH_LENGTHS = frozenset({40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576})


@dataclass(frozen=True, slots=True)
class Load:
    """How a pair is to be loaded, as far as it costs memory.

    context: tokens, 0 where it is to be chosen. kv_types: of the cache's keys, and of its values.
    parallel: sequences. attention: "auto" on a device, else as the settings' `on_cpu`, and then `chosen`
    where the CPU chose it. exact: with a lane for exact mode, which has a cache of its own. prefixes: bytes
    for prompts that have no slot, at most. cuda: layers are on a GPU with CUDA's kernels.
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
        """Whether another type of cache can be had."""
        return self.attention != "off" or self.chosen


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes one model needs at one context length."""

    weights: int
    cache: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute


NOTHING = Need(0, 0, 0)


def takes(model: Model, kv_types: tuple[KvType, KvType]) -> bool:
    """Whether the model's cache can be of these types."""
    pairs = zip(model.kept.heads, kv_types, strict=True)
    return not any(t != "f16" and any(each % KV_BLOCK for each in heads) for heads, t in pairs)


def cache_per_token(model: Model, kv_types: tuple[KvType, KvType] = F16) -> float:
    """Bytes of cache per token of context."""
    return _bytes((model.kept.keys, model.kept.values), kv_types)


def _bytes(numbers: tuple[int, int], kv_types: tuple[KvType, KvType]) -> float:
    """Of so many keys' and values' numbers."""
    return sum(n * KV_BYTES[each] for n, each in zip(numbers, kv_types, strict=True))


def need_of_target(model: Model, load: Load) -> Need:
    """Bytes for the model that answers, with `load.context` tokens."""
    if model.pooling:
        return _need_of_embedding(model, load)
    rows = load.parallel * (_DRAFTED + 1) + _MOST_DRAFTED
    found = _need(model, load, load.parallel, rows)
    if not load.exact:
        return found
    exact = _need(model, replace(load, attention="auto") if load.chosen else load, 1, PASS)
    return replace(found, cache=found.cache + exact.cache, compute=found.compute + exact.compute)


def need_of_draft(model: Model, load: Load) -> Need:
    """Bytes for the model that drafts. Types of cache that it does not take are f16 for it."""
    if not takes(model, load.kv_types):
        load = replace(load, kv_types=F16)
    sequences = load.parallel + 2  # one for the exact lane, one to look in with
    found = _need(model, load, sequences, max(sequences, 16))
    if model.sidecar and load.exact:  # it reads that lane's cache in passes of its own
        return replace(found, compute=2 * found.compute)
    return found


def need_of_heads(model: Model, load: Load) -> Need:
    """Bytes for the model's own heads (MTP), beyond their weights, which are among the model's."""
    if not any(model.kept.ahead):
        return NOTHING
    sequences = load.parallel + 2  # as a draft's
    found = _need(model, load, 0, max(sequences, 16))
    cache = int(_bytes(model.kept.ahead, load.kv_types) * load.context)
    return Need(0, cache + load.parallel * _STATES, found.compute)


def _need_of_embedding(model: Model, load: Load) -> Need:
    """Bytes for a model that turns texts of at most `load.context` tokens into numbers. llama.cpp keeps a row
    of logits for each token of a pass, and where the model could write it makes them, too.
    """
    writes = not model.has_no_cache
    rows = max(EMBEDDING_PASS // (1 + writes), load.context if model.reads_whole else 0)
    layer = rows * (8 * model.width + 3 * model.feed_forward) * 4
    cells = rows * max(rows, load.context)
    scored = load.attention == "off" and not load.chosen
    attention = 4 * cells * (model.heads + 1) if scored else 2 * cells
    cache = cache_per_token(model) * max(rows, load.context) if writes else 0
    return Need(
        weights=model.weights,
        cache=int(cache) + model.kept.state,
        compute=(1 + writes) * rows * model.vocabulary * 4 + layer + attention,
    )


def _need(model: Model, load: Load, sequences: int, rows: int) -> Need:
    copies = 1 + _SNAPSHOTS * (model.rollback == "snapshots")
    logits = rows * model.vocabulary * 4
    layer = PASS * (8 * model.width + 3 * model.feed_forward + model.kept.beside) * 4
    # with and without a window
    cells = load.context * (2 if model.rollback == "short" or model.sidecar else 1)
    never = is_hybrid(model.architecture) or load.context <= SHORT
    scored = load.attention == "off" and not (load.chosen and never)
    if load.cuda and load.attention == "auto":  # llama.cpp turns it off where there is no kernel
        scored = not model.kept.heads[0] <= _FLASH_LENGTHS
    rows_scored = SCORED_ROWS if load.chosen else PASS
    attention = 4 * cells * rows_scored * (model.heads + 1) if scored else 2 * cells * PASS
    return Need(
        weights=model.weights,
        cache=int(cache_per_token(model, load.kv_types) * load.context)
        + model.kept.state * sequences * copies,
        compute=2 * logits
        + layer
        + attention,  # logits: where they are made, and where they are read
    )
