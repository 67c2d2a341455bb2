"""Estimate how fast a pair answers with its weights divided between the GPU and main memory.

A pass reads all weights that it needs once, so its time is bytes divided by the speed of the memory they lie
in, and more rows take a share of that more. The speeds are measured by the loads of earlier pairs. What is
compared with the estimates are placements of one pair on one machine, so errors that all of them share do not
count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from localspec.registry.header.model import ModelInfo

GIB = 1 << 30
# Expected of any draft, in accepted tokens per drafted one. What a pair's drafts are like is only known
# once it is loaded.
EXPECTED_ACCEPTANCE = 0.7
MAX_PLANNED_DEPTH = 8
# Milliseconds for each layer of a pass, whatever its size, and of a round around its passes. Measured on an
# H200, where a draft of 24 layers takes 1.0 ms a token for 0.3 GiB of weights.
LAYER_MS, ROUND_MS = 0.04, 0.5
# A share of a memory's time that only one load has shown counts half, so that a disturbed one is corrected.
_NEW_WEIGHT = 0.5
_MIN_DIVIDED = 0.1  # the share of the bytes in main memory from which a divided target measures it


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """The speed of passes over weights in one memory.

    gib_ms: milliseconds per GiB that a pass of one row reads. row_share: the cost of each further row, as a
    share of that.
    """

    gib_ms: Annotated[float, Meta(gt=0, lt=1e6)]
    row_share: Annotated[float, Meta(ge=0, le=1)]

    def pass_ms(self, gib: float, rows: int) -> float:
        """Return the milliseconds of a pass of `rows` rows that reads `gib` GiB."""
        return gib * self.gib_ms * (1 + (rows - 1) * self.row_share)

    def learn(self, measured: PassSpeed) -> PassSpeed:
        """Return the speed after a load has measured it once more."""
        keep, new = 1 - _NEW_WEIGHT, _NEW_WEIGHT
        return PassSpeed(
            keep * self.gib_ms + new * measured.gib_ms,
            keep * self.row_share + new * measured.row_share,
        )


@dataclass(frozen=True, slots=True)
class MemorySpeeds:
    """The speeds of both memories. Until a load has measured them, those of a usual workstation."""

    gpu: PassSpeed = PassSpeed(gib_ms=1.6, row_share=0.15)
    ram: PassSpeed = PassSpeed(gib_ms=25.0, row_share=0.3)

    def learn(
        self, on_gpu: float, in_ram: float, one_row_ms: float, wide_ms: float, rows: int
    ) -> MemorySpeeds:
        """Return the speeds after a load measured the passes of a target.

        on_gpu, in_ram: GiB that a pass reads in each memory. one_row_ms: a pass of one row. wide_ms: a pass
        of `rows` rows. Where the target is divided, what the GPU is not expected to take is main memory's.
        """
        total = on_gpu + in_ram
        if total <= 0 or one_row_ms <= 0 or rows < 2:
            return self
        if in_ram <= 0:
            return replace(self, gpu=self.gpu.learn(_measure(on_gpu, one_row_ms, wide_ms, rows)))
        ram_ms = one_row_ms - self.gpu.pass_ms(on_gpu, 1)
        ram_wide_ms = wide_ms - self.gpu.pass_ms(on_gpu, rows)
        if ram_ms <= 0 or in_ram < _MIN_DIVIDED * total:
            return self
        return replace(self, ram=self.ram.learn(_measure(in_ram, ram_ms, ram_wide_ms, rows)))


def _measure(gib: float, one_row_ms: float, wide_ms: float, rows: int) -> PassSpeed:
    row_share = max(wide_ms / one_row_ms - 1, 0.0) / (rows - 1)
    return PassSpeed(one_row_ms / gib, min(row_share, 1.0))


@dataclass(frozen=True)
class PassBytes:
    """The GiB of a model's weights that a pass reads.

    Of the input embeddings a pass reads a few rows, unless they are the output matrix as well. Of experts it
    reads those that its rows choose.
    """

    model: ModelInfo

    def count_gib(self, rows: int = 1) -> float:
        """Return the GiB that a pass of `rows` rows reads."""
        dense, experts, used = self._parts
        return (dense + experts * (1 - (1 - used) ** rows)) * self._scale / GIB

    @cached_property
    def head_gib(self) -> float:
        """The GiB that a draft of the model's own MTP heads reads: one layer, and the output matrix."""
        model = self.model
        output = model.vocabulary * model.width * model.weights / max(model.parameters, 1)
        dense, experts, used = self._parts
        layer = (dense + experts * used) * self._scale / max(model.layers, 1)
        return (layer + output) / GIB

    @cached_property
    def _parts(self) -> tuple[int, int, float]:
        """Bytes of other weights and of experts, and the share of the experts that a row uses."""
        experts = dense = 0
        names = {tensor.name for tensor in self.model.header.tensors}
        for tensor in self.model.header.tensors:
            if tensor.name == "token_embd.weight" and "output.weight" in names:
                continue
            if "_exps." in tensor.name:
                experts += tensor.size
            else:
                dense += tensor.size
        metadata, prefix = self.model.header.metadata, self.model.architecture
        count = metadata.get(f"{prefix}.expert_count")
        used = metadata.get(f"{prefix}.expert_used_count")
        if type(count) is int and type(used) is int and 0 < used <= count:
            return dense, experts, used / count
        return dense, experts, 1.0

    @property
    def _scale(self) -> float:
        """The weights of all shards, divided by those of the first, whose header is known."""
        listed = sum(tensor.size for tensor in self.model.header.tensors)
        return self.model.weights / max(listed, 1)


