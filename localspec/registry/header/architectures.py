"""The architectures of llama.cpp: how each can roll back tokens, and what it keeps of a text.

The lists follow src/llama-arch.cpp and src/models/*.cpp of llama-cpp-python 0.3.36 (LLM_ARCH_NAMES,
llm_arch_is_recurrent, _is_hybrid, _is_diffusion, _supports_rs_rollback, and the models that set `swa_type`).
The sizes follow llama_kv_cache and llama_memory_recurrent: each attention layer with a cache of its own
stores keys and values of every token, even beyond a sliding window (`swa_full`). The state of a recurrent
layer has the same size for texts of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from localspec.model_traits import DIFFUSION, explain_unusable_heads, reads_target_cache
from localspec.registry.header.gguf import Header, NumberArray

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
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
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
_ATTENTION_INTERVALS = {
    "minimax-01": 8, "qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4,
}  # fmt: skip
# The states are those of Kimi's delta attention (KDA), with heads of their own.
_DELTA_HEADS = frozenset({"bailingmoe3", "glm5-next", "kimi-k3", "kimi-linear"})
# Each layer has both a cache and a state.
_CACHE_AND_STATE = frozenset({"falcon-h1"})
# These keep only a window of the cache if the file states its size. phi3 reads the size but ignores it.
_SLIDING_WINDOW = frozenset(
    {
        "afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3", "gemma3n",
        "gemma4", "gpt-oss", "llama4", "mimo2", "olmo2", "plamo3", "smallthinker", "step35",
    }
)  # fmt: skip
_STATE_NUMBER_BYTES = 4  # states are always F32
_GEMMA3N_LAYER_INPUTS = 256  # additional numbers per token and layer
_GEMMA3N_CACHE_LAYERS = 20  # the other layers read the cache of these


def is_hybrid(architecture: str) -> bool:
    """Return whether some or all layers are recurrent: a state of fixed size instead of a growing cache."""
    return architecture in _RECURRENT or architecture in _HYBRID


def rollback_kind(architecture: str, sliding_window: int) -> Rollback:
    """Return how far this architecture can roll back tokens after a rejected draft."""
    if architecture in DIFFUSION:
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


class KvLengths(NamedTuple):
    """The numbers in a key and in a value, of one head or of several together."""

    key: int
    value: int


class KvSize(NamedTuple):
    """The sizes of what a model keeps of a text.

    keys, values: numbers per token. heads: the lengths of the heads' keys and of their values. state: bytes
    per sequence. beside: additional numbers per row of a pass, compared with a plain layer. ahead: numbers
    per token that the model's own MTP heads keep, if they can draft.
    """

    keys: int
    values: int
    heads: tuple[frozenset[int], frozenset[int]]
    state: int
    beside: int
    ahead: KvLengths = KvLengths(0, 0)

    def of_heads(self) -> KvSize:
        """Return the sizes of the MTP heads alone, which have a cache of their own and no recurrent state."""
        keys, values = self.ahead
        return self._replace(keys=keys, values=values, state=0, ahead=KvLengths(0, 0))


def kv_size(
    header: Header, architecture: str, kv_heads: tuple[int, ...], width: int, lengths: KvLengths
) -> KvSize:
    """Return the sizes of what a model keeps of a text.

    header: a checked header. kv_heads: one number per layer. width: the embedding length. lengths: of one
    head.
    """
    numbers = _HeaderNumbers(header, architecture)
    windowed = KvLengths(
        numbers.read_number("attention.key_length_swa", lengths.key),
        numbers.read_number("attention.value_length_swa", lengths.value),
    )
    is_mixed = windowed != lengths
    # In latent attention (MLA) the value is a part of the key.
    is_latent = numbers.read_number("attention.key_length_mla", 0) > 0
    keys, values, heads = 0, 0, (set[int](), set[int]())
    for layer in _cache_layers(numbers, architecture, kv_heads):
        key_length, value_length = windowed if is_mixed and numbers.has_window(layer) else lengths
        if is_latent:
            value_length = 0
        keys, values = keys + kv_heads[layer] * key_length, values + kv_heads[layer] * value_length
        heads[0].add(key_length)
        heads[1].add(value_length)
    state_layers = sum(
        numbers.has_state(layer, architecture, kv_heads) for layer in range(len(kv_heads))
    )
    state = state_layers * _count_state_numbers(numbers, architecture, width) * _STATE_NUMBER_BYTES
    nextn_layers = numbers.read_number("nextn_predict_layers", 0)
    is_usable = not explain_unusable_heads(architecture, nextn_layers)
    ahead = sum(kv_heads[len(kv_heads) - nextn_layers :]) if is_usable else 0
    # The factors were measured with llama.cpp's compute buffers and are somewhat larger than those.
    layer_inputs = _GEMMA3N_LAYER_INPUTS if architecture == "gemma3n" else 0
    layer_inputs = numbers.read_number("embedding_length_per_layer_input", layer_inputs)
    inner_size = numbers.read_number("ssm.inner_size", 0) if is_hybrid(architecture) else 0
    return KvSize(
        keys,
        values,
        (frozenset(heads[0]), frozenset(heads[1])),
        state,
        10 * inner_size + 4 * len(kv_heads) * layer_inputs,
        KvLengths(ahead * lengths.key, 0 if is_latent else ahead * lengths.value),
    )


def cache_layouts(
    header: Header, architecture: str, kv_heads: tuple[int, ...], key_length: int
) -> set[tuple[bool, int, int, int]]:
    """Return the distinct layouts of the layers' caches.

    Each is a tuple: whether it has a window, the heads, the length of a key and of a value.
    """
    numbers, layouts = _HeaderNumbers(header, architecture), set()
    for layer, heads in enumerate(kv_heads):
        has_window = numbers.has_window(layer)
        suffix = "_swa" if has_window else ""
        key = numbers.read_number(f"attention.key_length{suffix}", key_length)
        value = numbers.read_number(f"attention.value_length{suffix}", key)
        layouts.add((has_window, heads, key, value))
    return layouts


def _cache_layers(
    numbers: _HeaderNumbers, architecture: str, kv_heads: tuple[int, ...]
) -> Iterator[int]:
    if architecture in _RECURRENT or reads_target_cache(architecture):
        return
    # MTP heads do not run in a plain pass, and shared layers read the cache of another layer.
    end = len(kv_heads) - numbers.read_number("nextn_predict_layers", 0)
    if architecture == "gemma3n":
        end = min(end, _GEMMA3N_CACHE_LAYERS)
    if architecture == "gemma4":
        end -= numbers.read_number("attention.shared_kv_layers", 0)
    for layer in range(max(end, 1)):
        has_state = numbers.has_state(layer, architecture, kv_heads)
        if architecture in _CACHE_AND_STATE or not (has_state or numbers.is_feed_forward(layer)):
            yield layer


def _count_state_numbers(numbers: _HeaderNumbers, architecture: str, width: int) -> int:
    """Return how many numbers one recurrent layer keeps per sequence.

    It follows llama_hparams::n_embd_r and n_embd_s.
    """
    if "rwkv" in architecture:
        shifted = numbers.read_number("token_shift_count", 2)
        return width * (shifted + numbers.read_number("wkv.head_size", 0))
    if architecture.startswith("lfm2"):
        return width * max(numbers.read_number("shortconv.l_cache", 0) - 1, 0)
    kernel = numbers.read_number("ssm.conv_kernel", 0)
    head_length = numbers.read_number("kda.head_dim", 0)
    if head_length and architecture in _DELTA_HEADS:
        inner_size = numbers.read_number("attention.head_count", 1) * head_length
        return 3 * (kernel - 1 if kernel else 3) * inner_size + head_length * inner_size
    inner_size = numbers.read_number("ssm.inner_size", 0)
    state_size = numbers.read_number("ssm.state_size", 0)
    group_numbers = 2 * numbers.read_number("ssm.group_count", 0) * state_size
    return max(kernel - 1, 0) * (inner_size + group_numbers) + state_size * inner_size


class _HeaderNumbers:
    """Read integers from the metadata. Wrong values count as missing; other code reports them."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._metadata = header.metadata
        self._prefix = architecture

    def read_number(self, key: str, default: int) -> int:
        """Return a number; of a list, the largest."""
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, NumberArray):
            return max((part for part in value.values() if type(part) is int), default=default)
        return value if type(value) is int and value >= 0 else default

    def read_layer_number(self, key: str, layer: int) -> int:
        """Return a layer's number in a list, or 0."""
        value = self._metadata.get(f"{self._prefix}.{key}")
        values = value.values() if isinstance(value, NumberArray) else ()
        return int(values[layer]) if layer < len(values) else 0

    def has_window(self, layer: int) -> bool:
        """Return whether a layer has a sliding window.

        The pattern is a list, or a number n if every n-th layer has none.
        """
        pattern = self._metadata.get(f"{self._prefix}.attention.sliding_window_pattern")
        if isinstance(pattern, NumberArray):
            return self.read_layer_number("attention.sliding_window_pattern", layer) != 0
        return type(pattern) is int and pattern > 1 and layer % pattern < pattern - 1

    def is_feed_forward(self, layer: int) -> bool:
        """Return whether a layer has neither attention nor a state.

        In such a model each layer is of one of three kinds.
        """
        has_kinds = self._prefix.startswith("nemotron_h")
        return has_kinds and self.read_layer_number("feed_forward_length", layer) > 0

    def has_state(self, layer: int, architecture: str, kv_heads: tuple[int, ...]) -> bool:
        """Return whether a layer keeps a recurrent state."""
        if architecture in _RECURRENT or architecture in _CACHE_AND_STATE:
            return True
        if kv_heads[layer] == 0:  # in models without recurrent layers the state has size 0
            return not self.is_feed_forward(layer)
        layer_list = self._metadata.get(f"{self._prefix}.attention.recurrent_layers")
        if isinstance(layer_list, NumberArray):
            return self.read_layer_number("attention.recurrent_layers", layer) != 0
        interval = _ATTENTION_INTERVALS.get(architecture)
        if not interval or layer >= len(kv_heads) - self.read_number("nextn_predict_layers", 0):
            return False
        return (layer + 1) % max(self.read_number("full_attention_interval", interval), 1) != 0
