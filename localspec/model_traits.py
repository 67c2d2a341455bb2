"""Decide what a model is for: writing text, embedding it, or drafting with its own heads.

The registry applies these rules to headers and the engine to loaded models.

llama.cpp loads embedding models, encoders and diffusion models like any other. If such a model is asked for
the next token, it returns nonsense, repeats one token for ever, or ends the process. The header of a file
shows what the model is for. The architectures are those of llama-cpp-python 0.3.36 (src/llama-arch.cpp,
src/models/*.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from localspec.protocol.settings import Pooling

if TYPE_CHECKING:
    from localspec.protocol.pairs import DraftKind

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # the order of enum llama_pooling_type, from 1

_EMBEDDING = frozenset(
    {
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
        "jina-bert-v3", "eurobert", "gemma-embedding", "llama-embed",
    }
)  # fmt: skip
_EMBEDDING_WITH_CACHE = frozenset({"llama-embed"})  # they keep a KV cache, like models that write
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
_SPEECH = frozenset({"wavtokenizer-dec", "qwen3tts", "pockettts"})
# A sidecar is a file with a draft that reads inner states of its target.
SidecarKind = Literal["mtp", "eagle3", "dflash", "dspark"]
SIDECAR_LABELS: dict[SidecarKind, str] = {
    "mtp": "MTP heads", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark",
}  # fmt: skip
# Architectures whose passes can emit the inputs of their layers (t_layer_inp in src/models/*.cpp). llama.cpp
# ends the process if another one is asked for them.
_LAYER_EMITTERS = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2",
        "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3",
        "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
    }
)  # fmt: skip
# Those that emit the output of the last layer, too (t_h_nextn).
_OUTPUT_EMITTERS = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "mimo2", "nemotron_h", "nemotron_h_moe",
        "qwen35", "qwen35moe", "qwen3next",
    }
)  # fmt: skip
# MTP heads in a separate file → the architecture of the targets whose cache they read
_CACHE_READERS = {"gemma4-assistant": "gemma4"}
_HEADS = frozenset({"eagle3", "dflash", *_CACHE_READERS})
_ENCODER_DECODER = frozenset({"t5", "t5encoder"})
_PROJECTORS = frozenset({"clip", "mmproj"})
# Architectures whose MTP heads are tested and draft correctly. llama.cpp ends the process if it has no graph
# for an architecture's heads, or if a file has more heads than it expects. Of several heads, the first one
# drafts all tokens.
_TESTED_HEADS = frozenset(
    {
        "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
        "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "step35",
    }
)  # fmt: skip
# Architectures whose graph of heads ends the process in a model with M-RoPE.
_HEADS_WITHOUT_MROPE = frozenset({"glm4moe"})
_TESTED_SEVERAL_HEADS = frozenset({"step35"})
# The tensor that each block of MTP heads has, and the one by which llama.cpp finds a trunk beside them.
HEAD_SUFFIX = ".nextn.eh_proj.weight"
FIRST_TRUNK_TENSOR = "blk.0.attn_norm.weight"
_MARKOV_TENSOR = "markov_w1.weight"
# The weights of a layer's experts, in the order in which they leave a GPU: the same as in llama.cpp's
# common/fit.cpp, which keeps the matrices that a pass reads first.
_EXPERT_PARTS = "down", "gate_up", "gate", "up"
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(down|gate_up|gate|up)_(?:ch)?exps\.")
# Steps of the golden ratio fall evenly into every part of a range.
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_NO_POOLING, _RANK = 0, 4  # enum llama_pooling_type; the values between them are for embeddings

HEADS_ONLY_REASON = "it holds only MTP heads; name it as the draft of the model they belong to"
_EMBEDDING_REASON = (
    "it is an embedding model: it turns a text into a row of numbers and writes none"
)
_TYPE_REASONS = {
    "adapter": "it is a LoRA adapter: a change to a model and no model; merge it into its base model",
    "imatrix": "it is an importance matrix, from which models are quantized, and no model",
    "mmproj": "it is the projector of a model that sees or hears, and no language model; name the "
    "model's own file",
}


def explain_no_text(
    architecture: str, *, kind: str = "model", causal: bool = True, pooling: int = _NO_POOLING
) -> str:
    """Return why a model cannot write text, as a clause, or an empty text if nothing indicates that.

    architecture, kind: `general.architecture` and `general.type`. causal, pooling: the architecture's
    `attention.causal` and `pooling_type`.
    """
    if kind in _TYPE_REASONS:
        return _TYPE_REASONS[kind]
    if architecture in _PROJECTORS:
        return _TYPE_REASONS["mmproj"]
    if architecture == "controlvector":
        return "it is a control vector: a change to a model and no model"
    if architecture in _EMBEDDING or _NO_POOLING < pooling < _RANK:
        return _EMBEDDING_REASON
    if pooling == _RANK:
        return "it is a reranker: it judges how well texts answer a question and writes none"
    if architecture in DIFFUSION:
        return "it is a diffusion model, which fills in a whole text at once instead of going on with it"
    if architecture in _SPEECH:
        return "it is a part of a model for speech: it makes sounds and no text"
    if architecture in _HEADS:
        return (
            "it is a draft head, which needs the inner states of its target and works with no other; "
            "name it as that target's draft"
        )
    if architecture in _ENCODER_DECODER:
        return "it is an encoder-decoder model, and only models that go on with a text are served"
    if not causal:
        return "its attention looks ahead, so that it reads texts and cannot go on with one"
    return ""


def infer_pooling(
    architecture: str, *, kind: str = "model", causal: bool = True, pooling: int = _NO_POOLING
) -> Pooling | None:
    """Return the pooling of a model that turns texts into numbers, or None for any other model.

    The parameters are those of `explain_no_text`. If the file states no pooling, it is the mean, as in most
    models with non-causal attention.
    """
    is_encoder = architecture in _EMBEDDING or not causal or _NO_POOLING < pooling <= _RANK
    other_kinds = _PROJECTORS | DIFFUSION | _SPEECH | _HEADS | _ENCODER_DECODER
    if not is_encoder or kind in _TYPE_REASONS or architecture in other_kinds:
        return None
    return POOLINGS[pooling - 1] if _NO_POOLING < pooling <= _RANK else "mean"


def has_no_cache(architecture: str) -> bool:
    """Return whether the model reads a text in one pass and keeps no cache of it."""
    return architecture in _EMBEDDING and architecture not in _EMBEDDING_WITH_CACHE


def needs_whole_text(architecture: str, *, causal: bool, pooling: Pooling) -> bool:
    """Return whether one pass must contain the whole text.

    llama.cpp ends the process if such a text is split. Other models may read a text in several passes, and
    the last row of the last pass stands for the text.
    """
    return not causal or architecture in _EMBEDDING or pooling in ("mean", "cls")


def explain_unusable_heads(architecture: str, count: int, *, mrope: bool = False) -> str:
    """Return why a model's own MTP heads cannot draft, as a clause, or an empty text if they can.

    count: the model's `nextn_predict_layers`. mrope: its positions have several parts, for pictures.
    """
    if architecture not in _TESTED_HEADS:
        return f"MTP heads of the architecture {architecture} are not supported"
    if count > 1 and architecture not in _TESTED_SEVERAL_HEADS:
        return f"{count} MTP heads in one file are not supported"
    if mrope and architecture in _HEADS_WITHOUT_MROPE:
        return f"MTP heads of {architecture} with positions of several parts (M-RoPE) are not supported"
    return ""


def sidecar_kind(architecture: str, tensors: Collection[str]) -> SidecarKind | None:
    """Return what a file drafts with if it is a sidecar, from its architecture and the names of its tensors.

    A file of MTP heads has the architecture of its target and the tensors of the heads alone.
    """
    if architecture in _CACHE_READERS:
        return "mtp"
    if architecture == "dflash":
        return "dspark" if _MARKOV_TENSOR in tensors else "dflash"
    if architecture == "eagle3":
        return "eagle3"
    has_heads = any(name.endswith(HEAD_SUFFIX) for name in tensors)
    return "mtp" if has_heads and FIRST_TRUNK_TENSOR not in tensors else None


def file_draft_kind(sidecar: SidecarKind | None) -> DraftKind:
    """Return what a file drafts with: a sidecar, or None for a model of its own."""
    return "mtp-sidecar" if sidecar == "mtp" else sidecar or "model"


def draft_kind(*, writes_text: bool, draft: DraftKind | None, has_heads: bool) -> DraftKind:
    """Return what drafts for a target.

    writes_text: False for an embedding model or a reranker. draft: what the draft's file drafts with, None
    without one. has_heads: the target's own file has MTP heads that can draft.
    """
    if not writes_text:
        return "none"
    return draft or ("mtp-embedded" if has_heads else "ngram")


def may_hold_sidecar(target: str, architecture: str) -> bool:
    """Return whether a file of an architecture may be a sidecar for a target, by the architectures alone."""
    has_same_heads = architecture == target and target in _TESTED_HEADS
    return architecture in _HEADS or has_same_heads


def reads_target_cache(architecture: str) -> bool:
    """Return whether MTP heads of this architecture have no cache and read that of their target."""
    return architecture in _CACHE_READERS


def explain_wrong_sidecar(architecture: str, target: str) -> str:
    """Return why a file of MTP heads cannot draft for a target, by the architectures of both, or ""."""
    required = _CACHE_READERS.get(architecture, architecture)
    if target == required:
        return ""
    return f"MTP heads of {architecture} need a target of {required}, not {target}"


def emits_layers(architecture: str) -> bool:
    """Return whether passes of a target of this architecture can emit the inputs of its layers.

    Of any other, a sidecar can read what its output matrix reads: the states behind the last layer and its
    norm. Such a sidecar names the layer after the last one, as often as it must name one.
    """
    return architecture in _LAYER_EMITTERS


def explain_unreadable_layers(
    target: str, target_layers: int, target_width: int, layers: Collection[int], width: int
) -> str:
    """Return why a sidecar cannot read the layers of a target, as a clause, or an empty text if it can.

    target: its `general.architecture`. target_layers, target_width: the number of its layers and the length
    of a state. layers, width: the layers that the sidecar reads, and the length of a state that it expects.
    """
    reads_output = set(layers) == {target_layers}
    if not emits_layers(target) and not reads_output:
        return f"llama.cpp does not show the layers of the architecture {target}"
    if width != target_width:
        return f"the draft reads states of {width} numbers, and the target's have {target_width}"
    if not emits_layers(target):
        return ""
    n_readable = target_layers + (target in _OUTPUT_EMITTERS)
    if not layers or not 0 <= min(layers) <= max(layers) < n_readable:
        named = ", ".join(map(str, sorted(layers))) or "none"
        return f"the draft reads the layers {named}, and the target has {target_layers}"
    return ""


def explain_wrong_trunk(layers: int, target_layers: int) -> str:
    """Return why MTP heads for a trunk of `layers` layers cannot draft for a target, as a clause, or ""."""
    if layers == target_layers:
        return ""
    return f"these MTP heads are for a model of {layers} layers, and the target has {target_layers}"


# The names of quantizations, as localspec shows them.


# general.file_type (llama.cpp's enum llama_ftype) → the name used in file names
_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_GUESSED_FLAG = 1024  # LLAMA_FTYPE_GUESSED


class ExpertTensor(NamedTuple):
    """One of the matrices of a layer's experts, with its biases and scales."""

    layer: int
    part: str


