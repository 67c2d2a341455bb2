"""Where the models of a pair are placed, by the estimated rate: no other placement would be much faster."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import DoesNotFit
from localspec.model_traits import SidecarKind
from localspec.registry.header import fit
from localspec.registry.header.architectures import KvLengths, KvSize
from localspec.registry.header.fit import FreeMemory, LoadOptions, MemoryFit
from localspec.registry.header.gguf import Tensor
from localspec.registry.header.model import ModelInfo, read_local_model
from localspec.registry.header.rate import Placement, RateEstimate, forecast
from localspec.registry.header.speeds import LoadRecord, MemorySpeeds, Part, PassSpeed
from tests.support import published
from tests.support.gguf_files import model

GIB = 1 << 30
HEADS_OF_128 = (frozenset({128}),) * 2


class Numbers(NamedTuple):
    """The size of a model: GiB of weights, layers, width, and keys (or values) per token and layer."""

    gib: float
    layers: int
    width: int
    keys: int
    experts: tuple[int, int] | None = None
    feed_forward: int = 0


TARGETS = {
    "8B": Numbers(4.6, 36, 4096, 1024),
    "14B": Numbers(8.4, 48, 5120, 1024),
    "32B": Numbers(18.6, 64, 5120, 1024),
    "30B-A3B": Numbers(17.3, 48, 2048, 512, (128, 8)),
    "70B": Numbers(39.6, 80, 8192, 1024),
}
Kind = Literal["draft model", "own heads", "mtp", "eagle3", "dflash", "dspark"]
# GiB and layers of what drafts; own heads are a layer of the target.
DRAFTS: dict[Kind, tuple[float, int]] = {
    "draft model": (0.5, 24),
    "mtp": (0.45, 1),
    "eagle3": (0.4, 1),
    "dflash": (1.1, 5),
    "dspark": (1.3, 5),
}
VOCABULARY = 151936


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return read_local_model(model().write(tmp_path_factory.mktemp("rate") / "t.gguf"))


def describe(small: ModelInfo, numbers: Numbers, *, own_heads: bool = False) -> ModelInfo:
    """Return a model of these sizes, with all its weights in the tensors of one header."""
    layers = numbers.layers + own_heads
    matrix = VOCABULARY * numbers.width * 6 // 10
    layer = (int(numbers.gib * GIB) - 2 * matrix) // numbers.layers
    sizes = {"token_embd.weight": matrix, "output.weight": matrix}
    kind = "ffn_down_exps" if numbers.experts else "ffn_down"
    metadata = dict(small.header.metadata)
    if numbers.experts:
        sizes |= {f"blk.{at}.attn.weight": layer // 10 for at in range(layers)}
        layer -= layer // 10
        metadata |= dict(
            zip(("llama.expert_count", "llama.expert_used_count"), numbers.experts, strict=True)
        )
    sizes |= {f"blk.{at}.{kind}.weight": layer for at in range(layers)}
    if own_heads:
        metadata["llama.nextn_predict_layers"] = 1
    tensors = tuple(Tensor(name, (size,), 24, 0, size) for name, size in sizes.items())
    per_token = numbers.keys * numbers.layers
    ahead = KvLengths(numbers.keys, numbers.keys) if own_heads else KvLengths(0, 0)
    return replace(
        small,
        header=replace(small.header, tensors=tensors, metadata=MappingProxyType(metadata)),
        architecture="llama",
        layers=layers,
        width=numbers.width,
        heads=numbers.width // 128,
        kept=KvSize(per_token, per_token, HEADS_OF_128, 0, 0, ahead),
        feed_forward=3 * numbers.width,
        vocabulary=VOCABULARY,
        context=131072,
        parameters=sum(sizes.values()) * 16 // 10,
        weights=sum(sizes.values()),
        head_weights=sum(size for name, size in sizes.items() if f".{numbers.layers}." in name),
    )


def pair_of(small: ModelInfo, name: str, kind: Kind) -> tuple[ModelInfo, ModelInfo | None]:
    target = describe(small, TARGETS[name], own_heads=kind == "own heads")
    if kind == "own heads":
        return target, None
    gib, layers = DRAFTS[kind]
    draft = describe(small, Numbers(gib, layers, 896, 128))
    sidecar: SidecarKind | None = None if kind == "draft model" else kind
    return target, replace(draft, sidecar=sidecar)


class Ways:
    """Every placement of a pair that memory holds, found by trying each."""

    def __init__(self, target: ModelInfo, draft: ModelInfo | None, load: LoadOptions) -> None:
        self.target, self.draft, self.load, self.free = target, draft, load, FreeMemory(0)
        attended = fit.cache_per_token(target, load.kv_types) * min(load.context, 4096)
        self.estimate = RateEstimate(target, draft, load.speeds, attended)
        weights = self.estimate.weights
        heads = weights.heads.experts if draft is None else ()
        # Of the expert tensors that are loaded without drafts and with them.
        experts = weights.trunk.experts, (*weights.trunk.experts, *heads)
        # The bytes of the first n of them, by n, and the same of the draft's.
        self.experts = [list(itertools.accumulate(each, initial=0.0)) for each in experts]
        self.copied = [max(each, default=0.0) for each in experts]
        draft_weights = self.estimate.draft_weights
        draft_experts = draft_weights.trunk.experts if draft_weights else ()
        self.draft_experts = list(itertools.accumulate(draft_experts, initial=0.0))
        self.bounds = sorted(self.list_bounds(), reverse=True)

    def limit(self, free: FreeMemory, rows: int) -> None:
        """Set the memory that must hold a placement, and the rows of the widest pass."""
        self.free, load = free, replace(self.load, rows=rows)
        needs = [
            fit._list_needs(self.target, self.draft, load, drafts=drafts)
            for drafts in (False, True)
        ]
        self.needs = [(target, target.total, draft.total) for target, draft in needs]

    def list_bounds(self) -> Iterator[tuple[float, Placement]]:
        """Yield each placement of layers and drafts, with what its rate cannot exceed.

        That is the rate with all experts of these layers on the GPU, if that is the faster memory.
        """
        gpu, ram = self.load.speeds.gpu, self.load.speeds.ram
        gpu_is_faster = all(gpu.pass_ms(1, rows) <= ram.pass_ms(1, rows) for rows in (1, 9))
        for placed in self.list_drafts():
            skipped = self.target.layers - self.estimate.count_layers(placed.drafts)
            for layers in (-1, *range(skipped + 2, self.target.layers + 1), 0):
                placed = placed._replace(layers=layers)
                is_bound = gpu_is_faster or not self.estimate.weights.trunk.experts
                yield self.estimate.tokens_per_second(placed) if is_bound else math.inf, placed

    def best_rate(self) -> float:
        """Return the highest rate of all."""
        best = 0.0
        for bound, placed in self.bounds:
            if bound <= best:
                break
            if fitting := self.move_fewest_experts(placed):
                best = max(best, self.estimate.tokens_per_second(fitting))
        return best

    def list_drafts(self) -> list[Placement]:
        """Return every place of what drafts. The cache of own heads lies beside their layer."""
        if not fit.has_drafts(self.target, self.draft):
            return [Placement(draft_layers=0, drafts=False)]
        places = [Placement(), Placement(draft_layers=0, drafts=False)]
        if self.draft:
            places.append(Placement(draft_layers=0))
            places += [Placement(draft_cpu_experts=at) for at in range(1, len(self.draft_experts))]
        return places

    def move_fewest_experts(self, placed: Placement) -> Placement | None:
        """Return it with the fewest experts in main memory that memory allows, or None."""
        count = len(self.experts[placed.drafts]) - 1 if placed.layers else 0
        if not self.holds(placed, count):
            return None
        steps = range(count)
        fewest = bisect.bisect_left(steps, True, key=lambda at: self.holds(placed, at))
        return placed._replace(cpu_experts=fewest)

    def holds(self, placed: Placement, cpu_experts: int) -> bool:
        """Whether memory holds everything with this many expert tensors in main memory."""
        (need, total, draft_total), weights = self.needs[placed.drafts], self.estimate.weights
        experts = self.experts[placed.drafts]
        copied = self.copied[placed.drafts] if cpu_experts else 0.0
        share = self.estimate.share_on_gpu(placed)
        layers = total - need.compute - weights.inputs - weights.output
        vram = 0.0
        if placed.layers:
            vram = share * (layers - experts[cpu_experts]) + weights.output
            vram += need.compute + copied
        if placed.draft_layers and placed.drafts:
            vram += draft_total
            if draft := self.estimate.draft_weights:
                vram -= draft.inputs + self.draft_experts[placed.draft_cpu_experts]
        ram = total + draft_total + copied - vram + fit.RUNTIME_BYTES
        return vram <= self.free.vram and ram <= self.free.ram

    def fit_of_llama_cpp(self) -> float:
        """Return the rate of what llama.cpp's common/fit.cpp chooses for this context.

        The draft is on the GPU as a whole. If all dense weights fit, as many layers as possible are complete,
        and of the next one up, or up and gate; else as many layers as possible are there without experts.
        """
        placed = next(iter(self.list_drafts()))
        count = len(self.experts[placed.drafts]) - 1
        whole = placed._replace(layers=-1)
        if self.holds(whole, count):
            fewest = next(at for at in range(count + 1) if self.holds(whole, at))
            return self.estimate.tokens_per_second(whole._replace(cpu_experts=fewest))
        skipped = self.target.layers - self.estimate.count_layers(placed.drafts)
        for layers in range(self.target.layers, skipped + 1, -1):
            if self.holds(placed._replace(layers=layers), count):
                best = placed._replace(layers=layers, cpu_experts=count)
                return self.estimate.tokens_per_second(best)
        return 0.0


def rate_of(plan: MemoryFit, ways: Ways) -> float:
    return ways.estimate.tokens_per_second(plan.placed)


CASES = list(itertools.product(TARGETS, ("own heads", *DRAFTS)))
SPEEDS = st.builds(
    MemorySpeeds,
    gpu=st.builds(PassSpeed, st.floats(0.3, 8), st.floats(0.01, 0.4)),
    ram=st.builds(PassSpeed, st.floats(9, 60), st.floats(0.05, 0.6)),
)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_plan_is_nearly_the_fastest_on_every_gpu(small: ModelInfo, name: str, kind: Kind) -> None:
    target, draft = pair_of(small, name, kind)
    load = LoadOptions(8192)
    ways = Ways(target, draft, load)
    for vram in range(8, 50, 2):
        free = FreeMemory(96 * GIB, vram * GIB)
        plan = fit.fit_pair(target, draft, free, load)
        assert plan.context == 8192
        assert plan.on_gpu <= free.vram
        ways.limit(free, plan.rows)
        assert rate_of(plan, ways) >= 0.97 * ways.best_rate(), f"{vram} GiB"


@given(
    name=st.sampled_from(list(TARGETS)),
    kind=st.sampled_from(["own heads", *DRAFTS]),
    vram=st.integers(0, 64 * GIB),
    ram=st.integers(4 * GIB, 96 * GIB),
    context=st.integers(2048, 65536),
    speeds=SPEEDS,
)
def test_no_other_placement_is_much_faster_on_any_machine(
    small: ModelInfo, name: str, kind: Kind, vram: int, ram: int, context: int, speeds: MemorySpeeds
) -> None:
    target, draft = pair_of(small, name, kind)
    load = LoadOptions(context, speeds=speeds)
    try:
        plan = fit.fit_pair(target, draft, FreeMemory(ram, vram), load)
    except DoesNotFit:
        return
    if plan.context < context or (not plan.draft and not plan.compared):
        return  # Memory does not hold the drafts at this context, whatever is faster.
    ways = Ways(target, draft, load)
    ways.limit(FreeMemory(ram, vram), plan.rows)
    assert rate_of(plan, ways) >= 0.95 * ways.best_rate()


@pytest.mark.parametrize("name", published.MODELS)
@pytest.mark.parametrize("kind", ["none", "own heads", "draft model", "mixture", "dflash"])
def test_experts_are_placed_at_least_as_well_as_by_llama_cpp(
    small: ModelInfo, name: str, kind: str
) -> None:
    """For cards of 4 to 40 GB, beside every other plan and beside llama-server's `--fit`."""
    numbers = published.MODELS[name]
    target = published.describe(small, numbers, heads=kind == "own heads")
    draft: ModelInfo | None = None
    if kind == "mixture":
        draft = published.describe(small, published.MODELS["Qwen3-30B-A3B"])
    elif kind in ("draft model", "dflash"):
        gib, layers = DRAFTS["dflash" if kind == "dflash" else "draft model"]
        draft = describe(small, Numbers(gib, layers, 896, 128))
        draft = replace(draft, sidecar="dflash" if kind == "dflash" else None)
    load = LoadOptions(8192)
    ways = Ways(target, draft, load)
    for vram in (4, 8, 12, 16, 24, 40):
        free = FreeMemory(512 * GIB, vram * GIB)
        plan = fit.fit_pair(target, draft, free, load)
        ways.limit(free, plan.rows)
        assert plan.on_gpu <= free.vram
        assert plan.needed - plan.on_gpu <= free.ram
        rate = rate_of(plan, ways)
        assert plan.rate == pytest.approx(rate)
        assert rate >= 0.97 * ways.best_rate(), f"{vram} GiB"
        assert rate >= (1 - 1e-9) * ways.fit_of_llama_cpp(), f"{vram} GiB"


