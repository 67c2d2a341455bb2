"""The effect of a GPU's coarser products on the synthetic models, computed on the CPU.

llama.cpp's CUDA kernels round both sides of a product to TF32 (11 significant bits), f16 (11 bits) or q8_1
(8 bits), depending on its size. A result that survives this rounding but differs on a GPU is a real error.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.synthetic import draft_cycle, target_cycle
from localspec.protocol.frames import PairFiles
from tests.support.heads import cycle_heads, sidecar_logits, tensors
from tests.support.pairs import BOS, N_VOCAB
from tests.support.rescoring import rows_alone

Numbers = npt.NDArray[np.float32]
TF32_BITS = 11
CUDA_NEAR_TIE = 2e-2  # as in tests.support.rescoring on a GPU


def round_to_bits(numbers: Numbers, bits: int) -> Numbers:
    """Return `numbers` with so many significant bits each, as floating-point formats round."""
    mantissa, exponent = np.frexp(numbers)
    result: Numbers = np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent).astype(np.float32)
    return result


def round_in_blocks(numbers: Numbers) -> Numbers:
    """Return `numbers` as q8_1 keeps them: eight bits for each, and a scale for every 32."""
    blocks = numbers.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    scale[scale == 0] = 1  # a row of zeros, which no token follows
    result: Numbers = (np.round(blocks / scale) * scale).astype(np.float32)
    return result.reshape(numbers.shape)


@pytest.mark.parametrize(
    "rounding",
    [
        lambda n: n,
        lambda n: round_to_bits(n, TF32_BITS),
        lambda n: round_to_bits(n, 7),
        round_in_blocks,
    ],
    ids=["f32", "TF32", "7 bits", "q8_1"],
)
@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.9])
def test_drafts_of_a_sidecar_survive_the_rounding_of_every_kernel(
    models: Path, acceptance: float, rounding: Callable[[Numbers], Numbers]
) -> None:
    """A draft that differs on a GPU was therefore computed from wrong numbers."""
    files = cycle_heads(models / "heads", acceptance, "gemma4")
    truth = draft_cycle(target_cycle(N_VOCAB), acceptance, 1)
    logits = sidecar_logits(files, rounding)[:BOS]
    assert logits.argmax(axis=1).tolist() == truth[:BOS].tolist()
    second, best = np.partition(logits, -2, axis=1)[:, -2:].T
    assert (best - second).min() > 0.3  # logits are at most 1.6


def test_a_near_tie_is_as_wide_as_rounding(contextual_files: PairFiles, tmp_path: Path) -> None:
    """Weights are half of the rounded numbers, and two tokens may move in opposite directions."""
    coarse = tmp_path / "coarse.gguf"
    shutil.copy(contextual_files.target, coarse)
    for tensor in gguf.GGUFReader(coarse, "r+").tensors:
        if "norm" not in tensor.name and "token_embd" not in tensor.name:
            tensor.data[:] = round_to_bits(tensor.data, TF32_BITS)
    draw, moved = random.Random(1), 0.0
    for _ in range(6):
        prompt, answer = ([draw.randrange(BOS) for _ in range(count)] for count in (40, 24))
        pair = (rows_alone(str(file), prompt, answer) for file in (contextual_files.target, coarse))
        moved = max(moved, *(float(np.abs(a - b).max()) for a, b in zip(*pair, strict=True)))
    assert 2e-3 < 4 * moved < CUDA_NEAR_TIE


def test_the_closed_form_reads_the_files(models: Path) -> None:
    """It uses the weights that llama.cpp loads, so another file gives other drafts."""
    files, other_files = (cycle_heads(models / "heads", rate, "gemma4") for rate in (0.8, 0.6))
    assert tensors(Path(files.target)).keys() == tensors(Path(other_files.target)).keys()
    tokens, others = (sidecar_logits(each).argmax(axis=1) for each in (files, other_files))
    assert (tokens != others).any()
