"""Tiny GGUFs of models with a state besides or instead of a KV cache, with random weights.

`write_lfm2`: hybrid (short convolutions and attention); llama.cpp can take back a few of its tokens.
`write_mamba`: recurrent; its state cannot be taken back. Both have the vocabulary of the other synthetic
models, and their text depends on all earlier tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import finish, write_vocabulary
from localspec.protocol.frames import PairFiles
from tests.support.pairs import N_VOCAB, disturb

EMBD, FF, HEADS, KERNEL = 64, 128, 4, 3
INNER, STATE, RANK = 2 * EMBD, 16, 4  # llama.cpp supports Mamba only with an expansion factor of 2

Put = Callable[[str, npt.NDArray[np.float32]], None]


def lfm2_pair(folder: Path, noise: float = 0.1) -> PairFiles:
    """Write target and draft of the LFM2 architecture."""
    return _pair(folder, write_lfm2, noise)


def mamba_pair(folder: Path, noise: float = 0.1) -> PairFiles:
    """Write target and draft of the Mamba architecture."""
    return _pair(folder, write_mamba, noise)


def _pair(folder: Path, write: Callable[[Path], Path], noise: float) -> PairFiles:
    folder.mkdir(parents=True, exist_ok=True)
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if not draft.exists():
        shutil.copy(write(target), draft)
        disturb(draft, np.random.default_rng(1), noise)
    return PairFiles(folder.name, str(target), str(draft))


def write_lfm2(path: Path, seed: int = 0) -> Path:
    """Write three layers: convolution, attention, convolution."""
    rng = np.random.default_rng(seed)
    heads_kv = [0, HEADS, 0]  # no KV heads: a convolution
    writer = _writer(path, "lfm2", len(heads_kv))
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(heads_kv)
    writer.add_rope_dimension_count(EMBD // HEADS)
    writer.add_shortconv_l_cache(KERNEL)

    def put(name: str, data: npt.NDArray[np.float32]) -> None:
        writer.add_tensor(name, data)

    put("token_embd.weight", _random(rng, N_VOCAB, EMBD, 1.0))
    put("output.weight", _random(rng, N_VOCAB, EMBD, 0.2))
    put("token_embd_norm.weight", np.ones(EMBD, np.float32))
    for i, heads in enumerate(heads_kv):
        _feed_forward(put, rng, i)
        if heads:
            for part in "attn_q attn_k attn_v attn_output".split():
                put(f"blk.{i}.{part}.weight", _random(rng, EMBD, EMBD))
            for part in "attn_q_norm attn_k_norm".split():
                put(f"blk.{i}.{part}.weight", np.ones(EMBD // HEADS, np.float32))
        else:
            put(f"blk.{i}.shortconv.conv.weight", _random(rng, EMBD, KERNEL))
            put(f"blk.{i}.shortconv.in_proj.weight", _random(rng, 3 * EMBD, EMBD))
            put(f"blk.{i}.shortconv.out_proj.weight", _random(rng, EMBD, EMBD))
    return _finish(writer, path)


def write_mamba(path: Path, seed: int = 0) -> Path:
    """Write two layers."""
    rng = np.random.default_rng(seed)
    writer = _writer(path, "mamba", 2)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(KERNEL + 1)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)

    def put(name: str, data: npt.NDArray[np.float32]) -> None:
        writer.add_tensor(name, data)

    put("token_embd.weight", _random(rng, N_VOCAB, EMBD, 1.0))
    put("output.weight", _random(rng, N_VOCAB, EMBD, 0.2))
    put("output_norm.weight", np.ones(EMBD, np.float32))
    for i in range(2):
        put(f"blk.{i}.attn_norm.weight", np.ones(EMBD, np.float32))
        put(f"blk.{i}.ssm_in.weight", _random(rng, 2 * INNER, EMBD))
        put(f"blk.{i}.ssm_conv1d.weight", _random(rng, INNER, KERNEL + 1))
        put(f"blk.{i}.ssm_conv1d.bias", np.zeros(INNER, np.float32))
        put(f"blk.{i}.ssm_x.weight", _random(rng, RANK + 2 * STATE, INNER))
        put(f"blk.{i}.ssm_dt.weight", _random(rng, INNER, RANK))
        put(f"blk.{i}.ssm_dt.bias", np.zeros(INNER, np.float32))
        # Decay rates are negative, since a growing state would dominate everything.
        put(f"blk.{i}.ssm_a", -np.abs(_random(rng, INNER, STATE)) - np.float32(0.1))
        put(f"blk.{i}.ssm_d", np.ones(INNER, np.float32))
        put(f"blk.{i}.ssm_out.weight", _random(rng, EMBD, INNER))
    return _finish(writer, path)


def _writer(path: Path, architecture: str, layers: int) -> Any:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"synthetic-{architecture}")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    write_vocabulary(writer, N_VOCAB)
    return writer


def _feed_forward(put: Put, rng: np.random.Generator, i: int) -> None:
    put(f"blk.{i}.attn_norm.weight", np.ones(EMBD, np.float32))
    put(f"blk.{i}.ffn_norm.weight", np.ones(EMBD, np.float32))
    put(f"blk.{i}.ffn_gate.weight", _random(rng, FF, EMBD))
    put(f"blk.{i}.ffn_up.weight", _random(rng, FF, EMBD))
    put(f"blk.{i}.ffn_down.weight", _random(rng, EMBD, FF))


def _random(
    rng: np.random.Generator, rows: int, cols: int, std: float = 0.0
) -> npt.NDArray[np.float32]:
    """Return random weights (rows, cols); without `std` they preserve the length of a vector."""
    return rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(std or cols**-0.5)


def _finish(writer: Any, path: Path) -> Path:
    finish(writer)
    return path