def share_on_gpu(target: ModelInfo, layers: int) -> float:
    """Return the share of a target's weights on a GPU that has `layers` of its layers; −1: all."""
    return 1.0 if layers < 0 else layers / (target.layers + 1)  # The output counts as one.


@dataclass(frozen=True)
class RateEstimate:
    """A pair, and its tokens per second for any placement of its models.

    draft: a draft model or a sidecar. Without one the target's own MTP heads draft, if it has any.
    """

    target: ModelInfo
    draft: ModelInfo | None
    speeds: MemorySpeeds

    def tokens_per_second(self, layers: int, *, drafts: bool, draft_on_gpu: bool = False) -> float:
        """Return the rate at the best depth, or that of plain decoding if `drafts` is False.

        layers: those of the target on the GPU; −1: all. draft_on_gpu: whether the draft is there as well. A
        target's own heads are its last layers, which are the first on the GPU.
        """
        best = 1 / (self._target_ms(layers, 1) + ROUND_MS)
        if not drafts:
            return 1e3 * best
        is_block = self.draft is not None and self.draft.sidecar in ("dflash", "dspark")
        step_ms = self._step_ms(draft_on_gpu if self.draft else layers != 0)
        tokens = 1.0
        for depth in range(1, MAX_PLANNED_DEPTH + 1):
            tokens += EXPECTED_ACCEPTANCE**depth
            steps = 1 if is_block else depth
            round_ms = self._target_ms(layers, depth + 1) + steps * step_ms + ROUND_MS
            best = max(best, tokens / round_ms)
        return 1e3 * best

    @cached_property
    def _target_bytes(self) -> PassBytes:
        return PassBytes(self.target)

    @cached_property
    def _draft_gib(self) -> float:
        return PassBytes(self.draft).count_gib() if self.draft else 0.0

    def _target_ms(self, layers: int, rows: int) -> float:
        gib, share = self._target_bytes.count_gib(rows), share_on_gpu(self.target, layers)
        gpu_ms = self.speeds.gpu.pass_ms(share * gib, rows)
        ram_ms = self.speeds.ram.pass_ms((1 - share) * gib, rows)
        return gpu_ms + ram_ms + self.target.layers * LAYER_MS

    def _step_ms(self, on_gpu: bool) -> float:
        speed = self.speeds.gpu if on_gpu else self.speeds.ram
        if self.draft is None:
            return speed.pass_ms(self._target_bytes.head_gib, 1) + LAYER_MS
        return speed.pass_ms(self._draft_gib, 1) + self.draft.layers * LAYER_MS
