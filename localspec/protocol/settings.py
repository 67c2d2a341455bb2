"""How far each setting may go, said once, and how a pair is loaded by them.

A person's configuration, models.toml, the engine's settings and a request's options have these types, so
that what one of them accepts the next one takes. The limits are those of what uses a number in the end.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

# llama.cpp makes no fewer cells, and a prompt has a system message, a question and an answer.
LEAST_CONTEXT = 256  # tokens
MAX_CONTEXT = 1 << 24
MAX_PARALLEL = 64
MAX_DRAFTED = 64

Context = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]  # tokens; 0: chosen
Parallel = Annotated[int, Meta(ge=1, le=MAX_PARALLEL)]
# Of the engine: with the places that the daemon keeps for editors. llama.cpp's own limit is 256.
Sequences = Annotated[int, Meta(ge=1, le=2 * MAX_PARALLEL)]
Threads = Annotated[int, Meta(ge=0, le=512)]  # GGML_MAX_N_THREADS; 0: chosen
Layers = Annotated[int, Meta(ge=-1, le=10_000)]  # -1: all
Gpu = Annotated[int, Meta(ge=0, le=15)]  # GGML_CUDA_MAX_DEVICES
Drafted = Annotated[int, Meta(ge=0, le=MAX_DRAFTED)]  # tokens drafted at once
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 24)]
# Where machines serve layers, as HOST:PORT; llama.cpp's RPC backend takes so many.
Endpoints = Annotated[tuple[str, ...], Meta(max_length=16)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 44)]
SplitMode = Literal["layer", "row", "none"]
KvType = Literal["f16", "q8_0", "q5_1", "q4_0"]  # the largest first
KvTypeV = Literal["same", KvType]  # "same" as the keys'
KV_BLOCK = 32  # numbers of a cache that share a scale, but for f16
FlashAttention = Literal["auto", "on", "off"]
# Rows computed at once where a CPU chooses to be without flash attention: each has a score for every cell.
SCORED_ROWS = 128
# Tokens of context up to which that is no faster: short texts attend to each other's cells, too. With
# vectors of 512 bits flash attention reads faster up to some 8 000 tokens, writes as fast up to 4 000, and
# slower beyond (facts.md).
SHORT, SHORT_WIDE = 2048, 12288
FEW = 5  # texts at once, most of which seldom write: 4 that do are as fast either way (facts.md)
# How the rows of a text's tokens become one: their mean, the first, the last; "rank": a score, by a head
# of the model's own, of how well a text answers a question.
Pooling = Literal["mean", "cls", "last", "rank"]


# Which server it is; "auto": found out with the first request.
UpstreamKind = Literal[
    "auto", "openai", "llama-server", "localspec", "vllm", "sglang", "tensorrt-llm"
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pair whose target another server has, as models.toml names it; the keys are its fields.

    upstream: where its API begins, as in http://tower:8000/v1. upstream_model: what it calls the model,
    else it is its only one. key_env: the variable that holds its key, or key_file: the file. ca: a file of
    certificates to trust. fallback: the pair that answers while it does not. Seconds until it is
    connected, until the first of an answer comes, and between two parts of it.
    """

    upstream: Annotated[str, Meta(min_length=1, max_length=2048)]
    upstream_model: Annotated[str, Meta(max_length=512)] = ""
    upstream_kind: UpstreamKind = "auto"
    key_env: Annotated[str, Meta(max_length=256)] = ""
    key_file: Annotated[str, Meta(max_length=4096)] = ""
    ca: Annotated[str, Meta(max_length=4096)] = ""
    fallback: Annotated[str, Meta(max_length=4096)] = ""
    summary: Annotated[str, Meta(max_length=1024)] = ""
    roles: tuple[Literal["chat", "fim"], ...] = ("chat",)
    connect_timeout: Seconds = 10.0
    first_token_timeout: Seconds = 600.0
    silence_timeout: Seconds = 120.0


class EngineSettings(msgspec.Struct, omit_defaults=True):
    """How a pair is loaded. 0 means: decide for this machine and model.

    n_ctx is in tokens that all sequences share: one alone may use all, and who finds no room waits.
    `extra_buffers` False is safe mode: llama.cpp's repacked CPU
    kernels (AMX among them) stay off. `exact` makes exact mode the default for every request; `exact_lacks`:
    where it is not, the bytes of that mode's own cache, if memory does not hold them besides.
    `pass_s`: seconds that a pass should take at most, 0 any: longer prompts are read in more of them.
    `gap_s`: the same of passes that answers which are being written wait for. `turns`: a file by which
    workers take turns on the processors, "" for none.
    `state_dir` keeps what was measured, `states_dir` texts' states up to `states_bytes`;
    `prefix_bytes` limits the memory for prefixes that have no slot.

    On a GPU: `n_gpu_layers` of the target and `draft_gpu_layers` of the draft, -1 all of them;
    `split_mode` is how several GPUs share the target, `main_gpu` the one that has the draft.
    `rpc_needed`: the target does not fit here without the other machines that the pair names.
    `choose_on_device`: greedy tokens are chosen where the logits are; None: where that is a GPU.
    """

    n_ctx: Context = 0
    parallel: Sequences = 4
    n_threads: Threads = 0
    n_batch: Annotated[int, Meta(ge=64, le=1 << 16)] = 512
    n_gpu_layers: Layers = -1
    draft_gpu_layers: Layers = -1
    split_mode: SplitMode = "layer"
    main_gpu: Gpu = 0
    rpc_needed: bool = False
    flash_attention: FlashAttention = "auto"
    choose_on_device: bool | None = None
    type_kv: KvType = "f16"
    type_v: KvTypeV = "same"
    extra_buffers: bool = True
    exact: bool = False
    exact_lacks: Bytes = 0
    depth: Drafted | None = None
    pass_s: Annotated[float, Meta(ge=0)] = 0.0
    gap_s: Annotated[float, Meta(ge=0)] = 0.25
    turns: str = ""
    state_dir: str = ""
    prefix_bytes: Bytes = 0
    states_dir: str = ""
    states_bytes: Bytes = 0

    @property
    def kv_types(self) -> tuple[KvType, KvType]:
        """Of the cache's keys, and of its values."""
        return self.type_kv, self.type_kv if self.type_v == "same" else self.type_v

    def on_cpu(self, context: int, *, wide: bool) -> FlashAttention:
        """Flash attention where "auto" is a CPU's to choose, with so many tokens of context. One text is
        written faster without it, the more the longer it is; many are together slower, for each attends
        to all. It needs less memory, and only with it values can be quantized.

        wide: the CPU computes with vectors of 512 bits.
        """
        auto = self.flash_attention == "auto" and self.kv_types == ("f16", "f16")
        long = self.parallel <= FEW and context > (SHORT_WIDE if wide else SHORT)
        return "off" if auto and long else self.flash_attention


class Limits(NamedTuple):
    """What a type allows: numbers from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def limits(kind: Any) -> Limits:
    """Those of a type of this module, or of one made of it."""
    base, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    found = Limits(choices=get_args(base) if get_origin(base) is Literal else ())
    for each in marks:
        if isinstance(each, Meta):
            found = Limits(each.ge, each.le)
    return found
