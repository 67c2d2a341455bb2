"""Estimate how fast a pair answers with its weights divided between the GPU and main memory.

A pass reads all weights that it needs once, and the cache of its text, so its time is bytes divided by the
speed of the memory they lie in, and more rows take a share of that more. Of a mixture of experts it reads
those that its rows choose, wherever they lie. The speeds are measured by the loads of earlier pairs. What is
compared with the estimates are placements of one pair on one machine, so errors that all of them share do not
count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from localspec.model_traits import SidecarKind, find_expert, order_experts
from localspec.protocol.pairs import ForecastView, Interval
from localspec.registry.header.gguf import TENSOR_TYPES
from localspec.registry.header.model import ModelInfo
from localspec.registry.header.speeds import (
    MEASURED_ROWS,
    MEMORIES,
    READING,
    USES,
    MemorySpeeds,
    Part,
    PassSpeed,
    Use,
)

GIB = 1 << 30
# Expected of any draft, in accepted tokens per drafted one. What a pair's drafts are like is only known
# once it is loaded.
EXPECTED_ACCEPTANCE = 0.7
MAX_PLANNED_DEPTH = 8
# The share of the experts that a token of a text chooses which the token before it has chosen, too: 45 % of
# Qwen3-30B-A3B's (github.com/kekzl/imp/pull/1359), where 80 % were chosen within the last eight tokens.
# Drafts cannot be judged later if they are not loaded, so this is rather too much for some models.
EXPERT_REPEATS = 0.45


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


ReadGib = tuple[float, ...]  # what a pass reads of each of _PLACES
_PLACES = tuple((memory, use) for memory in MEMORIES for use in USES)
# Embeddings of which a pass reads a few rows. llama.cpp keeps them in main memory.
_INPUTS = frozenset({"token_embd.weight", "per_layer_token_embd.weight"})


@dataclass(frozen=True)
class ModelBytes:
    """The weights of a model in bytes, by when a pass reads them.

    inputs: never as a whole. output: what belongs to no layer, in every pass. heads: of its own MTP heads.
    used: the share of the experts that one row chooses. moe_layers: the layer of each tensor of experts.
    kinds: bytes by type, of each use.
    """

    inputs: float
    output: float
    trunk: LayerBytes
    heads: LayerBytes
    used: float
    moe_layers: tuple[int, ...] = ()
    kinds: Mapping[Use, Mapping[str, float]] = field(default_factory=dict)

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
        kinds: dict[Use, Counter[str]] = {use: Counter() for use in USES}
        for tensor in tensors:
            size, kind = tensor.size * scale, TENSOR_TYPES[tensor.kind][0]
            if expert := find_expert(tensor.name):
                experts[expert] += size
                kinds["experts"][kind] += tensor.size
            elif tensor.name.startswith("blk."):
                dense[int(tensor.name.split(".")[1]) >= first_head] += size
                kinds["layers"][kind] += tensor.size
            elif tensor.name in inputs:
                input_bytes += size
            else:
                output += size
                kinds["output"][kind] += tensor.size
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
            kinds,
        )

    @cached_property
    def _expert_sums(self) -> tuple[float, ...]:
        """The bytes of the trunk's experts without the first n of their tensors, by n."""
        return tuple(accumulate(reversed(self.trunk.experts), initial=0.0))[::-1]

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
    ) -> ReadGib:
        """Return the GiB that a pass reads in each memory.

        on_gpu: the share of the layers there. attended: bytes of cache that it reads as well. repeats: the
        share of a row's experts that are those of the row before; any expert is equally likely otherwise.
        """
        sums, new = self._expert_sums, self.used * (1 - repeats)
        union = 1 - (1 - self.used) * (1 - new) ** (rows - 1)
        dense, every = self.trunk.dense + attended, union * sums[0]
        there = on_gpu * union * sums[min(cpu_experts, len(sums) - 1)]
        output = self.output * (on_gpu > 0)
        gpu = on_gpu * dense, there, output
        ram = dense - gpu[0], every - there, self.output - output
        return tuple(size / GIB for size in (*gpu, *ram))


@dataclass(frozen=True, slots=True)
class Outline:
    """A model of which no header was read: the numbers that an estimate needs, as in `ModelInfo`."""

    layers: int
    trunk_layers: int
    sidecar: SidecarKind | None
    sizes: ModelBytes


