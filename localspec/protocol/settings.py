"""The limits of each setting, declared once, and the settings with which a pair is loaded.

The user's configuration, models.toml, the engine's settings and a request's options share these
types, so that a value which one of them accepts is accepted by the next. The limits are those of
the code that finally uses the number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

# Tokens. llama.cpp allocates no fewer cells, and a chat needs a system message, a question and an
# answer anyway.
MIN_CONTEXT_TOKENS = 256
MAX_CONTEXT_TOKENS = 1 << 24
MAX_PARALLEL = 64
MAX_DRAFT_TOKENS = 64

Context = Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)]  # tokens; 0: chosen automatically
Parallel = Annotated[int, Meta(ge=1, le=MAX_PARALLEL)]
# Sequences of the engine, including those that the daemon reserves for editors. llama.cpp's own
# limit is 256.
Sequences = Annotated[int, Meta(ge=1, le=2 * MAX_PARALLEL)]
Threads = Annotated[int, Meta(ge=0, le=512)]  # GGML_MAX_N_THREADS; 0: chosen automatically
Layers = Annotated[int, Meta(ge=-1, le=10_000)]  # -1: all
# Expert tensors, in the order in which they leave a GPU.
Experts = Annotated[int, Meta(ge=0, le=10_000)]
Gpu = Annotated[int, Meta(ge=0, le=15)]  # GGML_CUDA_MAX_DEVICES
DraftTokens = Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)]  # tokens drafted per round
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 24)]
# Machines that serve layers, as HOST:PORT. llama.cpp's RPC backend takes at most 16 of them.
Endpoints = Annotated[tuple[str, ...], Meta(max_length=16)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 44)]
# Which drafts an answer uses, and by which rule they are accepted.
DrafterKind = Literal["auto", "dflash", "draft", "eagle3", "mtp", "ngram"]
VerificationRule = Literal["auto", "match", "rejection"]
SplitMode = Literal["layer", "row", "none"]
KvType = Literal["f16", "q8_0", "q5_1", "q4_0"]  # the largest first
KvTypeV = Literal["same", KvType]  # "same": the type of the keys
KV_BLOCK_SIZE = 32  # cache elements that share a scale in every type except f16
FlashAttention = Literal["auto", "on", "off"]
# Where an answer that repeats itself without progress is ended.
LoopGuardScope = Literal["off", "thoughts", "all"]
# Rows per pass on a CPU without flash attention. Each row needs a score for every cell, so that a
# pass of many rows would take much memory.
CPU_PASS_ROWS = 128
# The same for a target that reads pictures. Rows that attend to each other must be in one pass, and
# Gemma's pictures have so many.
PICTURE_PASS_ROWS = 256
# Tokens of context up to which a CPU is no faster without flash attention, because the sequences of
# a short context also attend to each other's cells (facts.md).
SHORT_CONTEXT_TOKENS = 2048
# Sequences up to which a CPU may go without flash attention. Most of them seldom decode at the same
# time, and with four that do, both ways are equally fast (facts.md).
MAX_FEW_SEQUENCES = 5
# How the vectors of a text's tokens become one: their mean, the first or the last. "rank": a head of
# the model turns them into a score of how well the text answers a query.
Pooling = Literal["mean", "cls", "last", "rank"]


# "free": exact mode where it costs nothing.
ExactSetting = bool | Literal["free"]


# The kind of another server. "auto": it is detected with the first request.
UpstreamKind = Literal[
    "auto", "openai", "llama-server", "localspec", "vllm", "sglang", "tensorrt-llm"
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pair whose target is on another server, as models.toml names it. Its keys are the fields."""

    # Base URL of its API, such as http://tower:8000/v1.
    upstream: Annotated[str, Meta(min_length=1, max_length=2048)]
    # The server's name of the model. It may be empty if the server has only one.
    upstream_model: Annotated[str, Meta(max_length=512)] = ""
    upstream_kind: UpstreamKind = "auto"
    key_env: Annotated[str, Meta(max_length=256)] = ""  # variable that holds the API key
    key_file: Annotated[str, Meta(max_length=4096)] = ""  # file that holds the API key
    ca: Annotated[str, Meta(max_length=4096)] = ""  # file of certificates to trust
    fallback: Annotated[str, Meta(max_length=4096)] = ""  # the pair that answers meanwhile
    summary: Annotated[str, Meta(max_length=1024)] = ""
    roles: tuple[Literal["chat", "fim"], ...] = ("chat",)
    connect_timeout: Seconds = 10.0  # seconds until the connection is established
    first_token_timeout: Seconds = 600.0  # seconds until the first part of an answer arrives
    silence_timeout: Seconds = 120.0  # seconds between two parts of an answer


