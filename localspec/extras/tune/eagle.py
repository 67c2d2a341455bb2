"""Make an EAGLE-3 draft for a target: one layer that reads the target's states, trained with PyTorch.

Its first draft follows from the target's state, and each further one from its own. So it is trained on
several drafts in a row, each from the states of the one before: Li et al. 2025, "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.extras.tune.model_file import EMBEDDINGS, VOCABULARY, ModelFile, write_model
from localspec.extras.tune.network import rotate
from localspec.extras.tune.reading import Floats, Integers
from localspec.extras.tune.states import Floats16, Window
from localspec.extras.tune.steps import place_weights, run_steps, shuffle_batches
from localspec.model_traits import emits_layers
from localspec.registry.header.gguf import Value

TRAINED_DRAFTS = 3  # The number of drafts in a row that it is trained on.
# A later draft is reached less often, so it counts this much of the one before, and at a share of positions.
DRAFT_WEIGHT, LATER_SHARE = 0.8, 0.5
BATCH_WINDOWS = 8
MAX_EPOCHS, MIN_STEPS = 12, 300
STEP, DECAYS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.01
# Factor of the matrices that add to the residual, so that a draft begins as the target's last prediction.
INITIAL_SCALE = 0.03
# Deviation of the noise that is added to the target's states, in mean absolute values of them.
STATE_NOISE = 0.02
NORM_EPSILON, ROPE_BASE = 1e-6, 10000.0


@dataclass(frozen=True)
class EagleShape:
    """The sizes of a layer. layers: those of the target that it reads, `eagle3.target_layers`."""

    width: int
    layers: tuple[int, ...]

    @property
    def head_length(self) -> int:
        return next(length for length in (64, 32, 16, 8, 4, 2) if self.width % length == 0)

    @property
    def n_head(self) -> int:
        """The number of attention heads."""
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

    def count_weights(self, n_rows: int) -> int:
        """Return how many weights a layer has whose output matrix has `n_rows` rows."""
        attention = 2 * (self.n_head + 2 * self.n_head_kv) * self.head_length + self.width
        per_input = len(self.layers) * self.width + attention + 3 * self.n_ff + n_rows
        return self.width * per_input

    def metadata(self, n_ctx_train: int) -> dict[str, Value | Sequence[int]]:
        """Return what llama.cpp reads of a file with such a layer, for a target of the same width."""
        values: dict[str, Value | Sequence[int]] = {
            "block_count": 1,
            "context_length": n_ctx_train,
            "embedding_length": self.width,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": NORM_EPSILON,
            "rope.freq_base": ROPE_BASE,
            "target_layers": self.layers,
            "target_hidden_size": self.width,
        }
        own = {f"eagle3.{key}": value for key, value in values.items()}
        return {"general.architecture": "eagle3", **own}


class EagleLayer:
    """A layer as tensors that can be trained, by their names in a file.

    vocabulary: (n,) the token of each row of its output matrix, ascending.
    """

    def __init__(self, shape: EagleShape, vocabulary: Integers, weights: dict[str, Tensor]) -> None:
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
    ) -> EagleLayer:
        """Return a layer for a target. Until it is trained it proposes what the target has just written."""
        output = torch.tensor(target.read_rows(target.output_name, vocabulary))
        shape = EagleShape(output.shape[1], layers)
        width, query = shape.width, shape.n_head * shape.head_length
        key = shape.n_head_kv * shape.head_length
        generator = torch.Generator().manual_seed(0)

        def random_matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

        block = {
            "attn_norm": torch.ones(width),
            "attn_norm_2": torch.ones(width),
            "attn_q": random_matrix(query, 2 * width),
            "attn_k": random_matrix(key, 2 * width),
            "attn_v": random_matrix(key, 2 * width),
            "attn_output": random_matrix(width, query, INITIAL_SCALE),
            "ffn_norm": torch.ones(width),
            "ffn_gate": random_matrix(shape.n_ff, width),
            "ffn_up": random_matrix(shape.n_ff, width),
            "ffn_down": random_matrix(width, shape.n_ff, INITIAL_SCALE),
        }
        weights = {
            "fc.weight": torch.eye(width).repeat(1, len(layers)) / len(layers),
            "output_norm.weight": _output_norm(target, windows),
            "output.weight": output,
            **{f"blk.0.{name}.weight": values for name, values in block.items()},
        }
        return cls(shape, vocabulary, weights)

    @classmethod
    def open(cls, path: Path) -> EagleLayer:
        """Return the layer in a file that `write` has written."""
        file = ModelFile(path)
        layers = file.read_value("eagle3.target_layers").values()
        shape = EagleShape(int(file.read_value("eagle3.embedding_length")), layers)
        names = [name for name in file.names if name != VOCABULARY]
        weights = {name: torch.tensor(file.read_tensor(name)) for name in names}
        return cls(shape, file.read_output_tokens(), weights)

    def write(self, path: Path, target: ModelFile) -> None:
        """Write a file for llama.cpp. target: whose vocabulary it has."""
        metadata = self.shape.metadata(target.n_ctx_train) | target.tokenizer
        values = {name: weight.detach().cpu().numpy() for name, weight in self.weights.items()}
        write_model(path, metadata, values, self.vocabulary)

    def unroll(self, embeddings: Tensor, states: Tensor, count: int) -> list[Tensor]:
        """Return the states (rows, length, width) behind each of `count` drafts in a row.

        embeddings: (rows, length, width) of the tokens. states: (rows, length, n_layers * width) of the
        target at the same tokens. Position i reads its token with the state of position i - 1, and predicts
        the token behind it. The drafts of round k read states of round k - 1. They attend to what was read
        from the target's states up to position i - k, and to their own predecessors behind that.
        """
        inputs = self._norm(embeddings, "blk.0.attn_norm")
        previous = self._linear(states, "fc").float()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for _ in range(count):
            previous = _shift(previous, 1)
            both = torch.cat((inputs, self._norm(previous, "blk.0.attn_norm_2")), -1)
            query = rotate(self._heads(both, "attn_q"), ROPE_BASE, neighbours=True)
            keys.append(rotate(self._heads(both, "attn_k"), ROPE_BASE, neighbours=True))
            values.append(self._heads(both, "attn_v"))
            mixed = _attend(query, keys, values).transpose(1, 2).flatten(2)
            inner = previous + self._linear(mixed, "blk.0.attn_output").float()
            normed = self._norm(inner, "blk.0.ffn_norm")
            gate = F.silu(self._linear(normed, "blk.0.ffn_gate"))
            product = gate * self._linear(normed, "blk.0.ffn_up")
            previous = inner + self._linear(product, "blk.0.ffn_down").float()
            outputs.append(previous)
        return outputs

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits (…, n) of the draft's vocabulary."""
        return self._linear(self._norm(states, "output_norm"), "output").float()

    def _norm(self, values: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(values.float(), weight.shape, weight, NORM_EPSILON)

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return F.linear(values, self.weights[f"{name}.weight"])

    def _heads(self, inputs: Tensor, name: str) -> Tensor:
        """Return (rows, n_head, length, head_length), keys and values as often as queries share them."""
        rows, length, _ = inputs.shape
        split = self._linear(inputs, f"blk.0.{name}").float()
        heads = split.view(rows, length, -1, self.shape.head_length).transpose(1, 2)
        return heads.repeat_interleave(self.shape.n_head // heads.shape[1], 1)


def _output_norm(target: ModelFile, windows: Sequence[Window]) -> Tensor:
    """Return weights by which a state of the target, normalised, is what its output matrix reads."""
    width = int(target.read_value(f"{target.architecture}.embedding_length"))
    if not emits_layers(target.architecture):  # then its states are behind its norm already
        sample = np.concatenate([window.states for window in windows[:16]]).astype(np.float32)
        return torch.full((width,), float(np.sqrt(np.mean(sample**2))))
    for name in ("output_norm.weight", "token_embd_norm.weight"):
        if name in target.names:
            return torch.tensor(target.read_tensor(name))
    return torch.ones(width)


def _attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return what the newest of several rounds reads, in the shape of `query`.

    keys, values: of each round. Of the first, position i sees those up to i - k, where k is the number of
    the newest round; of round m, only position i - k + m, which is its own predecessor.
    """
    newest, scale = len(keys) - 1, query.shape[-1] ** -0.5
    positions = torch.arange(query.shape[-2], device=query.device)
    # The engine never reads position 0, since no state comes before it.
    visible = (positions[:, None] - newest >= positions) & (positions > 0)
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


def train_layer(
    layer: EagleLayer,
    windows: Sequence[Window],
    target: ModelFile,
    seconds: float,
    threads: int,
    report: Callable[[float], None],
) -> None:
    """Minimize the cross entropy between the target's likeliest tokens and the drafts.

    target: whose embeddings it reads. seconds, threads, report: as of `run_steps`.
    """
    layer.weights = place_weights(layer.weights)
    weights = list(layer.weights.values())
    optimizer = torch.optim.AdamW(weights, lr=STEP, betas=DECAYS, weight_decay=WEIGHT_DECAY)
    torch.manual_seed(0)
    batches = shuffle_batches(windows, BATCH_WINDOWS)
    n_steps = max(MAX_EPOCHS * -(-len(windows) // BATCH_WINDOWS), MIN_STEPS)

    def compute_loss() -> Tensor:
        return _loss(layer, _Batch.of(next(batches), target, layer))

    run_steps(optimizer, weights, n_steps, seconds, threads, compute_loss, report)


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
    def of(cls, windows: Sequence[Window], target: ModelFile, layer: EagleLayer) -> _Batch:
        length = max(len(window.tokens) for window in windows)

        def pad(part: str, fill: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
            arrays = [fill(getattr(window, part)) for window in windows]
            shape = (len(arrays), length, *arrays[0].shape[1:])
            padded = np.zeros(shape, arrays[0].dtype)
            for row, array in enumerate(arrays):
                padded[row, : len(array)] = array
            return padded

        n_inputs, vocabulary = layer.weights["fc.weight"].shape[1], layer.vocabulary

        def widen(states: Floats16) -> Floats:  # a state that several inputs read is repeated
            return np.tile(states.astype(np.float32), n_inputs // states.shape[1])

        top = pad("top")
        numbers = np.searchsorted(vocabulary, top).clip(max=len(vocabulary) - 1)
        is_known = vocabulary[numbers] == top
        parts = (
            pad("tokens", partial(target.read_rows, EMBEDDINGS)),
            pad("states", widen),
            numbers,
            pad("shares") * is_known,
        )
        device = layer.weights["fc.weight"].device
        return cls(*(torch.from_numpy(part).to(device) for part in parts))


def _loss(layer: EagleLayer, batch: _Batch) -> Tensor:
    """Return the mean cross entropy in nats of the drafts in a row, the later ones with less weight."""
    deviation = STATE_NOISE * batch.states.abs().mean()
    states = batch.states + torch.randn_like(batch.states) * deviation
    known = batch.shares.sum(-1)
    total = torch.zeros((), device=states.device)
    for draft, outputs in enumerate(layer.unroll(batch.embeddings, states, TRAINED_DRAFTS)):
        counts = known > 0.05
        counts[:, : draft + 1] = False  # no state comes before them
        if draft:
            counts &= torch.rand(counts.shape, device=counts.device) < LATER_SHARE
        logarithms = F.log_softmax(layer.logits(outputs[counts]), -1)
        shares = batch.shares[counts] / known[counts][:, None]
        loss = -(shares * logarithms.gather(1, batch.labels[counts])).sum(-1)
        total = total + DRAFT_WEIGHT**draft * loss.sum() / counts.sum().clamp(min=1)
    return total
