"""What a model keeps of the texts it reads: a cache, and in recurrent layers a state of fixed size.

As llama.cpp has it (llama_kv_cache, llama_memory_recurrent): attention keeps keys and values of every
token in every layer that has its own, sliding windows whole (`swa_full`); a recurrent layer keeps as much
for a text of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from localspec.purpose import is_sidecar, no_heads
from localspec.registry.header.architectures import (
    attends_everywhere,
    attention_interval,
    has_delta_heads,
    is_hybrid,
    is_recurrent,
)
from localspec.registry.header.gguf import Header, NumberArray

_F32 = 4  # bytes; states are kept in no other type
_GEMMA3N_EACH_LAYER = 256  # numbers of each token that it adds in each layer
_GEMMA3N_OWN = 20  # layers of it that have a cache of their own; the others read that of these


class Lengths(NamedTuple):
    """Of a key and a value: of one head, or of many together."""

    key: int
    value: int


class Kept(NamedTuple):
    """`keys`, `values`: numbers for each token. `heads`: the lengths that each of both come in.
    `state`: bytes for each sequence. `beside`: numbers for each row of a pass that a plain layer needs not.
    `ahead`: keys and values for each token that the model's own heads (MTP) keep, where they can draft.
    """

    keys: int
    values: int
    heads: tuple[frozenset[int], frozenset[int]]
    state: int
    beside: int
    ahead: Lengths = Lengths(0, 0)


def kept(
    header: Header, architecture: str, kv_heads: tuple[int, ...], width: int, lengths: Lengths
) -> Kept:
    """By a checked header; `kv_heads` has a number for each layer."""
    numbers = _Numbers(header, architecture)
    windowed = Lengths(
        numbers.one("attention.key_length_swa", lengths.key),
        numbers.one("attention.value_length_swa", lengths.value),
    )
    slides = windowed != lengths
    latent = numbers.one("attention.key_length_mla", 0) > 0  # the value is a part of the key
    keys, values, heads = 0, 0, (set[int](), set[int]())
    for layer in _attending(numbers, architecture, kv_heads):
        key, value = windowed if slides and numbers.slides(layer) else lengths
        if latent:
            value = 0
        keys, values = keys + kv_heads[layer] * key, values + kv_heads[layer] * value
        heads[0].add(key)
        heads[1].add(value)
    layers = sum(numbers.recurs(layer, architecture, kv_heads) for layer in range(len(kv_heads)))
    state = layers * _state(numbers, architecture, width) * _F32
    count = numbers.one("nextn_predict_layers", 0)
    ahead = 0 if no_heads(architecture, count) else sum(kv_heads[len(kv_heads) - count :])
    return Kept(
        keys,
        values,
        (frozenset(heads[0]), frozenset(heads[1])),
        state,
        _beside(numbers, architecture, len(kv_heads)),
        Lengths(ahead * lengths.key, 0 if latent else ahead * lengths.value),
    )


def cells(
    header: Header, architecture: str, kv_heads: tuple[int, ...], key_length: int
) -> set[tuple[bool, int, int, int]]:
    """What the layers' caches are like: with a window or not, heads, length of a key and of a value."""
    numbers, found = _Numbers(header, architecture), set()
    for layer, heads in enumerate(kv_heads):
        slides = numbers.slides(layer)
        kind = "_swa" if slides else ""
        key = numbers.one(f"attention.key_length{kind}", key_length)
        found.add((slides, heads, key, numbers.one(f"attention.value_length{kind}", key)))
    return found


def _attending(numbers: _Numbers, architecture: str, kv_heads: tuple[int, ...]) -> Iterator[int]:
    """The layers that have a cache of their own."""
    if is_recurrent(architecture) or is_sidecar(architecture):
        return
    # Heads that predict further tokens are not run; shared layers read another one's cache.
    last = len(kv_heads) - numbers.one("nextn_predict_layers", 0)
    if architecture == "gemma3n":
        last = min(last, _GEMMA3N_OWN)
    if architecture == "gemma4":
        last -= numbers.one("attention.shared_kv_layers", 0)
    for layer in range(max(last, 1)):
        attends = not numbers.recurs(layer, architecture, kv_heads)
        if attends_everywhere(architecture) or (attends and not numbers.feeds_only(layer)):
            yield layer


