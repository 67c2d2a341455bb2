"""Models of published shapes, as their headers describe them. There are no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from localspec.registry.header.architectures import KvLengths, kv_size, rollback_kind
from localspec.registry.header.gguf import Tensor, Value
from localspec.registry.header.model import ModelInfo

_STATE = 4096  # numbers of a recurrent layer's inner state


@dataclass(frozen=True)
class Published:
    """The numbers of a model's configuration. bits: of a weight of the experts, and of any other weight.

    dense_layers: leading ones without experts. interval: every n-th layer attends, the others are recurrent.
    latent: numbers per token that all heads share (MLA). nextn: MTP heads.
    """

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    key_length: int
    feed_forward: int
    vocabulary: int
    experts: int = 0
    used: int = 0
    expert_size: int = 0
    shared: int = 0
    dense_layers: int = 0
    interval: int = 1
    latent: int = 0
    nextn: int = 0
    bits: tuple[float, float] = (4.85, 4.85)


MODELS = {
    "Qwen3.6-35B-A3B": Published(
        "qwen35moe", 40, 2048, 16, 2, 256, 512, 248320, 256, 8, 512, 512, interval=4, nextn=1
    ),
    "gpt-oss-20b": Published(
        "gpt-oss", 24, 2880, 64, 8, 64, 2880, 201088, 32, 4, 2880, bits=(4.25, 8.5)
    ),
    "gpt-oss-120b": Published(
        "gpt-oss", 36, 2880, 64, 8, 64, 2880, 201088, 128, 4, 2880, bits=(4.25, 8.5)
    ),
    "GLM-4.5-Air": Published(
        "glm4moe", 46, 4096, 96, 8, 128, 10944, 151552, 128, 8, 1408, 1408, dense_layers=1, nextn=1
    ),
    "Qwen3-30B-A3B": Published("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 128, 8, 768),
    "Mixtral-8x7B": Published("llama", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2, 14336),
    "DeepSeek-V3": Published(
        "deepseek2", 61, 7168, 128, 1, 576, 18432, 129280, 256, 8, 2048, 2048,
        dense_layers=3, latent=576, nextn=1,
    ),
    "Qwen3-32B": Published("qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
}  # fmt: skip


def describe(small: ModelInfo, numbers: Published, *, heads: bool = False) -> ModelInfo:
    """Return the model as its header describes it. heads: with its MTP heads. small: any model."""
    name, nextn = numbers.architecture, numbers.nextn if heads else 0
    layers = numbers.layers + nextn
    values: dict[str, Value] = {
        f"{name}.expert_count": numbers.experts,
        f"{name}.expert_used_count": numbers.used,
        f"{name}.full_attention_interval": numbers.interval,
        f"{name}.nextn_predict_layers": nextn,
        f"{name}.attention.key_length_mla": 192 if numbers.latent else 0,
    }
    if numbers.interval > 1:
        sizes = {"conv_kernel": 4, "state_size": 128, "group_count": 16, "inner_size": _STATE}
        values |= {f"{name}.ssm.{key}": size for key, size in sizes.items()}
    tensors = tuple(_tensors(numbers, layers))
    metadata = MappingProxyType({**small.header.metadata, **values})
    header = replace(small.header, tensors=tensors, metadata=metadata)
    lengths = KvLengths(numbers.key_length, numbers.key_length)
    kept = kv_size(header, name, (numbers.kv_heads,) * layers, numbers.width, lengths)
    head_prefixes = tuple(f"blk.{at}." for at in range(numbers.layers, layers))
    return replace(
        small,
        header=header,
        architecture=name,
        layers=layers,
        width=numbers.width,
        heads=numbers.heads,
        kept=kept,
        feed_forward=numbers.feed_forward,
        vocabulary=numbers.vocabulary,
        context=131072,
        rollback=rollback_kind(name, 128 if name == "gpt-oss" else 0),
        parameters=sum(tensor.elements for tensor in tensors),
        weights=sum(tensor.size for tensor in tensors),
        head_weights=sum(t.size for t in tensors if t.name.startswith(head_prefixes)),
    )


def _tensors(numbers: Published, layers: int) -> Iterator[Tensor]:
    def tensor(name: str, *shape: int, bits: float = numbers.bits[1]) -> Tensor:
        elements = 1
        for length in shape:
            elements *= length
        return Tensor(name, shape, 12, 0, int(elements * bits / 8))

    width, inner = numbers.width, numbers.heads * numbers.key_length
    if numbers.latent:
        inner = numbers.heads * 128
    yield tensor("token_embd.weight", width, numbers.vocabulary)
    yield tensor("output.weight", width, numbers.vocabulary, bits=max(numbers.bits[1], 6.56))
    for layer in range(layers):
        prefix, has_experts = f"blk.{layer}.", layer >= numbers.dense_layers and numbers.experts > 0
        kept = numbers.latent or numbers.kv_heads * numbers.key_length
        lengths = {"q": inner, "k": kept, "v": kept, "output": inner}
        if (layer + 1) % numbers.interval:
            lengths = {"qkv": 2 * _STATE, "gate": _STATE, "output": _STATE}
        for part, length in lengths.items():
            yield tensor(f"{prefix}attn_{part}.weight", width, length)
        if layer >= numbers.layers:
            yield tensor(f"{prefix}nextn.eh_proj.weight", 2 * width, width)
        for part in ("gate", "up", "down"):
            if not has_experts:
                yield tensor(f"{prefix}ffn_{part}.weight", width, numbers.feed_forward)
                continue
            shape = width, numbers.expert_size, numbers.experts
            yield tensor(f"{prefix}ffn_{part}_exps.weight", *shape, bits=numbers.bits[0])
            if numbers.shared:
                yield tensor(f"{prefix}ffn_{part}_shexp.weight", width, numbers.shared)
