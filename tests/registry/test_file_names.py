"""What the names of model files say of sidecars."""

from __future__ import annotations

import random
from functools import partial

import pytest

from localspec.model_traits import SidecarKind
from localspec.registry.file_names import (
    SidecarFile,
    guess_sidecar_kind,
    is_no_model,
    may_be_no_model,
    sidecar_order,
)

GB = 1_000_000_000
TARGET = "Qwen3.6-27B-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mtp-Qwen3.6-27B-Q8_0.gguf", "mtp"),
        ("MTP/mtp-gemma-4-31B-it-BF16.gguf", "mtp"),
        ("gemma-4-E2B-it-assistant-Q8_0.gguf", "mtp"),
        ("Qwen3.8-27B-MTP-ONLY-Q8_0.gguf", "mtp"),
        ("eagle3-gpt-oss-20b-F16.gguf", "eagle3"),
        ("gpt-oss-120b-eagle3-v2-Q8_0.gguf", "eagle3"),
        ("gemma-4-26B-A4B-it-speculator.eagle3.gguf", "eagle3"),
        ("dflash-Qwen3-8B-Q8_0.gguf", "dflash"),
        ("gemma-4-12B-it-DFlash-Q4_K_M.gguf", "dflash"),
        ("Qwen3.8-27B-dflash2.gguf", "dflash"),
        ("Muse-Glimmer-30B-assistant-Q8_0.gguf", "dflash"),
        ("dflash-kquant.gguf", "dflash"),
        ("dspark-DeepSeek-V4-Flash-0731-00001-of-00002.gguf", "dspark"),
        ("Medical-Assistant-7B-Q4_K_M.gguf", None),
        ("Smtp-Writer-1B.gguf", None),
        (TARGET, None),
    ],
)
def test_sidecars_are_known_by_their_names(name: str, kind: SidecarKind | None) -> None:
    assert guess_sidecar_kind(name) == kind
    assert may_be_no_model(name) == (kind is not None)


@pytest.mark.parametrize(
    ("name", "is_sure"),
    [
        ("mtp-Qwen3.6-27B-Q8_0.gguf", True),
        ("Qwen3.8-27B-MTP-ONLY-Q8_0.gguf", True),
        ("MTP/dflash-Qwen3-8B-Q8_0.gguf", True),
        ("mmproj-Qwen3-8B-F16.gguf", True),
        ("Qwen3.6-27B-MTP-Q4_K_M.gguf", False),  # a whole model with its heads
        ("gemma-4-E2B-it-Q8_0-MTP.gguf", False),  # heads alone
        ("MTP/gemma-4-E2B-it-Q8_0.gguf", False),
        ("gemma-3-4b-cooking-assistant-Q8_0.gguf", False),
        ("Llama-eagle3-tuned-Q8_0.gguf", False),
        ("Llama-lora-merged-Q8_0.gguf", False),
    ],
)
def test_some_names_leave_doubt(name: str, is_sure: bool) -> None:
    assert may_be_no_model(name)
    assert is_no_model(name) == is_sure


def rank(sizes: dict[str, int], target: str, target_size: int) -> list[str]:
    kinds = {name: guess_sidecar_kind(name) or "mtp" for name in sizes}
    order = partial(sidecar_order, target=target, target_size=target_size)
    return sorted(sizes, key=lambda name: order(SidecarFile(name, kinds[name]), sizes[name]))


def test_the_best_sidecar_comes_first() -> None:
    """8 bits before 4, 16 bits after all of them, fewer than 4 last, whatever the order of the listing."""
    sizes = {
        "mtp-Qwen3.6-27B-Q8_0.gguf": GB,
        "mtp-Qwen3.6-27B-Q4_0.gguf": GB // 2,
        "mtp-Qwen3.6-27B-UD-Q4_K_XL.gguf": GB // 2,
        "mtp-Qwen3.6-27B.gguf": GB,
        "mtp-Qwen3.6-27B-BF16.gguf": 2 * GB,
        "mtp-Qwen3.6-27B-IQ2_XXS.gguf": GB // 4,
        "mtp-Qwen3.6-35B-A3B-Q8_0.gguf": GB // 2,  # of another model
        "dflash-Qwen3.6-27B-Q8_0.gguf": GB,
        "eagle3-Qwen3.6-27B-Q8_0.gguf": GB,
    }
    for seed in range(20):
        shuffled = random.Random(seed).sample(sorted(sizes.items()), len(sizes))
        assert rank(dict(shuffled), TARGET, 16 * GB) == list(sizes)


def test_four_bits_are_preferred_where_eight_would_be_a_large_part_of_a_round() -> None:
    sizes = {"mtp-a-Q8_0.gguf": GB, "mtp-a-Q4_0.gguf": GB // 2, "mtp-a-BF16.gguf": 2 * GB}
    ranked = rank(sizes, "a-Q4_K_M.gguf", 3 * GB)
    assert ranked == ["mtp-a-Q4_0.gguf", "mtp-a-Q8_0.gguf", "mtp-a-BF16.gguf"]