def _used_share(model: ModelInfo) -> float:
    metadata, prefix = model.header.metadata, model.architecture
    count = metadata.get(f"{prefix}.expert_count")
    used = metadata.get(f"{prefix}.expert_used_count")
    if type(count) is int and type(used) is int and 0 < used <= count:
        return used / count
    return 1.0


AnyModel = TypeVar("AnyModel", bound=ModelInfo | Outline)


@dataclass(frozen=True)
class RateEstimate(Generic[AnyModel]):
    """A pair, and its tokens per second for any placement of its models.

    draft: a draft model or a sidecar. Without one the target's own MTP heads draft, if it has any. attended:
    bytes of the target's cache that a pass reads. repeats: as in `ModelBytes.read_gib`.
    """

    target: AnyModel
    draft: AnyModel | None
    speeds: MemorySpeeds
    attended: float = 0.0
    repeats: float = EXPERT_REPEATS

    def tokens_per_second(
        self, placed: Placement, acceptance: float = EXPECTED_ACCEPTANCE
    ) -> float:
        """Return the rate at the best depth, or that of plain decoding without drafts.

        acceptance: accepted tokens per drafted one. A target's own heads are its last layers, which are the
        first on the GPU.
        """
        round_ms, max_depth = self.speeds.round_ms, MAX_PLANNED_DEPTH if placed.drafts else 0
        target_ms = self._list_target_ms(placed, range(1, max_depth + 2))
        best = 1 / (target_ms[0] + round_ms)
        if not placed.drafts:
            return 1e3 * best
        is_block = self.draft is not None and self.draft.sidecar in ("dflash", "dspark")
        step_ms, tokens = self._step_ms(placed), 1.0
        for depth in range(1, max_depth + 1):
            tokens += acceptance**depth
            steps = 1 if is_block else depth
            passes_ms = target_ms[depth] + steps * step_ms
            best = max(best, tokens / (passes_ms + round_ms))
        return 1e3 * best

    def read_gib(self, placed: Placement, rows: int = 1) -> ReadGib:
        """Return the GiB that a pass of the target reads in each memory."""
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
        return _count_bytes(self.target)

    @cached_property
    def draft_weights(self) -> ModelBytes | None:
        return _count_bytes(self.draft) if self.draft else None

    def _list_target_ms(self, placed: Placement, widths: Iterable[int]) -> list[float]:
        """Return the milliseconds of passes of the target over so many rows each."""
        speeds, one = self._target_speeds, self.read_gib(placed)
        layers_ms = self.count_parts(placed) * self.speeds.layer_ms
        # A wide pass reads more than a narrow one only where its rows choose experts.
        is_dense = not self.weights.trunk.experts
        gibs = ((rows, one if is_dense else self.read_gib(placed, rows)) for rows in widths)
        return [_sum_ms(speeds, one, gib, rows) + layers_ms for rows, gib in gibs]

    def reading_ms(self, placed: Placement) -> float:
        """Return the milliseconds of a token of a long prompt. What lies before it is not counted."""
        read = replace(self, attended=0.0).read_gib(placed)
        return sum(
            speed.reading_ms(gib)
            for speed, gib, (_, use) in zip(self._target_speeds, read, _PLACES, strict=True)
            if use != "output"
        )

    def count_parts(self, placed: Placement) -> float:
        """Return the number of the target's layers. One whose experts lie apart is computed in two parts."""
        apart = placed.cpu_experts / max(len(self.weights.trunk.experts), 1)
        return self.target.layers * (1 + self.share_on_gpu(placed) * min(apart, 1))

    def list_parts(self, placed: Placement) -> tuple[Part, ...]:
        """Return what passes of the target read, by memory and type."""
        read = [self.read_gib(placed, rows) for rows in MEASURED_ROWS]
        return _list_parts(self.weights, read)

    def list_draft_parts(self, placed: Placement) -> tuple[Part, ...]:
        """Return the same of the draft."""
        if not self.draft_weights:
            return ()
        on_gpu, apart = float(placed.draft_layers != 0), placed.draft_cpu_experts
        read = [self.draft_weights.read_gib(on_gpu, apart, rows) for rows in MEASURED_ROWS]
        return _list_parts(self.draft_weights, read)

    @cached_property
    def _target_speeds(self) -> tuple[PassSpeed, ...]:
        return _list_speeds(self.speeds, self.weights)

    @cached_property
    def _draft_speeds(self) -> tuple[PassSpeed, ...]:
        return _list_speeds(self.speeds, self.draft_weights or self.weights)

    @cached_property
    def _head(self) -> ModelBytes:
        """The first of the target's own heads, which drafts all tokens."""
        count = max(self.target.layers - self.target.trunk_layers, 1)
        dense, experts = self.weights.heads
        head = LayerBytes(dense / count, tuple(size / count for size in experts))
        return replace(self.weights, trunk=head)

    def _step_ms(self, placed: Placement) -> float:
        draft, apart = self.draft_weights, placed.draft_cpu_experts
        if self.draft and draft:
            gib = draft.read_gib(float(placed.draft_layers != 0), apart)
            layers_ms = self.draft.layers * self.speeds.layer_ms
            return _sum_ms(self._draft_speeds, gib, gib, 1) + layers_ms
        apart = max(placed.cpu_experts - len(self.weights.trunk.experts), 0)
        gib = self._head.read_gib(float(placed.layers != 0), apart)
        return _sum_ms(self._draft_speeds, gib, gib, 1) + self.speeds.layer_ms