@pytest.mark.parametrize("kind", ["none", "draft model", "own heads"])
def test_prompts_are_read_in_wide_passes_where_experts_are_copied(
    small: ModelInfo, kind: str
) -> None:
    """Their buffers take little memory from experts. Heads read the states of every row, and keep theirs."""
    target = published.describe(
        small, published.MODELS["Qwen3.6-35B-A3B"], heads=kind == "own heads"
    )
    draft = describe(small, Numbers(0.5, 24, 896, 128)) if kind == "draft model" else None
    for rows in (fit.PASS_ROWS, fit.WIDE_PASS_ROWS):
        free, load = FreeMemory(64 * GIB, 12 * GIB), LoadOptions(8192, rows=rows)
        plan = fit.fit_pair(target, draft, free, load)
        assert plan.placed.cpu_experts
        is_wide = rows == fit.WIDE_PASS_ROWS or kind != "own heads" or not plan.draft
        assert plan.rows == (fit.WIDE_PASS_ROWS if is_wide else fit.PASS_ROWS)
    whole = fit.fit_pair(target, draft, FreeMemory(64 * GIB, 32 * GIB), LoadOptions(8192))
    assert (whole.placed.cpu_experts, whole.rows) == (0, fit.PASS_ROWS)


def test_drafts_that_push_too_many_layers_off_the_gpu_are_left_out(small: ModelInfo) -> None:
    """As reported of a 27B with heads: 3.1 tokens/s with 42 of 66 layers, 12.1 with 57 and no heads."""
    numbers = TARGETS["32B"]
    target = describe(small, numbers, own_heads=True)
    kept = target.kept._replace(ahead=KvLengths(40 * numbers.keys, 40 * numbers.keys))
    target = replace(target, kept=kept)
    plan = fit.fit_pair(target, None, FreeMemory(64 * GIB, 20 * GIB), LoadOptions(16384))
    assert not plan.draft
    assert plan.gpu_layers > 55
    assert plan.compared in plan.notes
    assert plan.compared.startswith(f"Without drafts, {plan.gpu_layers} layers of the target")


