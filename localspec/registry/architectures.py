"""Which llama.cpp architectures can take tokens back, and how; read in its src/llama-arch.cpp and
src/models/*.cpp as of llama-cpp-python 0.3.36 (llm_arch_is_recurrent, _is_hybrid, _is_diffusion,
_supports_rs_rollback, and the models that set `swa_type`).
"""

from __future__ import annotations

from typing import Literal

# full: any number of tokens. short: sliding-window attention; only with `swa_full`, else a few.
# snapshots: recurrent state kept per token (`n_rs_seq`). none: not at all.
Rollback = Literal["full", "short", "snapshots", "none"]

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID = frozenset(
    {
        "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h",
        "nemotron_h_moe", "qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next",
        "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "minimax-01",
    }
)  # fmt: skip
_SNAPSHOTS = frozenset(
    {
        "kimi-k3", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "glm5-next", "nemotron_h",
        "nemotron_h_moe", "lfm2", "lfm2moe", "bailingmoe3",
    }
)  # fmt: skip
_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
# They keep only a window of the cache, when the file states one; phi3 reads it and ignores it.
_SLIDING = frozenset(
    {
        "afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3", "gemma3n",
        "gemma4", "gpt-oss", "llama4", "mimo2", "olmo2", "plamo3", "smallthinker", "step35",
    }
)  # fmt: skip


def is_hybrid(architecture: str) -> bool:
    """Recurrent layers, all or some: state of a fixed size instead of a growing cache."""
    return architecture in _RECURRENT or architecture in _HYBRID


def rollback(architecture: str, sliding_window: int) -> Rollback:
    """How far this architecture can take tokens back after a rejected draft."""
    if architecture in _DIFFUSION:
        return "none"
    if is_hybrid(architecture):
        return "snapshots" if architecture in _SNAPSHOTS else "none"
    if architecture in _SLIDING and sliding_window > 0:
        return "short"
    return "full"


def rollback_sentence(name: str, architecture: str, kind: Rollback) -> str:
    """One sentence for a person; empty where there is nothing to say."""
    if kind == "none":
        return (
            f"{name} has the architecture '{architecture}', which cannot take tokens back, "
            "so a rejected draft would spoil its state"
        )
    if kind == "snapshots":
        return (
            f"{name} is recurrent or hybrid ('{architecture}'): tokens are taken back through "
            "snapshots of its state, and only as many as are kept"
        )
    if kind == "short":
        return f"{name} uses sliding-window attention: the whole window is kept in memory"
    return ""