def _count_bytes(model: ModelInfo | Outline) -> ModelBytes:
    return model.sizes if isinstance(model, Outline) else ModelBytes.of(model)


def _list_speeds(speeds: MemorySpeeds, weights: ModelBytes) -> tuple[PassSpeed, ...]:
    """Return the speed of each of the parts that a pass reads."""
    return tuple(speeds.of(memory, use, weights.kinds.get(use, {})) for memory, use in _PLACES)


def _sum_ms(speeds: tuple[PassSpeed, ...], one: ReadGib, wide: ReadGib, rows: int) -> float:
    ms = 0.0  # a loop: thousands of placements are compared
    for speed, size, wide_size in zip(speeds, one, wide, strict=True):
        if size:
            ms += speed.pass_ms(size, rows, wide_size)
    return ms


def _list_parts(weights: ModelBytes, read: list[ReadGib]) -> tuple[Part, ...]:
    return tuple(
        Part(memory, use, kind, tuple(each[at] * share / sum(kinds.values()) for each in read))
        for at, (memory, use) in enumerate(_PLACES)
        for kinds in (weights.kinds.get(use, {}),)
        for kind, share in kinds.items()
        if read[0][at]
    )


# What is said of drafts whose acceptance nobody has published: from none to this one.
_HIGH_ACCEPTANCE = 0.8
_Z80 = 1.28  # of a normal distribution, for intervals that hold four of five
# A forecast that deviates more says nothing: its bounds would be more than a factor of 13 apart. Loads on a
# busy machine contradict others so much. A memory that no load has measured deviates by 0.7.
_MAX_DEVIATION = 1.0


def forecast(
    pair: RateEstimate[AnyModel], placed: Placement, acceptance: Mapping[str, float] | None = None
) -> ForecastView | None:
    """Return what is expected of a pair on this machine, in tokens per second, or None if that is unknown.

    acceptance: by kind of work, as it was published; empty if it is unknown.
    """
    speeds, parts = pair.speeds, pair.list_parts(placed)
    narrow = speeds.expect_deviation(parts, "1")
    wide = speeds.expect_deviation((*parts, *pair.list_draft_parts(placed)), "4")
    if max(narrow, wide) > _MAX_DEVIATION:
        return None
    plain = _around(pair.tokens_per_second(placed._replace(drafts=False)), narrow)
    reading, reading_ms = None, pair.reading_ms(placed)
    if reading_ms and (deviation := speeds.expect_deviation(parts, READING)) <= _MAX_DEVIATION:
        reading = _around(1e3 / reading_ms, deviation)
    drafted = None
    if placed.drafts and (pair.draft or pair.count_layers(True) > pair.target.trunk_layers):
        rates = [pair.tokens_per_second(placed, share) for share in (acceptance or {}).values()]
        if rates:
            low, high = _around(min(rates), wide), _around(max(rates), wide)
            drafted = Interval(low.low, sum(rates) / len(rates), high.high)
        else:
            high = _around(pair.tokens_per_second(placed, _HIGH_ACCEPTANCE), wide)
            drafted = Interval(plain.low, None, high.high)
    return ForecastView(plain, reading, drafted, dict(acceptance or {}), speeds.loads)


def _around(rate: float, deviation: float) -> Interval:
    factor = math.exp(_Z80 * deviation)
    return Interval(rate / factor, rate, rate * factor)