@pytest.mark.parametrize("kind", ["own heads", *DRAFTS])
def test_without_a_gpu_drafts_are_kept_as_long_as_they_fit(small: ModelInfo, kind: Kind) -> None:
    target, draft = pair_of(small, "14B", kind)
    plan = fit.fit_pair(target, draft, FreeMemory(24 * GIB), LoadOptions())
    assert (plan.draft, plan.gpu_layers, plan.compared) == (True, 0, "")


KINDS = ("Q4_K", "Q6_K", "Q8_0")


@given(data=st.data(), count=st.integers(4, 12))
def test_the_speed_of_each_type_is_learned_from_the_passes_of_loads(
    data: st.DataObject, count: int
) -> None:
    """Whatever a GiB of each type and a layer take, models of other mixtures of these types show it."""
    rate = st.floats(-0.7, 0.7)  # a factor of two each
    truth = {key: data.draw(rate) for key in ("ram", "layer", "round", *KINDS)}

    def record(name: str) -> LoadRecord:
        sizes = [data.draw(st.floats(0.05, 2.0)) for _ in KINDS]
        parts = tuple(
            Part("ram", "layers", kind, (gib,) * 4) for kind, gib in zip(KINDS, sizes, strict=True)
        )
        layers = data.draw(st.integers(8, 64))
        ms = {
            quantity: sum(
                part.guess_ms(quantity) * math.exp(truth["ram"] + truth[part.kind])
                for part in parts
            )
            + (layers * 0.04 * math.exp(truth["layer"]) if quantity != "read" else 0)
            + (0.5 * math.exp(truth["round"]) if quantity == "1" else 0)
            for quantity in ("1", "2", "4", "8", "read")
        }
        return LoadRecord(name, parts, layers, 1, ms)

    *seen, new = [record(str(at)) for at in range(count + 1)]
    speeds = MemorySpeeds.learn(seen)
    for known in seen:
        assert_expected(speeds, known, rel=0.2)
    assert_expected(speeds, new, rel=0.6)


