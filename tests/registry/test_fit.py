"""Memory arithmetic: known sizes, and what gives way first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localspec.errors import DoesNotFit
from localspec.registry.header import fit
from localspec.registry.header.fit import Memory
from localspec.registry.header.model import Model, read_local_model
from tests.support.gguf_files import model

GIB = 1 << 30


@pytest.fixture
def target(tmp_path: Path) -> Model:
    """Numbers of Qwen2.5-14B at Q4_K_M."""
    return replace(
        read_local_model(model().write(tmp_path / "t.gguf")),
        layers=48, kv_heads=(8,) * 48, key_length=128, value_length=128, width=5120,
        feed_forward=13824, vocabulary=152064, context=131072, weights=int(8.4 * GIB),
    )  # fmt: skip


@pytest.fixture
def draft(target: Model) -> Model:
    """Numbers of Qwen2.5-0.5B at Q8_0."""
    return replace(
        target, layers=24, kv_heads=(2,) * 24, key_length=64, value_length=64, width=896,
        feed_forward=4864, vocabulary=151936, context=32768, weights=int(0.5 * GIB),
    )  # fmt: skip


def test_the_cache_is_what_llama_cpp_reports(target: Model, draft: Model) -> None:
    """llama.cpp: 192 KiB per token for 48 layers of 8 heads of 128 + 128; 12 KiB for the 0.5B."""
    assert fit.cache_per_token(target) == 192 * 1024
    assert fit.cache_per_token(draft) == 12 * 1024
    assert fit.cache_per_token(target, "q8_0") == 192 * 1024 * 34 / 64
    assert fit.need(target, 8192).cache == 8192 * 192 * 1024
    assert fit.need(target, 8192, parallel=4).cache == 4 * 8192 * 192 * 1024


def test_hybrid_models_cache_every_nth_layer(target: Model) -> None:
    hybrid = replace(target, attention_interval=4)
    assert fit.cache_per_token(hybrid) == 48 * 1024


def test_enough_gpu_takes_everything(target: Model, draft: Model) -> None:
    chosen = fit.fit(target, draft, Memory(ram=16 * GIB, vram=24 * GIB))
    assert (chosen.context, chosen.draft) == (32768, True)
    assert (chosen.gpu_layers, chosen.draft_gpu_layers) == (-1, -1)
    assert chosen.notes == ()


def test_a_smaller_gpu_shares_with_main_memory(target: Model, draft: Model) -> None:
    chosen = fit.fit(target, draft, Memory(ram=16 * GIB, vram=8 * GIB), context=8192)
    assert chosen.draft
    assert chosen.draft_gpu_layers == -1
    assert 10 < chosen.gpu_layers < 48
    assert "layers of the target go to the GPU" in chosen.notes[-1]


def test_first_the_context_gives_way_then_the_draft(target: Model, draft: Model) -> None:
    chosen = fit.fit(target, draft, Memory(ram=12 * GIB))
    assert chosen.draft
    assert 2048 <= chosen.context < 32768
    assert "tokens of context instead of 32768" in chosen.notes[0]
    chosen = fit.fit(target, draft, Memory(ram=int(9.6 * GIB)))
    assert not chosen.draft
    assert "There is not enough memory for the draft model" in " ".join(chosen.notes)
    with pytest.raises(DoesNotFit, match=r"needs \d+ MiB .* 8192 MiB are free"):
        fit.fit(target, draft, Memory(ram=8 * GIB))


def test_no_more_context_than_both_models_know(target: Model, draft: Model) -> None:
    chosen = fit.fit(target, draft, Memory(ram=128 * GIB), context=131072)
    assert chosen.context == 32768
    assert "support at most 32768 tokens" in chosen.beyond
    assert fit.fit(target, None, Memory(ram=128 * GIB), context=131072).context == 131072


def test_what_was_chosen_fits(target: Model, draft: Model) -> None:
    for ram in range(10, 40, 3):
        for vram in (0, 2, 6, 12, 24):
            chosen = fit.fit(target, draft, Memory(ram * GIB, vram * GIB))
            assert chosen.needed <= (ram + vram) * GIB
            assert -1 <= chosen.gpu_layers <= 48
