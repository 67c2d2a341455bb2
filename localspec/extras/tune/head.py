"""Make an EAGLE-3 draft for a target: one layer that reads the target's states, trained with PyTorch.

Its first draft follows from the target's state, and each further one from its own. So it is trained on
several drafts in a row, each from the states of the one before: Li et al. 2025, "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test".
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.extras.tune.model_file import EMBEDDINGS, VOCABULARY, ModelFile, write_model
from localspec.extras.tune.reading import Integers
from localspec.extras.tune.states import Window
from localspec.registry.header.gguf import Value

DRAFTS = 3  # in a row, on which it is trained
DRAFT_WEIGHT = 0.8  # of each draft beside the one before, since it is reached less often
LATER_SHARE = 0.5  # of the positions that count for the later drafts
BATCH_WINDOWS = 8
MAX_EPOCHS, MIN_STEPS, WARM_UP_STEPS = 12, 300, 40
STEP, DECAYS, WEIGHT_DECAY, MAX_GRADIENT_NORM = 1e-3, (0.9, 0.95), 0.01, 1.0
SMALL = 0.03  # factor of the weights that add to the residual, before any training
STATE_NOISE = 0.02  # added to the target's states, beside their mean size
EPSILON, ROPE_BASE = 1e-6, 10000.0
BYTES_PER_WEIGHT = 16  # the weight, its gradient, and two moments of Adam


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a layer. layers: those of the target that it reads, `eagle3.target_layers`."""

    width: int
    layers: tuple[int, ...]

    @property
    def head_length(self) -> int:
        return next(length for length in (64, 32, 16, 8, 4, 2) if self.width % length == 0)

    @property
    def n_head(self) -> int:
        return self.width // self.head_length

    @property
    def n_head_kv(self) -> int:
        """Up to eight heads share their keys and values."""
        divisors = (n for n in range(1, self.n_head + 1) if self.n_head % n == 0)
        return next(n for n in divisors if 8 * n >= self.n_head)

    @property
    def n_ff(self) -> int:
        """Two and three quarters of the width, in whole blocks of every quantization."""
        return -(-11 * self.width // 4 // 256) * 256

    def metadata(self, n_ctx_train: int) -> dict[str, Value | Sequence[int]]:
        """Return what llama.cpp reads of a file with such a layer, for a target of the same width."""
        values: dict[str, Value | Sequence[int]] = {
            "block_count": 1,
            "context_length": n_ctx_train,
            "embedding_length": self.width,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "rope.freq_base": ROPE_BASE,
            "target_layers": self.layers,
            "target_hidden_size": self.width,
        }
        return {"general.architecture": "eagle3"} | {
            f"eagle3.{key}": value for key, value in values.items()
        }


class Head:
    """A layer as tensors that can be trained, by their names in a file.

    vocabulary: (n,) the token of each row of its output matrix, ascending.
    """

    def __init__(self, shape: HeadShape, vocabulary: Integers, weights: dict[str, Tensor]) -> None:
        self.shape, self.vocabulary, self.weights = shape, vocabulary, weights
        for weight in weights.values():
            weight.requires_grad_()

    @classmethod
    def draw(
        cls,
        target: ModelFile,
        layers: tuple[int, ...],
        vocabulary: Integers,
        windows: Sequence[Window],
    ) -> Head:
        """Return a layer for a target. Until it is trained it proposes what the target has just written."""
        output = torch.tensor(target.read_rows(target.output_name, vocabulary))
        shape = HeadShape(output.shape[1], layers)
        width, query = shape.width, shape.n_head * shape.head_length
        key = shape.n_head_kv * shape.head_length
        generator = torch.Generator().manual_seed(0)

        def random_matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

        weights = {
            "fc.weight": torch.eye(width).repeat(1, len(layers)) / len(layers),
            "output_norm.weight": _output_norm(target, layers, windows),
            "output.weight": output,
        }
        block = {
            "attn_norm": torch.ones(width),
            "attn_norm_2": torch.ones(width),
            "attn_q": random_matrix(query, 2 * width),
            "attn_k": random_matrix(key, 2 * width),
            "attn_v": random_matrix(key, 2 * width),
            "attn_output": random_matrix(width, query, SMALL),
            "ffn_norm": torch.ones(width),
            "ffn_gate": random_matrix(shape.n_ff, width),
            "ffn_up": random_matrix(shape.n_ff, width),
            "ffn_down": random_matrix(width, shape.n_ff, SMALL),
        }
        return cls(
            shape, vocabulary, weights | {f"blk.0.{name}.weight": block[name] for name in block}
        )

    @classmethod
    def open(cls, path: Path) -> Head:
        """Return the layer in a file that `write` has written."""
        file = ModelFile(path)
        layers = file.read_value("eagle3.target_layers").values()
        shape = HeadShape(int(file.read_value("eagle3.embedding_length")), layers)
        names = [name for name in file.names if name != VOCABULARY]
        weights = {name: torch.tensor(file.read_tensor(name)) for name in names}
        return cls(shape, file.read_output_tokens(), weights)

    def write(self, path: Path, target: ModelFile) -> None:
        """Write a file for llama.cpp. target: whose vocabulary it has."""
        metadata = self.shape.metadata(target.n_ctx_train) | target.tokenizer
        values = {name: weight.detach().numpy() for name, weight in self.weights.items()}
        write_model(path, metadata, values, self.vocabulary)

    def unroll(self, embeddings: Tensor, states: Tensor, count: int) -> list[Tensor]:
        """Return the states (rows, length, width) behind each of `count` drafts in a row.

        embeddings: (rows, length, width) of the tokens. states: (rows, length, n_layers * width) of the
        target at the same tokens. Position i reads its token with the state of position i - 1, and predicts
        the token behind it. The drafts of round k read states of round k - 1. They attend to what was read
        from the target's states up to position i - k, and to their own predecessors behind that.
        """
        inputs = self._norm(embeddings, "blk.0.attn_norm")
        given = self._linear(states, "fc").float()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for _ in range(count):
            given = _shift(given, 1)
            both = torch.cat((inputs, self._norm(given, "blk.0.attn_norm_2")), -1)
            query = _rotate(self._heads(both, "attn_q"))
            keys.append(_rotate(self._heads(both, "attn_k")))
            values.append(self._heads(both, "attn_v"))
            mixed = _attend(query, keys, values).transpose(1, 2).flatten(2)
            inner = given + self._linear(mixed, "blk.0.attn_output").float()
            normed = self._norm(inner, "blk.0.ffn_norm")
            gate = F.silu(self._linear(normed, "blk.0.ffn_gate"))
            product = gate * self._linear(normed, "blk.0.ffn_up")
            given = inner + self._linear(product, "blk.0.ffn_down").float()
            outputs.append(given)
        return outputs

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits (…, n) of the draft's vocabulary."""
        return self._linear(self._norm(states, "output_norm"), "output").float()

    def _norm(self, values: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPSILON)
        return values * scale * self.weights[f"{name}.weight"]

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return F.linear(values, self.weights[f"{name}.weight"])

    def _heads(self, inputs: Tensor, name: str) -> Tensor:
        """Return (rows, n_head, length, head_length), keys and values as often as queries share them."""
        rows, length, _ = inputs.shape
        split = (
            self._linear(inputs, f"blk.0.{name}")
            .float()
            .view(rows, length, -1, self.shape.head_length)
        )
        heads = split.transpose(1, 2)
        return heads.repeat_interleave(self.shape.n_head // heads.shape[1], 1)


def _output_norm(target: ModelFile, layers: tuple[int, ...], windows: Sequence[Window]) -> Tensor:
    """Return weights by which a state of the target, normalised, is what its output matrix reads."""
    if len(set(layers)) > 1:
        return torch.tensor(target.read_tensor("output_norm.weight"))
    sample = np.concatenate([window.states for window in windows[:16]]).astype(np.float32)
    width = sample.shape[1] // len(layers)  # they are behind the target's own norm already
    return torch.full((width,), float(np.sqrt(np.mean(sample**2))))


def _attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return what the newest of several rounds reads, in the shape of `query`.

    keys, values: of each round. Of the first, position i sees those up to i - k, where k is the number of
    the newest round; of round m, only position i - k + m, which is its own predecessor.
    """
    newest, scale = len(keys) - 1, query.shape[-1] ** -0.5
    positions = torch.arange(query.shape[-2])
    visible = positions[:, None] - newest >= positions[None, :].clamp_min(1)
    scores = (query @ keys[0].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~visible, -1e9)
    own = [
        (query * _shift(keys[m], newest - m)).sum(-1, keepdim=True) * scale
        for m in range(1, newest + 1)
    ]
    weights = torch.softmax(torch.cat([scores, *own], -1), -1)
    mixed = (weights[..., : len(positions)] @ values[0]).float()
    for m in range(1, newest + 1):
        column = len(positions) + m - 1
        mixed = mixed + weights[..., column : column + 1] * _shift(values[m], newest - m)
    return mixed


def _shift(values: Tensor, count: int) -> Tensor:
    """Return values (…, length, width) moved back by `count` positions, with zeros before them."""
    return F.pad(values, (0, 0, count, 0))[..., : values.shape[-2], :]


def _rotate(values: Tensor) -> Tensor:
    """Turn each pair of neighbouring dimensions by an angle that grows with the position (RoPE)."""
    length, width = values.shape[-2:]
    rates = ROPE_BASE ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second = values[..., 0::2], values[..., 1::2]
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, -1).flatten(-2)


def train_head(
    head: Head,
    windows: Sequence[Window],
    target: ModelFile,
    seconds: float,
    threads: int,
    report: Callable[[float], None],
) -> None:
    """Minimize the cross entropy between the target's likeliest tokens and the drafts.

    target: whose embeddings it reads. seconds, report: as of `network.train_decoder`.
    """
    torch.set_num_threads(threads)
    weights = list(head.weights.values())
    optimizer = torch.optim.AdamW(weights, lr=STEP, betas=DECAYS, weight_decay=WEIGHT_DECAY)
    generator, noise = random.Random(0), torch.Generator().manual_seed(0)
    start, n_epoch = time.process_time(), -(-len(windows) // BATCH_WINDOWS)
    n_steps, half = max(MAX_EPOCHS * n_epoch, MIN_STEPS), _is_half_faster()
    order: list[Sequence[Window]] = []
    for step in range(n_steps):
        spent = (time.process_time() - start) / (seconds * threads)
        done = max(spent, step / n_steps)
        if done >= 1:
            break
        report(done)
        if not order:
            shuffled, size = generator.sample(windows, len(windows)), BATCH_WINDOWS
            order = [shuffled[at : at + size] for at in range(0, len(windows), size)]
        for group in optimizer.param_groups:
            group["lr"] = STEP * min(1, (step + 1) / WARM_UP_STEPS) * (1 - done)
        batch = _Batch.of(order.pop(), target, head.vocabulary)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = _loss(head, batch, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        optimizer.step()
    report(1.0)


@dataclass(frozen=True)
class _Batch:
    """Windows as tensors (rows, length, …).

    labels: numbers in the draft's vocabulary of the target's likeliest tokens. shares: their probabilities,
    0 for a token that is not in it, and at positions without a label.
    """

    embeddings: Tensor
    states: Tensor
    labels: Tensor
    shares: Tensor

    @classmethod
    def of(cls, windows: Sequence[Window], target: ModelFile, vocabulary: Integers) -> _Batch:
        length = max(len(window.tokens) for window in windows)

        def pad(part: str, fill: Callable[[np.ndarray], np.ndarray]) -> Tensor:
            arrays = [fill(getattr(window, part)) for window in windows]
            shape = (len(arrays), length, *arrays[0].shape[1:])
            padded = np.zeros(shape, arrays[0].dtype)
            for row, array in enumerate(arrays):
                padded[row, : len(array)] = array
            return torch.tensor(padded)

        top = pad("top", lambda values: values)
        numbers = np.searchsorted(vocabulary, top.numpy()).clip(max=len(vocabulary) - 1)
        is_known = torch.tensor(vocabulary[numbers]) == top
        return cls(
            pad("tokens", partial(target.read_rows, EMBEDDINGS)),
            pad("states", lambda values: values.astype(np.float32)),
            torch.tensor(numbers),
            pad("shares", lambda values: values) * is_known,
        )


def _loss(head: Head, batch: _Batch, noise: torch.Generator) -> Tensor:
    """Return the mean cross entropy in nats of the drafts in a row, the later ones with less weight."""
    states = batch.states
    size = states.abs().mean()
    states = states + torch.randn(states.shape, generator=noise) * STATE_NOISE * size
    known = batch.shares.sum(-1)
    total = torch.zeros(())
    for draft, outputs in enumerate(head.unroll(batch.embeddings, states, DRAFTS)):
        counts = known > 0.05
        counts[:, : draft + 1] = False  # no state comes before them
        if draft:
            counts &= torch.rand(counts.shape, generator=noise) < LATER_SHARE
        logarithms = F.log_softmax(head.logits(outputs[counts]), -1)
        shares = batch.shares[counts] / known[counts][:, None]
        loss = -(shares * logarithms.gather(1, batch.labels[counts])).sum(-1)
        total = total + DRAFT_WEIGHT**draft * loss.sum() / max(len(loss), 1)
    return total


def _is_half_faster() -> bool:
    """Return whether this processor multiplies matrices faster in bfloat16 than in float32."""
    seconds = []
    for kind in (torch.bfloat16, torch.float32):
        matrix = torch.ones(512, 512, dtype=kind)
        matrix @ matrix
        start = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return seconds[0] < seconds[1] / 1.5
