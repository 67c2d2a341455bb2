"""Does a model write text, or turn it into numbers, and do its own heads draft? One rule, for the registry
(headers) and the engine (loaded models).

llama.cpp loads embedding models, encoders and diffusion models as it loads any other; asked for the next
token they say nonsense, say one token for ever, or end the process. What a file is for is in its
header. Architectures as of llama-cpp-python 0.3.36 (src/llama-arch.cpp, src/models/*.cpp).
"""

from __future__ import annotations

from typing import get_args

from localspec.protocol.settings import Pooling

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # in the order of enum llama_pooling_type, from 1

_EMBEDDING = frozenset(
    {
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
        "jina-bert-v3", "eurobert", "gemma-embedding", "llama-embed",
    }
)  # fmt: skip
_CACHED = frozenset({"llama-embed"})  # of them, as models that write
_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
_SPEECH = frozenset({"wavtokenizer-dec", "qwen3tts", "pockettts"})
# MTP heads in a file of their own, by the architecture of the targets whose cache they read.
_SIDECARS = {"gemma4-assistant": "gemma4"}
_HEADS = frozenset({"eagle3", "dflash", *_SIDECARS})
_BOTH = frozenset({"t5", "t5encoder"})
_PROJECTORS = frozenset({"clip", "mmproj"})
# Those whose MTP heads were seen to draft as they should. llama.cpp ends the process where it has no graph
# for an architecture's heads, or more of them than it expects. Of several the first drafts all tokens.
_WITH_HEADS = frozenset({"deepseek2", "glm4moe", "qwen35", "qwen35moe", "step35"})
_WITH_SEVERAL = frozenset({"step35"})
_NO_POOLING, _RANK = 0, 4  # enum llama_pooling_type; between them are the poolings of embeddings

_EMBEDS = "it is an embedding model: it turns a text into a row of numbers and writes none"
_TYPES = {
    "adapter": "it is a LoRA adapter: a change to a model and no model; merge it into its base model",
    "imatrix": "it is an importance matrix, from which models are quantized, and no model",
    "mmproj": "it is the projector of a model that sees or hears, and no language model; name the "
    "model's own file",
}


def no_writer(
    architecture: str, *, kind: str = "model", causal: bool = True, pooling: int = _NO_POOLING
) -> str:
    """Why a model cannot write text, as a clause; empty where nothing says so.

    architecture, kind: `general.architecture` and `general.type`. causal, pooling: the architecture's
    `attention.causal` and `pooling_type`.
    """
    if kind in _TYPES:
        return _TYPES[kind]
    if architecture in _PROJECTORS:
        return _TYPES["mmproj"]
    if architecture == "controlvector":
        return "it is a control vector: a change to a model and no model"
    if architecture in _EMBEDDING or _NO_POOLING < pooling < _RANK:
        return _EMBEDS
    if pooling == _RANK:
        return "it is a reranker: it judges how well texts answer a question and writes none"
    if architecture in _DIFFUSION:
        return "it is a diffusion model, which fills in a whole text at once instead of going on with it"
    if architecture in _SPEECH:
        return "it is a part of a model for speech: it makes sounds and no text"
    if architecture in _HEADS:
        return (
            "it is a draft head, which needs the inner states of its target and works with no other"
            + ("; name it as that target's draft" if architecture in _SIDECARS else "")
        )
    if architecture in _BOTH:
        return "it is an encoder-decoder model, and only models that go on with a text are served"
    if not causal:
        return "its attention looks ahead, so that it reads texts and cannot go on with one"
    return ""


def pooled(
    architecture: str, *, kind: str = "model", causal: bool = True, pooling: int = _NO_POOLING
) -> Pooling | None:
    """How a model that turns texts into numbers does so; None: it is no such model. Parameters as of
    `no_writer`. Where the file states nothing it is the mean, as in most of those that look ahead.
    """
    reads = architecture in _EMBEDDING or not causal or _NO_POOLING < pooling <= _RANK
    others = _PROJECTORS | _DIFFUSION | _SPEECH | _HEADS | _BOTH
    if not reads or kind in _TYPES or architecture in others:
        return None
    return POOLINGS[pooling - 1] if _NO_POOLING < pooling <= _RANK else "mean"


def has_no_cache(architecture: str) -> bool:
    """Does it read a text at once and keep nothing of it?"""
    return architecture in _EMBEDDING and architecture not in _CACHED


def reads_whole(architecture: str, *, causal: bool, pooling: Pooling) -> bool:
    """Must one pass have all of a text? llama.cpp ends the process where it has not. Else, as of any other
    model, several may read it, and the last one's last row is the text's.
    """
    return not causal or architecture in _EMBEDDING or pooling in ("mean", "cls")


def no_heads(architecture: str, count: int) -> str:
    """Why a model's own heads (`nextn_predict_layers` of them) cannot draft, as a clause; empty: they can."""
    if architecture not in _WITH_HEADS:
        return f"MTP heads of the architecture {architecture} are not supported"
    if count > 1 and architecture not in _WITH_SEVERAL:
        return f"{count} MTP heads in one file are not supported"
    return ""


def is_sidecar(architecture: str) -> bool:
    """Is it of MTP heads in a file of their own, which draft for one target and have no cache?"""
    return architecture in _SIDECARS


def not_its_sidecar(architecture: str, target: str) -> str:
    """Why a sidecar cannot draft for a target of another architecture, as a clause; empty: it can."""
    wanted = _SIDECARS[architecture]
    if target == wanted:
        return ""
    return f"MTP heads of {architecture} need a target of {wanted}, not {target}"
