"""Estimate how fast a pair answers with its weights divided between the GPU and main memory.

A pass reads all weights that it needs once, and the cache of its text, so its time is bytes divided by the
speed of the memory they lie in, and more rows take a share of that more. Of a mixture of experts it reads
those that its rows choose, wherever they lie. The speeds are measured by the loads of earlier pairs. What is
compared with the estimates are placements of one pair on one machine, so errors that all of them share do not
count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, NamedTuple

from msgspec import Meta

from localspec.model_traits import find_expert, order_experts
from localspec.registry.header.model import ModelInfo

GIB = 1 << 30
# Expected of any draft, in accepted tokens per drafted one. What a pair's drafts are like is only known
# once it is loaded.
EXPECTED_ACCEPTANCE = 0.7
MAX_PLANNED_DEPTH = 8
# Milliseconds for each layer of a pass, whatever its size, and of a round around its passes. Measured on an
# H200, where a draft of 24 layers takes 1.0 ms a token for 0.3 GiB of weights.
LAYER_MS, ROUND_MS = 0.04, 0.5
# The share of the experts that a token of a text chooses which the token before it has chosen, too: 45 % of
# Qwen3-30B-A3B's (github.com/kekzl/imp/pull/1359), where 80 % were chosen within the last eight tokens.
# Drafts cannot be judged later if they are not loaded, so this is rather too much for some models.
EXPERT_REPEATS = 0.45
# A share of a memory's time that only one load has shown counts half, so that a disturbed one is corrected.
_NEW_WEIGHT = 0.5
# The share of what its rows use that a pass must read once for several of them to measure `row_share`.
_MIN_SHARED = 0.2
_MIN_DIVIDED = 0.1  # the share of the bytes in main memory from which a divided target measures it


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """The speed of passes over weights in one memory.

    gib_ms: milliseconds per GiB that a pass of one row reads. row_share: the cost of each further row that
    uses the same weights, as a share of that.
    """

    gib_ms: Annotated[float, Meta(gt=0, lt=1e6)]
    row_share: Annotated[float, Meta(ge=0, le=1)]

    def pass_ms(self, gib: float, rows: int, wide_gib: float | None = None) -> float:
        """Return the milliseconds of a pass of `rows` rows.

        gib: GiB that one row reads. wide_gib: what all rows read together, if that is more. Where each row
        reads experts of its own, none of them is read for several rows.
        """
        read = gib if wide_gib is None else wide_gib
        return self.gib_ms * (read + (rows * gib - read) * self.row_share)

    def measure(
        self, gib: float, wide_gib: float, one_row_ms: float, wide_ms: float, rows: int
    ) -> PassSpeed:
        """Return the speed after a load has measured a pass of one row and one of `rows` rows once more."""
        gib_ms, row_share = one_row_ms / gib, self.row_share
        shared = rows * gib - wide_gib  # read once for several rows
        if shared > _MIN_SHARED * rows * gib:
            row_share = min(max((wide_ms / gib_ms - wide_gib) / shared, 0.0), 1.0)
        keep, new = 1 - _NEW_WEIGHT, _NEW_WEIGHT
        return PassSpeed(keep * self.gib_ms + new * gib_ms, keep * self.row_share + new * row_share)


@dataclass(frozen=True, slots=True)
class MemorySpeeds:
    """The speeds of both memories. Until a load has measured them, those of a usual workstation."""

    gpu: PassSpeed = PassSpeed(gib_ms=1.6, row_share=0.15)
    ram: PassSpeed = PassSpeed(gib_ms=25.0, row_share=0.3)

    def learn(
        self,
        one_gib: tuple[float, float],
        wide_gib: tuple[float, float],
        one_row_ms: float,
        wide_ms: float,
        rows: int,
    ) -> MemorySpeeds:
        """Return the speeds after a load measured the passes of a target.

        one_gib, wide_gib: GiB that a pass of one row and one of `rows` rows read on the GPU and in main
        memory. one_row_ms, wide_ms: what they take. Where the target is divided, what the GPU is not expected
        to take is main memory's.
        """
        if sum(one_gib) <= 0 or one_row_ms <= 0 or rows < 2:
            return self
        (on_gpu, in_ram), (wide_on_gpu, wide_in_ram) = one_gib, wide_gib
        if in_ram <= 0:
            gpu = self.gpu.measure(on_gpu, wide_on_gpu, one_row_ms, wide_ms, rows)
            return replace(self, gpu=gpu)
        ram_ms = one_row_ms - self.gpu.pass_ms(on_gpu, 1)
        ram_wide_ms = wide_ms - self.gpu.pass_ms(on_gpu, rows, wide_on_gpu)
        if ram_ms <= 0 or in_ram < _MIN_DIVIDED * sum(one_gib):
            return self
        return replace(self, ram=self.ram.measure(in_ram, wide_in_ram, ram_ms, ram_wide_ms, rows))


class Placement(NamedTuple):
    """A division of a pair's weights: what is not on the GPU lies in main memory.

    layers: of the target on the GPU, its last ones, of which the output counts as one; −1: all. cpu_experts:
    expert tensors of these layers in main memory, in the order of `order_experts`. draft_layers,
    draft_cpu_experts: the same of the draft. drafts: whether it, or the target's own heads, are loaded.
    """

    layers: int = -1
    cpu_experts: int = 0
    draft_layers: int = -1
    draft_cpu_experts: int = 0
    drafts: bool = True


class LayerBytes(NamedTuple):
    """The weights of some layers. experts: each of their tensors, in the order in which they leave a GPU."""

    dense: float = 0.0
    experts: tuple[float, ...] = ()


# Embeddings of which a pass reads a few rows. llama.cpp keeps them in main memory.
_INPUTS = frozenset({"token_embd.weight", "per_layer_token_embd.weight"})


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The weights of a model in bytes, by when a pass reads them.

    inputs: never as a whole. output: what belongs to no layer, in every pass. heads: of its own MTP heads.
    used: the share of the experts that one row chooses. moe_layers: the layer of each tensor of experts.
    """

    inputs: float
    output: float
    trunk: LayerBytes
    heads: LayerBytes
    used: float
    moe_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: ModelInfo) -> ModelBytes:
        """Return those of a model. The heads of a sidecar are its trunk."""
        tensors = model.header.tensors
        scale = model.weights / max(sum(tensor.size for tensor in tensors), 1)
        names = {tensor.name for tensor in tensors}
        inputs = _INPUTS if "output.weight" in names else _INPUTS - {"token_embd.weight"}
        first_head = model.layers if model.sidecar else model.trunk_layers
        input_bytes = output = 0.0
        dense, experts = [0.0, 0.0], dict.fromkeys(order_experts(names), 0.0)
        for tensor in tensors:
            size = tensor.size * scale
            if expert := find_expert(tensor.name):
                experts[expert] += size
            elif tensor.name.startswith("blk."):
                dense[int(tensor.name.split(".")[1]) >= first_head] += size
            elif tensor.name in inputs:
                input_bytes += size
            else:
                output += size
        trunk, heads = (
            tuple(size for each, size in experts.items() if (each.layer >= first_head) == ahead)
            for ahead in (False, True)
        )
        return cls(
            input_bytes,
            output,
            LayerBytes(dense[0], trunk),
            LayerBytes(dense[1], heads),
            _used_share(model),
            tuple(each.layer for each in experts),
        )

    def count_moe_layers(self, cpu_experts: int) -> int:
        """Return in how many of the first layers `cpu_experts` tensors of experts are."""
        return self.moe_layers[cpu_experts - 1] + 1 if cpu_experts else 0

    def read_gib(
        self,
        on_gpu: float,
        cpu_experts: int = 0,
        rows: int = 1,
        attended: float = 0.0,
        repeats: float = 0.0,
    ) -> tuple[float, float]:
        """Return the GiB that a pass reads on the GPU and in main memory.

        on_gpu: the share of the layers there. attended: bytes of cache that it reads as well. repeats: the
        share of a row's experts that are those of the row before; any expert is equally likely otherwise.
        """
        experts, new = self.trunk.experts, self.used * (1 - repeats)
        union = 1 - (1 - self.used) * (1 - new) ** (rows - 1)
        dense = self.trunk.dense + attended
        gpu = on_gpu * (dense + union * sum(experts[cpu_experts:])) + self.output * (on_gpu > 0)
        return gpu / GIB, (self.output + dense + union * sum(experts) - gpu) / GIB