def _state(numbers: _Numbers, architecture: str, width: int) -> int:
    """Numbers that one recurrent layer keeps of a sequence (llama_hparams::n_embd_r and n_embd_s)."""
    if "rwkv" in architecture:
        return width * (numbers.one("token_shift_count", 2) + numbers.one("wkv.head_size", 0))
    if architecture.startswith("lfm2"):
        return width * max(numbers.one("shortconv.l_cache", 0) - 1, 0)
    kernel = numbers.one("ssm.conv_kernel", 0)
    head = numbers.one("kda.head_dim", 0)
    if head and has_delta_heads(architecture):
        inner = numbers.one("attention.head_count", 1) * head
        return 3 * (kernel - 1 if kernel else 3) * inner + head * inner
    inner, states = numbers.one("ssm.inner_size", 0), numbers.one("ssm.state_size", 0)
    beside = 2 * numbers.one("ssm.group_count", 0) * states
    return max(kernel - 1, 0) * (inner + beside) + states * inner


def _beside(numbers: _Numbers, architecture: str, layers: int) -> int:
    """Measured with llama.cpp's compute buffers, and somewhat more than they are."""
    each_layer = _GEMMA3N_EACH_LAYER if architecture == "gemma3n" else 0
    each_layer = numbers.one("embedding_length_per_layer_input", each_layer)
    inner = numbers.one("ssm.inner_size", 0) if is_hybrid(architecture) else 0
    return 10 * inner + 4 * layers * each_layer


class _Numbers:
    """Whole numbers of the metadata, where they are some; what is wrong is not said here."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._metadata = header.metadata
        self._prefix = architecture

    def one(self, key: str, default: int) -> int:
        """A number, of a list the largest."""
        found = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(found, NumberArray):
            return max((each for each in found.values() if type(each) is int), default=default)
        return found if type(found) is int and found >= 0 else default

    def of(self, key: str, layer: int) -> int:
        """A layer's number in a list; 0 where there is none."""
        found = self._metadata.get(f"{self._prefix}.{key}")
        values = found.values() if isinstance(found, NumberArray) else ()
        return int(values[layer]) if layer < len(values) else 0

    def slides(self, layer: int) -> bool:
        """Whether a layer looks at a window: by a list, or all but each n-th."""
        pattern = self._metadata.get(f"{self._prefix}.attention.sliding_window_pattern")
        if isinstance(pattern, NumberArray):
            return self.of("attention.sliding_window_pattern", layer) != 0
        return type(pattern) is int and pattern > 1 and layer % pattern < pattern - 1

    def feeds_only(self, layer: int) -> bool:
        """Whether a layer neither attends nor recurs: each of this kind does one of three things."""
        kind = self._prefix.startswith("nemotron_h")
        return kind and self.of("feed_forward_length", layer) > 0

    def recurs(self, layer: int, architecture: str, kv_heads: tuple[int, ...]) -> bool:
        """Whether a layer keeps a state."""
        if is_recurrent(architecture) or attends_everywhere(architecture):
            return True
        if kv_heads[layer] == 0:  # in models without any state it is of no size
            return not self.feeds_only(layer)
        listed = self._metadata.get(f"{self._prefix}.attention.recurrent_layers")
        if isinstance(listed, NumberArray):
            return self.of("attention.recurrent_layers", layer) != 0
        interval = attention_interval(architecture)
        if not interval or layer >= len(kv_heads) - self.one("nextn_predict_layers", 0):
            return False
        return (layer + 1) % max(self.one("full_attention_interval", interval), 1) != 0