def assert_expected(speeds: MemorySpeeds, record: LoadRecord, rel: float) -> None:
    """Assert that the speeds expect what a record has measured."""
    kinds = {part.kind: part.gib[0] for part in record.parts}
    speed = speeds.of("ram", "layers", kinds)
    gib, layers_ms = sum(kinds.values()), record.layers * speeds.layer_ms
    for rows in (1, 2, 4, 8):
        expected = speed.pass_ms(gib, rows) + layers_ms + (speeds.round_ms if rows == 1 else 0)
        assert expected == pytest.approx(record.ms[str(rows)], rel=rel)
    assert speed.reading_ms(gib) == pytest.approx(record.ms["read"], rel=rel)


def test_what_no_load_has_shown_stays_as_it_was(small: ModelInfo) -> None:
    """A type that no load has had is as fast as its memory, and its forecast less certain."""
    part = Part("ram", "layers", "Q4_K", (1.0,) * 4)
    speeds = MemorySpeeds.learn([LoadRecord("a", (part,), 0, 0, {"1": 50.0})])
    assert speeds.of("gpu", "layers", {"Q4_K": 1.0}).gib_ms == MemorySpeeds().gpu.gib_ms
    assert speeds.of("ram", "layers", {"Q8_0": 1.0}).gib_ms > MemorySpeeds().ram.gib_ms
    others = [
        part,
        Part("ram", "layers", "Q8_0", (1.0,) * 4),
        Part("gpu", "layers", "Q4_K", (1.0,) * 4),
    ]
    deviations = [speeds.expect_deviation([each], "1") for each in others]
    assert deviations == sorted(deviations)