def _used_share(model: ModelInfo) -> float:
    metadata, prefix = model.header.metadata, model.architecture
    count = metadata.get(f"{prefix}.expert_count")
    used = metadata.get(f"{prefix}.expert_used_count")
    if type(count) is int and type(used) is int and 0 < used <= count:
        return used / count
    return 1.0


@dataclass(frozen=True)
class RateEstimate:
    """A pair, and its tokens per second for any placement of its models.

    draft: a draft model or a sidecar. Without one the target's own MTP heads draft, if it has any. attended:
    bytes of the target's cache that a pass reads. repeats: as in `ModelBytes.read_gib`.
    """

    target: ModelInfo
    draft: ModelInfo | None
    speeds: MemorySpeeds
    attended: float = 0.0
    repeats: float = EXPERT_REPEATS

    def tokens_per_second(self, placed: Placement) -> float:
        """Return the rate at the best depth, or that of plain decoding without drafts.

        A target's own heads are its last layers, which are the first on the GPU.
        """
        best = 1 / (self._target_ms(placed, 1) + ROUND_MS)
        if not placed.drafts:
            return 1e3 * best
        is_block = self.draft is not None and self.draft.sidecar in ("dflash", "dspark")
        step_ms, tokens = self._step_ms(placed), 1.0
        for depth in range(1, MAX_PLANNED_DEPTH + 1):
            tokens += EXPECTED_ACCEPTANCE**depth
            steps = 1 if is_block else depth
            round_ms = self._target_ms(placed, depth + 1) + steps * step_ms + ROUND_MS
            best = max(best, tokens / round_ms)
        return 1e3 * best

    def read_gib(self, placed: Placement, rows: int = 1) -> tuple[float, float]:
        """Return the GiB that a pass of the target reads on the GPU and in main memory."""
        share = self.share_on_gpu(placed)
        apart = placed.cpu_experts
        return self.weights.read_gib(share, apart, rows, self.attended, self.repeats)

    def share_on_gpu(self, placed: Placement) -> float:
        """Return the share of the target's layers on the GPU."""
        layers = self.count_layers(placed.drafts)
        skipped = self.target.layers - layers  # Heads without weights still count as layers.
        placed_layers = max(placed.layers - 1 - skipped, 0)
        return 1.0 if placed.layers < 0 else min(placed_layers / layers, 1.0)

    def count_layers(self, drafts: bool) -> int:
        """Return the number of the target's layers with weights: its heads are only loaded if they draft."""
        has_heads = drafts and self.draft is None
        return self.target.layers if has_heads else max(self.target.trunk_layers, 1)

    @cached_property
    def weights(self) -> ModelBytes:
        return ModelBytes.of(self.target)

    @cached_property
    def draft_weights(self) -> ModelBytes | None:
        return ModelBytes.of(self.draft) if self.draft else None

    def _target_ms(self, placed: Placement, rows: int) -> float:
        # A layer whose experts lie apart is computed in two parts.
        apart = placed.cpu_experts / max(len(self.weights.trunk.experts), 1)
        parts = 1 + self.share_on_gpu(placed) * min(apart, 1)
        layers_ms = self.target.layers * LAYER_MS * parts
        return self._sum_ms(self.read_gib(placed), rows, self.read_gib(placed, rows)) + layers_ms

    def _step_ms(self, placed: Placement) -> float:
        draft, apart = self.draft_weights, placed.draft_cpu_experts
        if self.draft and draft:
            gib = draft.read_gib(float(placed.draft_layers != 0), apart)
            return self._sum_ms(gib, 1, gib) + self.draft.layers * LAYER_MS
        count = max(self.target.layers - self.target.trunk_layers, 1)
        dense, experts = self.weights.heads
        # Of several heads, the first one drafts all tokens.
        head = LayerBytes(dense / count, tuple(size / count for size in experts))
        apart = max(placed.cpu_experts - len(self.weights.trunk.experts), 0)
        gib = replace(self.weights, trunk=head).read_gib(float(placed.layers != 0), apart)
        return self._sum_ms(gib, 1, gib) + LAYER_MS

    def _sum_ms(self, gib: tuple[float, float], rows: int, wide: tuple[float, float]) -> float:
        gpu_ms = self.speeds.gpu.pass_ms(gib[0], rows, wide[0])
        return gpu_ms + self.speeds.ram.pass_ms(gib[1], rows, wide[1])
