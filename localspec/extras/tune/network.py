"""Train all weights of a small draft model with PyTorch: the decoder of llama, Qwen 2 and Qwen 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.errors import LoadFailed
from localspec.extras.tune.lessons import Lesson
from localspec.extras.tune.model_file import EMBEDDINGS, ModelFile
from localspec.extras.tune.reading import Floats
from localspec.extras.tune.steps import place_weights, run_steps, shuffle_batches

# Architectures that this decoder computes, and whether RoPE turns neighbouring dimensions or those that are
# half a head apart.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
# Metadata of variants that this decoder does not compute.
_UNKNOWN_KEYS = ("rope.scaling.type", "expert_count", "attention.sliding_window", "logit_scale")
# What each angle of RoPE is divided by, in the files of Llama 3.1 and later. It is no weight.
ROPE_DIVISORS = "rope_freqs.weight"
BATCH_TOKENS = 4096
MAX_EPOCHS, MIN_STEPS = 24, 300
STEP, DECAYS = 1e-3, (0.9, 0.98)
REFERENCE_WIDTH = 128  # the width at which STEP was found; wider matrices take smaller steps


class UnknownDecoder(LoadFailed):
    """This module cannot compute the model."""


class Decoder:
    """A model as tensors that can be trained."""

    def __init__(self, file: ModelFile) -> None:
        """Read the weights.

        Raises:
            UnknownDecoder: it is a model of another kind.
        """
        name = file.architecture
        unknown = UnknownDecoder(f"All weights of a draft of this kind ({name}) cannot be trained.")
        if name not in ARCHITECTURES or any(
            file.read_value(f"{name}.{key}") for key in _UNKNOWN_KEYS
        ):
            raise unknown
        self._file, self._neighbours = file, ARCHITECTURES[name]
        self.weights = {
            tensor: torch.tensor(file.read_tensor(tensor), requires_grad=True)
            for tensor in file.names
            if tensor != ROPE_DIVISORS
        }
        self._divisors = (
            torch.tensor(file.read_tensor(ROPE_DIVISORS)) if ROPE_DIVISORS in file.names else None
        )
        self._n_layer = int(file.read_value(f"{name}.block_count"))
        self._n_head = int(file.read_value(f"{name}.attention.head_count"))
        self._n_head_kv = int(file.read_value(f"{name}.attention.head_count_kv", self._n_head))
        self._epsilon = float(file.read_value(f"{name}.attention.layer_norm_rms_epsilon"))
        self._rope_base = float(file.read_value(f"{name}.rope.freq_base", 10000.0))
        head_width = len(self.weights["blk.0.attn_k.weight"]) // self._n_head_kv
        if file.read_value(f"{name}.rope.dimension_count", head_width) != head_width:
            raise unknown  # a part of each head is not turned

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the states (rows, length, width) of the last layer for tokens (rows, length)."""
        states = self.weights[EMBEDDINGS][tokens]
        for layer in range(self._n_layer):
            block = f"blk.{layer}"
            states = states + self._attention(self._norm(states, f"{block}.attn_norm"), block)
            inner = self._norm(states, f"{block}.ffn_norm")
            gate = F.silu(self._linear(inner, f"{block}.ffn_gate"))
            product = gate * self._linear(inner, f"{block}.ffn_up")
            states = states + self._linear(product, f"{block}.ffn_down")
        return self._norm(states, "output_norm")

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weights[self._file.output_name])

    def values(self) -> dict[str, Floats]:
        """Return the weights by the names of their tensors."""
        return {name: weight.detach().cpu().numpy() for name, weight in self.weights.items()}

    def _norm(self, values: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(values, weight.shape, weight, self._epsilon)

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return F.linear(values, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attention(self, inputs: Tensor, block: str) -> Tensor:
        rows, length, _ = inputs.shape

        def heads(name: str) -> Tensor:  # (rows, heads, length, head width)
            split = self._linear(inputs, f"{block}.{name}")
            n_head = self._n_head if name == "attn_q" else self._n_head_kv
            values = split.view(rows, length, n_head, -1)
            if f"{block}.{name}_norm.weight" in self.weights:
                values = self._norm(values, f"{block}.{name}_norm")
            return values.transpose(1, 2)

        query, key = (
            rotate(
                heads(name), self._rope_base, neighbours=self._neighbours, divisors=self._divisors
            )
            for name in ("attn_q", "attn_k")
        )
        shared = self._n_head // self._n_head_kv
        key, value = (x.repeat_interleave(shared, 1) for x in (key, heads("attn_v")))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._linear(mixed.transpose(1, 2).reshape(rows, length, -1), f"{block}.attn_output")


def rotate(
    values: Tensor, base: float, *, neighbours: bool, divisors: Tensor | None = None
) -> Tensor:
    """Turn each pair of dimensions by an angle that grows with the position (RoPE, Su et al. 2021).

    values: (…, length, width). neighbours: a pair lies side by side, otherwise half the width apart.
    divisors: (width / 2,) of the angles.
    """
    length, width = values.shape[-2:]
    exponents = torch.arange(0, width, 2, device=values.device) / width
    positions = torch.arange(length, device=values.device)
    angles = positions[:, None] * base**-exponents
    if divisors is not None:
        angles = angles / divisors.to(values.device)
    cos, sin = angles.cos(), angles.sin()
    if neighbours:
        first, second = values[..., 0::2], values[..., 1::2]
    else:
        first, second = values.chunk(2, -1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)


def train_decoder(
    decoder: Decoder,
    lessons: Sequence[Lesson],
    seconds: float,
    threads: int,
    report: Callable[[float], None],
) -> None:
    """Minimize the cross entropy between the target's likeliest tokens and the draft's.

    seconds, threads, report: as of `run_steps`.
    """
    decoder.weights = place_weights(decoder.weights)
    weights = list(decoder.weights.values())
    device = weights[0].device
    step_size = STEP * REFERENCE_WIDTH / decoder.weights[EMBEDDINGS].shape[1]
    optimizer = torch.optim.Adam(weights, lr=step_size, betas=DECAYS)
    batches = _make_batches(lessons)
    drawn = shuffle_batches(batches)
    n_steps = max(MAX_EPOCHS * len(batches), MIN_STEPS)

    def compute_loss() -> Tensor:
        (batch,) = next(drawn)
        return _loss(decoder, batch, device)

    run_steps(optimizer, weights, n_steps, seconds, threads, compute_loss, report)


def _make_batches(lessons: Sequence[Lesson]) -> list[list[Lesson]]:
    """Return lessons of similar length together: BATCH_TOKENS tokens at most, but one lesson at least."""
    batches: list[list[Lesson]] = [[]]
    for lesson in sorted(lessons, key=lambda lesson: len(lesson.tokens)):
        if batches[-1] and len(lesson.tokens) * (len(batches[-1]) + 1) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(lesson)
    return batches


def _loss(decoder: Decoder, lessons: Sequence[Lesson], device: torch.device) -> Tensor:
    """Return the mean cross entropy in nats over the positions of some lessons that have labels."""
    length = max(len(lesson.tokens) for lesson in lessons)
    tokens = torch.zeros(len(lessons), length, dtype=torch.long)
    has_label = torch.zeros(len(lessons), length, dtype=torch.bool)
    for row, lesson in enumerate(lessons):
        tokens[row, : len(lesson.tokens)] = torch.tensor(lesson.tokens)
        has_label[row, lesson.first : len(lesson.tokens)] = True
    states = decoder(tokens.to(device))[has_label.to(device)]
    logarithms = F.log_softmax(decoder.logits(states), -1)
    k = max(lesson.top.shape[1] for lesson in lessons)

    def column(name: str) -> Tensor:
        parts = [torch.tensor(getattr(lesson, name)) for lesson in lessons]
        return torch.cat([F.pad(part, (0, k - part.shape[1])) for part in parts]).to(device)

    return -(column("shares") * logarithms.gather(1, column("top"))).sum(-1).mean()