def find_expert(tensor: str) -> ExpertTensor | None:
    """Return which of a layer's expert matrices a tensor belongs to, or None."""
    found = _EXPERTS.match(tensor)
    return ExpertTensor(int(found[1]), found[2]) if found else None


def order_experts(tensors: Collection[str], *, spread: bool = False) -> list[ExpertTensor]:
    """Return the expert matrices of a model in the order in which they leave a GPU.

    The first layers leave first, as with llama-server's `--n-cpu-moe`, and MTP heads last, which are read
    once for each draft. spread: the layers are taken from everywhere, so that each of several devices with
    consecutive layers gives the same share.
    """
    heads = {int(name.split(".")[1]) for name in tensors if name.endswith(HEAD_SUFFIX)}

    def rank(expert: ExpertTensor) -> tuple[bool, float, int]:
        layer, part = expert
        place = layer * _GOLDEN_RATIO % 1 if spread else layer
        return layer in heads, place, _EXPERT_PARTS.index(part)

    return sorted({expert for expert in map(find_expert, tensors) if expert}, key=rank)


def match_experts(experts: Sequence[ExpertTensor]) -> list[str]:
    """Return regular expressions that match the tensors of these matrices, one for all equal layers."""
    layers: dict[str, list[int]] = {}
    for layer in sorted({expert.layer for expert in experts}):
        parts = "|".join(part for at, part in experts if at == layer)
        layers.setdefault(parts, []).append(layer)
    return [
        rf"^blk\.({'|'.join(map(str, numbers))})\.ffn_({parts})_(ch|)exps\."
        for parts, numbers in layers.items()
    ]


def quantization_name(file_type: int) -> str:
    """Return the name of a general.file_type value, or an empty text if it is unknown."""
    return _NAMES.get(file_type & ~_GUESSED_FLAG, "")