class EngineSettings(msgspec.Struct, omit_defaults=True):
    """The settings with which a pair is loaded. 0 means: choose for this machine and model."""

    n_ctx: Context = 0  # tokens that all sequences share; one alone may use all of them
    parallel: Sequences = 4
    n_threads: Threads = 0
    n_batch: Annotated[int, Meta(ge=64, le=1 << 16)] = 512
    n_ubatch: Annotated[int, Meta(ge=0, le=1 << 16)] = (
        0  # rows that a GPU computes at once; 0: n_batch
    )
    n_gpu_layers: Layers = -1  # layers of the target on a GPU; -1: all
    draft_gpu_layers: Layers = -1  # layers of the draft model on a GPU; -1: all
    cpu_experts: Experts = 0  # expert tensors of these layers that lie in main memory
    draft_cpu_experts: Experts = 0
    own_heads: bool = True  # the target's own MTP heads draft if no other model does
    split_mode: SplitMode = "layer"  # how several GPUs share the target
    main_gpu: Gpu = 0  # the GPU that has the draft model
    rpc_needed: bool = False  # the target does not fit without the pair's other machines
    flash_attention: FlashAttention = "auto"
    choose_on_device: bool | None = None  # greedy tokens; None: only if that is a GPU
    type_kv: KvType = "f16"
    type_v: KvTypeV = "same"
    extra_buffers: bool = True  # False is safe mode: llama.cpp's repacked CPU kernels stay off
    exact: ExactSetting = False  # exact mode is the default of every request, or of those it suits
    loop_guard: LoopGuardScope = "thoughts"  # the default of every request
    exact_lacks: Bytes = 0  # what exact mode's cache needs in addition; 0 if memory holds it
    depth: DraftTokens | None = None  # tokens drafted per round; None: the policy decides
    pass_s: Annotated[float, Meta(ge=0)] = 0.0  # longest time of a pass in seconds; 0: any
    gap_s: Annotated[float, Meta(ge=0)] = 0.25  # the same while other requests wait for it
    turns: str = ""  # lock file with which workers take turns on the CPU; "": none
    state_dir: str = ""  # folder in which measurements are saved
    prefix_bytes: Bytes = 0  # memory limit of cached prefixes that have no slot
    states_dir: str = ""  # folder in which states of texts are saved, up to `states_bytes`
    states_bytes: Bytes = 0

    @property
    def kv_types(self) -> tuple[KvType, KvType]:
        """Types of the cache's keys and of its values."""
        return self.type_kv, self.type_kv if self.type_v == "same" else self.type_v

    def cpu_flash_attention(self, context: int) -> FlashAttention:
        """Return whether a CPU uses flash attention with this many tokens of context.

        With "auto" the CPU chooses. A single sequence decodes faster without flash attention, the
        more so the longer it is. Many sequences are slower without it, because each attends to the
        cells of all. Flash attention needs less memory, and only with it can values be quantized.
        """
        is_auto = self.flash_attention == "auto" and self.kv_types == ("f16", "f16")
        is_long = self.parallel <= MAX_FEW_SEQUENCES and context > SHORT_CONTEXT_TOKENS
        return "off" if is_auto and is_long else self.flash_attention


class Limits(NamedTuple):
    """The values that a type allows: numbers from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def limits_of(kind: Any) -> Limits:
    """Return the limits of a type of this module, or of a type made of one."""
    base, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    result = Limits(choices=get_args(base) if get_origin(base) is Literal else ())
    for mark in marks:
        if isinstance(mark, Meta):
            result = Limits(mark.ge, mark.le)
    return result
