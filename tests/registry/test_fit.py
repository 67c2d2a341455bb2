"""Memory arithmetic: published cache sizes, what is reduced first, and laws for every model and machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import TINY_TARGET, target_cycle, write_model
from benchmarks.synthetic_heads import write_heads
from localspec.errors import DoesNotFit
from localspec.protocol.settings import KvType
from localspec.registry.header import fit
from localspec.registry.header.architectures import KvLengths, KvSize
from localspec.registry.header.fit import FreeMemory, LoadOptions, MemoryFit
from localspec.registry.header.gguf import Tensor
from localspec.registry.header.model import ModelInfo, read_local_model
from tests.support.gguf_files import model

GIB = 1 << 30
TYPES: list[KvType] = ["f16", "q8_0", "q5_1", "q4_0"]
OF_64, OF_80, OF_128 = (frozenset({length}) for length in (64, 80, 128))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return read_local_model(model().write(tmp_path_factory.mktemp("fit") / "t.gguf"))


@pytest.fixture(scope="module")
def target(small: ModelInfo) -> ModelInfo:
    """Numbers of Qwen2.5-14B at Q4_K_M."""
    layer = Tensor("blk.0.ffn_up.weight", (1,), 0, 0, 1)
    return replace(
        small, header=replace(small.header, tensors=(layer,)),
        layers=48, kept=KvSize(48 * 8 * 128, 48 * 8 * 128, (OF_128, OF_128), 0, 0),
        width=5120, heads=40,
        feed_forward=13824, vocabulary=152064, context=131072, weights=int(8.4 * GIB),
    )  # fmt: skip


@pytest.fixture(scope="module")
def draft(target: ModelInfo) -> ModelInfo:
    """Numbers of Qwen2.5-0.5B at Q8_0."""
    return replace(
        target, layers=24, kept=KvSize(24 * 2 * 64, 24 * 2 * 64, (OF_64, OF_64), 0, 0), width=896, heads=14,
        feed_forward=4864, vocabulary=151936, context=32768, weights=int(0.5 * GIB),
    )  # fmt: skip


def test_the_cache_size_agrees_with_llama_cpp(target: ModelInfo, draft: ModelInfo) -> None:
    """llama.cpp: 192 KiB per token for 48 layers of 8 heads of 128 + 128; 12 KiB for the 0.5B."""
    assert fit.cache_per_token(target) == 192 * 1024
    assert fit.cache_per_token(draft) == 12 * 1024
    assert fit.cache_per_token(target, ("q8_0", "q8_0")) == 192 * 1024 * 34 / 64
    assert fit.cache_per_token(target, ("q4_0", "q4_0")) == 192 * 1024 * 18 / 64
    assert fit.cache_per_token(target, ("q8_0", "q4_0")) == 192 * 1024 * 26 / 64
    assert fit.need_of_target(target, LoadOptions(8192)).cache == 8192 * 192 * 1024
    assert fit.need_of_target(target, LoadOptions(8192, exact=True)).cache == 2 * 8192 * 192 * 1024


# The context that agents need is chosen where memory allows it; a note says what would help elsewhere.
@pytest.mark.parametrize(
    ("gib", "context", "draft_fits", "message"),
    [
        (12, 4096, False, 'agents usually need 65536. With kv_type = "q4_0" it would be 8192.'),
        (16, 8192, True, 'agents usually need 65536. With kv_type = "q4_0" it would be 23552.'),
        (24, 35840, True, 'agents usually need 65536. With kv_type = "q8_0" it would be 66560.'),
        (48, 124928, True, ""),
    ],
)
def test_a_14b_on_machines_of_usual_sizes(
    target: ModelInfo, draft: ModelInfo, gib: int, context: int, draft_fits: bool, message: str
) -> None:
    free = FreeMemory(int(gib * 0.85) * GIB)  # the system has some
    chosen = fit.fit_pair(target, draft, free, LoadOptions(prefixes=GIB))
    assert (chosen.context, chosen.draft) == (context, draft_fits)
    assert message in " ".join(chosen.notes)
    assert bool(message) == bool(chosen.notes)


@pytest.mark.parametrize("gib", [4, 8])
def test_a_pair_that_does_not_fit_is_refused_with_numbers(
    target: ModelInfo, draft: ModelInfo, gib: int
) -> None:
    with pytest.raises(DoesNotFit, match=rf"needs \d+ MiB with 2048 .* {gib * 1024} MiB are free"):
        fit.fit_pair(target, draft, FreeMemory(gib * GIB), LoadOptions())


def test_a_small_model_has_its_whole_context_on_a_small_machine(draft: ModelInfo) -> None:
    chosen = fit.fit_pair(draft, None, FreeMemory(3 * GIB), LoadOptions(prefixes=GIB))
    assert (chosen.context, chosen.notes) == (32768, ())
    assert chosen.prefixes > GIB // 4


def test_enough_gpu_takes_everything(target: ModelInfo, draft: ModelInfo) -> None:
    chosen = fit.fit_pair(target, draft, FreeMemory(ram=16 * GIB, vram=48 * GIB), LoadOptions())
    assert (chosen.context, chosen.draft) == (131072, True)
    assert (chosen.gpu_layers, chosen.placed.draft_layers) == (-1, -1)
    assert chosen.notes == ()


def test_on_a_gpu_layers_take_precedence_over_a_large_context(
    target: ModelInfo, draft: ModelInfo
) -> None:
    chosen = fit.fit_pair(target, draft, FreeMemory(ram=64 * GIB, vram=16 * GIB), LoadOptions())
    assert chosen.gpu_layers == -1
    assert 8192 < chosen.context < 65536
    assert f"{chosen.context} tokens of context" in chosen.notes[0]
    chosen = fit.fit_pair(target, draft, FreeMemory(ram=64 * GIB, vram=8 * GIB), LoadOptions())
    assert chosen.context == 8192
    assert 10 < chosen.gpu_layers < 48
    assert "layers of the target go to the GPU" in chosen.notes[-1]


def test_a_requested_context_is_reduced_to_what_fits(target: ModelInfo, draft: ModelInfo) -> None:
    chosen = fit.fit_pair(target, draft, FreeMemory(ram=12 * GIB), LoadOptions(32768))
    assert chosen.draft
    assert 2048 <= chosen.context < 32768
    assert "tokens of context instead of 32768" in chosen.notes[0]
    chosen = fit.fit_pair(target, draft, FreeMemory(ram=int(9.6 * GIB)), LoadOptions(32768))
    assert not chosen.draft
    assert "There is not enough memory for the draft model" in " ".join(chosen.notes)


def test_the_context_is_limited_to_what_the_target_supports(
    target: ModelInfo, draft: ModelInfo
) -> None:
    chosen = fit.fit_pair(draft, None, FreeMemory(ram=128 * GIB), LoadOptions(131072))
    assert chosen.context == 32768
    assert "supports at most 32768 tokens" in chosen.beyond
    assert (
        fit.fit_pair(target, draft, FreeMemory(ram=128 * GIB), LoadOptions(131072)).context
        == 131072
    )


def test_an_unsupported_cache_type_is_not_proposed(target: ModelInfo) -> None:
    odd = replace(target, kept=KvSize(48 * 8 * 80, 48 * 8 * 80, (OF_80, OF_80), 0, 0))
    chosen = fit.fit_pair(odd, None, FreeMemory(12 * GIB), LoadOptions())
    assert chosen.context < 65536
    assert not chosen.others
    assert "kv_type" not in chosen.notes[0]


MODELS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    weights=st.integers(1 << 20, 80 * GIB),
    layers=st.integers(1, 100),
    width=st.integers(64, 16384),
    heads=st.integers(1, 128),
    feed_forward=st.integers(64, 65536),
    vocabulary=st.integers(300, 300_000),
    context=st.integers(256, 1 << 20),
    rollback=st.sampled_from(["full", "short", "snapshots", "none"]),
    kept=st.builds(
        KvSize,
        st.integers(0, 1 << 19),
        st.integers(0, 1 << 19),
        st.tuples(*[st.sampled_from([OF_64, OF_80, frozenset({128, 512})])] * 2),
        st.integers(0, 64 << 20),
        st.integers(0, 1 << 14),
        st.builds(KvLengths, *[st.just(0) | st.integers(1, 1 << 13)] * 2),
    ),
)
LOADS = st.builds(
    LoadOptions,
    context=st.just(0) | st.integers(256, 1 << 20),
    kv_types=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    parallel=st.integers(1, 16),
    attention=st.sampled_from(["auto", "on", "off"]),
    chosen=st.booleans(),
    exact=st.booleans(),
    prefixes=st.integers(0, 8 * GIB),
)
BYTES = st.integers(0, 200 * GIB)


def plan_or_none(
    target: ModelInfo, draft: ModelInfo | None, free: FreeMemory, load: LoadOptions
) -> MemoryFit | None:
    try:
        return fit.fit_pair(target, draft, free, load)
    except DoesNotFit:
        return None


def rank_plan(plan: MemoryFit | None) -> tuple[bool, bool, int]:
    """Return what can only grow with more memory, the most important part first."""
    return (plan is not None, plan.draft, plan.context) if plan else (False, False, 0)


@given(MODELS, st.none() | MODELS, BYTES, st.just(0) | BYTES, LOADS, st.integers(1, 64 * GIB))
def test_a_plan_never_exceeds_memory_and_grows_with_it(
    small: ModelInfo,
    ours: dict[str, Any],
    theirs: dict[str, Any] | None,
    ram: int,
    vram: int,
    load: LoadOptions,
    extra: int,
) -> None:
    target = replace(small, **ours)
    draft = replace(small, **theirs) if theirs else None
    chosen = plan_or_none(target, draft, FreeMemory(ram, vram), load)
    if chosen:
        assert chosen.needed <= ram + vram
        parts = (chosen.target.total, chosen.drafting.total, chosen.prefixes, fit.RUNTIME_BYTES)
        assert chosen.needed == sum(parts)
        assert 0 <= chosen.prefixes <= load.prefixes
        assert chosen.context <= min(load.context or target.context, target.context)
        assert chosen.context >= min(load.context or target.context, target.context, 2048)
        assert -1 <= chosen.gpu_layers <= target.layers
        if not vram:
            assert chosen.gpu_layers == chosen.placed.draft_layers == 0
        assert all(context > chosen.context for context in chosen.others.values())
    larger = plan_or_none(target, draft, FreeMemory(ram + extra, vram), load)
    assert rank_plan(larger) >= rank_plan(chosen)
    small_cache = replace(load, kv_types=fit.F16)
    if fit.supports_kv_types(target, load.kv_types):
        plain = plan_or_none(target, draft, FreeMemory(ram, vram), small_cache)
        assert rank_plan(chosen) >= rank_plan(plain)


@pytest.mark.parametrize(
    ("architecture", "ahead"), [("glm4moe", 2 * 32), ("qwen35", 2 * 32), ("llama", 0)]
)
def test_heads_that_draft_have_a_cache_beside_their_targets(
    tmp_path: Path, architecture: Any, ahead: int
) -> None:
    """Only heads of supported architectures count, and only where no draft model is loaded."""
    if architecture == "llama":
        model = read_local_model(write_model(tmp_path / "m.gguf", TINY_TARGET, target_cycle(512)))
    else:
        model = read_local_model(write_heads(tmp_path / "m.gguf", architecture=architecture))
    load = LoadOptions(context=4096)
    assert model.kept.ahead == KvLengths(ahead, ahead)
    assert model.drafting_heads == (ahead > 0)
    need = fit.need_of_heads(model, load)
    assert (need.cache > 2 * ahead * 2 * 4096) == (ahead > 0)
    assert (
        fit.total_need(model, None, load)
        == fit.need_of_target(model, load).total + need.total + fit.RUNTIME_BYTES
    )