@pytest.mark.parametrize("kind", ["own heads", *DRAFTS])
def test_a_forecast_gives_the_range_where_acceptance_is_unknown(
    small: ModelInfo, kind: Kind
) -> None:
    target, draft = pair_of(small, "14B", kind)
    estimate = RateEstimate(target, draft, MemorySpeeds())
    view = forecast(estimate, Placement(0, draft_layers=0))
    assert view
    assert view.loads == 0
    assert view.drafted
    assert view.drafted.likely is None
    assert view.drafted.low == view.plain.low < view.drafted.high
    published = forecast(estimate, Placement(0, draft_layers=0), {"code": 0.8, "prose": 0.4})
    known = published and published.drafted
    assert known
    assert known.likely
    assert known.low < known.likely < known.high
    plain = forecast(estimate, Placement(0, drafts=False))
    assert plain
    assert plain.drafted is None


def test_nothing_is_forecast_from_loads_that_contradict_each_other(small: ModelInfo) -> None:
    """Loads on a busy machine took a thousand times as long as others of the same kind."""
    target, draft = pair_of(small, "14B", "draft model")
    placed, parts = Placement(0, draft_layers=0), (Part("ram", "layers", "Q4_K", (1.0,) * 4),)
    for factor, is_known in ((2.0, True), (1000.0, False)):
        times = [dict.fromkeys(("1", "4", "read"), ms) for ms in (25.0, 25.0 * factor)]
        records = [LoadRecord(str(at), parts, 20, 1, ms) for at, ms in enumerate(times)]
        view = forecast(RateEstimate(target, draft, MemorySpeeds.learn(records)), placed)
        assert (view is not None) == is_known
        assert not view or view.reading


def test_rows_that_read_experts_of_their_own_share_no_cost() -> None:
    speed = PassSpeed(gib_ms=10.0, row_share=0.25)
    assert speed.pass_ms(2, 4) == pytest.approx(10 * 2 * (1 + 3 * 0.25))
    assert speed.pass_ms(2, 4, 8) == pytest.approx(4 * speed.pass_ms(2, 1))
    between = [speed.pass_ms(2, 4, wide) for wide in (2, 4, 6, 8)]
    assert between == sorted(between)


def test_experts_that_a_row_does_not_choose_are_not_read(small: ModelInfo) -> None:
    dense, sparse = (describe(small, TARGETS[name]) for name in ("32B", "30B-A3B"))
    estimates = [RateEstimate(target, None, MemorySpeeds()) for target in (dense, sparse)]
    in_ram = Placement(0, draft_layers=0, drafts=False)
    rates = [estimate.tokens_per_second(in_ram) for estimate in estimates]
    assert rates[1] > 4 * rates[0]
