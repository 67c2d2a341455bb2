"""The architectures of llama.cpp, and how each of them can roll back tokens.

The lists follow src/llama-arch.cpp and src/models/*.cpp of llama-cpp-python 0.3.36 (LLM_ARCH_NAMES,
llm_arch_is_recurrent, _is_hybrid, _is_diffusion, _supports_rs_rollback, and the models that set `swa_type`).
"""

from __future__ import annotations

from typing import Literal

# How many tokens can be rolled back. full: any number. short: any number with `swa_full`, else only a few
# (sliding-window attention). snapshots: as many as there are snapshots of the recurrent state (`n_rs_seq`).
# none: no tokens.
Rollback = Literal["full", "short", "snapshots", "none"]

# All architectures (LLM_ARCH_NAMES). The installed llama.cpp is of exactly this release.
KNOWN = frozenset(
    {
        "afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2",
        "bailingmoe3", "bert", "bitnet", "bloom", "chameleon", "chatglm", "clip", "codeshell",
        "cogvlm", "cohere2", "cohere2moe", "command-r", "dbrx", "deci", "deepseek", "deepseek2",
        "deepseek2-ocr", "deepseek32", "deepseek4", "dflash", "dots1", "dots3note", "dream",
        "eagle3", "ernie4_5", "ernie4_5-moe", "eurobert", "exaone", "exaone-moe", "exaone4",
        "falcon", "falcon-h1", "gemma", "gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4",
        "gemma4-assistant", "glm-dsa", "glm4", "glm4moe", "glm5-next", "gpt-oss", "gpt2", "gptj",
        "gptneox", "granite", "granite_swa", "granitehybrid", "granitemoe", "graniteswitch", "grok",
        "grovemoe", "hrm_text", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v3", "hy_v4",
        "internlm2", "jais", "jais2", "jamba", "jina-bert-v2", "jina-bert-v3", "kimi-k3",
        "kimi-linear", "laguna", "lfm2", "lfm2moe", "llada", "llada-moe", "llama", "llama-embed",
        "llama4", "maincoder", "mamba", "mamba2", "maple", "mellum", "mimo2", "minicpm", "minicpm3",
        "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "mistral4", "modern-bert", "mpt",
        "muse-glimmer", "nanbeige", "nemotron", "nemotron_h", "nemotron_h_moe", "neo-bert",
        "nomic-bert", "nomic-bert-moe", "olmo", "olmo2", "olmoe", "openelm", "orion", "paddleocr",
        "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "plm", "pockettts",
        "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
        "qwen3next", "qwen3tts", "qwen3vl", "qwen3vlmoe", "qwen4exp", "refact", "rnd1", "rwkv6",
        "rwkv6qwen2", "rwkv7", "seed_oss", "smallthinker", "smollm3", "spark2_5", "stablelm",
        "starcoder", "starcoder2", "step35", "t5", "t5encoder", "talkie", "wavtokenizer-dec",
        "xverse",
    }
)  # fmt: skip
# All layers are recurrent, so that there is no KV cache.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID = frozenset(
    {
        "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h",
        "nemotron_h_moe", "qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next",
        "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "minimax-01",
    }
)  # fmt: skip
_WITH_SNAPSHOTS = frozenset(
    {
        "kimi-k3", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "glm5-next", "nemotron_h",
        "nemotron_h_moe", "lfm2", "lfm2moe", "bailingmoe3",
    }
)  # fmt: skip
# In a hybrid model every n-th layer attends. These are the values for files that do not state n.
ATTENTION_INTERVALS = {
    "minimax-01": 8, "qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4,
}  # fmt: skip
# The states are those of Kimi's delta attention (KDA), with heads of their own.
DELTA_HEADS = frozenset({"bailingmoe3", "glm5-next", "kimi-k3", "kimi-linear"})
# Each layer has both a cache and a state.
CACHE_AND_STATE = frozenset({"falcon-h1"})
_DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
# These keep only a window of the cache if the file states its size. phi3 reads the size but ignores it.
_SLIDING_WINDOW = frozenset(
    {
        "afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3", "gemma3n",
        "gemma4", "gpt-oss", "llama4", "mimo2", "olmo2", "plamo3", "smallthinker", "step35",
    }
)  # fmt: skip


def is_hybrid(architecture: str) -> bool:
    """Return whether some or all layers are recurrent: a state of fixed size instead of a growing cache."""
    return architecture in RECURRENT or architecture in _HYBRID


def rollback_kind(architecture: str, sliding_window: int) -> Rollback:
    """Return how far this architecture can roll back tokens after a rejected draft."""
    if architecture in _DIFFUSION:
        return "none"
    if is_hybrid(architecture):
        return "snapshots" if architecture in _WITH_SNAPSHOTS else "none"
    if architecture in _SLIDING_WINDOW and sliding_window > 0:
        return "short"
    return "full"


def describe_rollback(name: str, architecture: str, kind: Rollback) -> str:
    """Return a sentence about the limits of rollback, or an empty text if there are none."""
    if kind == "none":
        return (
            f"{name} has the architecture '{architecture}', which cannot roll back tokens, so "
            "a rejected draft would corrupt its state"
        )
    if kind == "snapshots":
        return (
            f"{name} is recurrent or hybrid ('{architecture}'): tokens are rolled back from "
            "snapshots of its state, which limits how many"
        )
    if kind == "short":
        return f"{name} uses sliding-window attention: the whole window is kept in memory"
    return ""
