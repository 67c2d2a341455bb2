"""Random small models of llama.cpp's architectures, a few hundred kilobytes each.

Which tensors an architecture has is known to llama.cpp alone. It gets the metadata, as in its
tests/test-llama-archs.cpp, and creates a model from it; the names and shapes that it requests are written
with weights at full strength, so that one wrong, missing or stale cell changes the answer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt
from llama_cpp._ggml import libggml

from benchmarks.synthetic import finish, write_vocabulary

N_VOCAB, N_CTX, WINDOW = 512, 2048, 32
_PER_LAYER_HEADS = {
    "plamo2", "jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid", "lfm2", "lfm2moe",
    "kimi-linear", "bailingmoe3",
}  # fmt: skip
_MLA = {"deepseek2", "deepseek32", "glm-dsa", "bailingmoe3", "kimi-linear"}
_PATTERN = {"mimo2", "step35", "cohere2moe"}  # these need the kinds of layers as a list
_LAYERS = {
    "deepseek4": 4,
    "llama4": 4,
    "gemma3n": 22,
    "nemotron_h": 3,
    "nemotron_h_moe": 3,
    "gemma4": 5,
}
# What single architectures read besides.
_INDEXER = {  # a large `top_k` selects all tokens, so that rounding selects none of two
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 131_072,
}
_MORE: dict[str, dict[str, object]] = {
    "deepseek32": {**_INDEXER},
    "glm-dsa": {**_INDEXER},
    "deepseek4": {
        **_INDEXER,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.output_group_count": 4,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 0, 4, 128, 0],
        "attention.compress_rope_freq_base": 160_000.0,
        "rope.dimension_count": 32,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
    },
    "bailingmoe3": {
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "rope.dimension_sections": [8, 12, 12, 0],
    },
}


@dataclass(frozen=True)
class Shape:
    """The sizes of one architecture's model."""

    embd: int = 128
    heads: int = 2
    ff: int = 192
    layers: int = 2


def shape(architecture: str) -> Shape:
    """Return the sizes that llama.cpp's own fixture needs for an architecture."""
    layers = _LAYERS.get(architecture, 2)
    if architecture in _MLA:
        return Shape(heads=1, layers=layers)
    if architecture == "gemma3n":
        return Shape(64, 1, 96, layers)
    if architecture == "deepseek4":
        return Shape(256, 4, layers=layers)
    # CUDA supports attention with a soft cap, as in gemma2, for heads of 128 and more only.
    if architecture in {"qwen3next", "qwen35", "qwen35moe", "gpt-oss", "gemma2"}:
        return Shape(256, layers=layers)
    return Shape(layers=layers)


def write(
    architecture: str, folder: Path, *, experts: bool = False, heads: int = 0, seed: int = 0
) -> Path:
    """Write one GGUF file. experts: as a mixture of experts; heads: this many MTP blocks after its own.

    Raises ValueError if llama.cpp refuses it.
    """
    path = folder / f"{architecture}{'-moe' if experts else ''}{'-mtp' * heads}-{seed}.gguf"
    if not path.exists():
        tensors = _draw(architecture, folder, experts, heads, seed)
        _write(path, architecture, experts, heads, tensors)
    return path


def write_apart(
    architecture: str, folder: Path, *, experts: bool = False, heads: int = 1, seed: int = 0
) -> tuple[Path, Path]:
    """Write the model of `write` as two files, its trunk and its heads, and return them."""
    tensors = _draw(architecture, folder, experts, heads, seed)
    first_head = shape(architecture).layers

    def is_head(name: str) -> bool:
        return int(name.split(".")[1]) >= first_head

    blocks = {name for name in tensors if name.startswith("blk.")}
    trunk = {
        name: data for name, data in tensors.items() if name not in blocks or not is_head(name)
    }
    rest = {name: data for name, data in tensors.items() if name not in blocks or is_head(name)}
    files = folder / f"{architecture}-{seed}-trunk.gguf", folder / f"mtp-{architecture}-{seed}.gguf"
    _write(files[0], architecture, experts, 0, trunk)
    _write(files[1], architecture, experts, heads, rest)
    return files


def _draw(
    architecture: str, folder: Path, experts: bool, heads: int, seed: int
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors of a model. Raises ValueError if llama.cpp refuses it."""
    header = folder / f"{architecture}-{seed}.header"
    _write(header, architecture, experts, heads, {})
    rng = np.random.default_rng(seed)
    shapes = _requested_tensors(header)
    if architecture == "mimo2":  # its heads are converted with one matrix for all three
        _join_queries_keys_values(shapes, shape(architecture).layers)
    if architecture == "deepseek4":  # llama.cpp asks for its heads only if the file has them
        for head in range(shape(architecture).layers, shape(architecture).layers + heads):
            _add_head(shapes, head, shape(architecture).embd)
    tensors = {name: _weights(rng, name, size) for name, size in shapes.items()}
    _sharpen(architecture, tensors)
    header.unlink()
    return tensors


def _join_queries_keys_values(shapes: dict[str, tuple[int, ...]], first: int) -> None:
    """Replace the three matrices of attention by one, in the blocks from `first` on."""
    for name in [name for name in shapes if name.endswith("attn_q.weight")]:
        if int(name.split(".")[1]) >= first:
            parts = [shapes[name.replace("attn_q", f"attn_{part}")] for part in "qkv"]
            for other in ("weight", "bias", "scale", "input_scale"):
                for part in "qkv":
                    shapes.pop(name.replace("attn_q.weight", f"attn_{part}.{other}"), None)
            rows = sum(part[1] for part in parts)
            shapes[name.replace("attn_q", "attn_qkv")] = (parts[0][0], rows)


def _add_head(shapes: dict[str, tuple[int, ...]], head: int, width: int) -> None:
    """Add the tensors of an MTP block like the first block."""
    for name in [name for name in shapes if name.startswith("blk.0.")]:
        shapes[name.replace("blk.0.", f"blk.{head}.")] = shapes[name]
    shapes[f"blk.{head}.nextn.eh_proj.weight"] = 2 * width, width
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        shapes[f"blk.{head}.nextn.{norm}.weight"] = (width,)


def _weights(
    rng: np.random.Generator, name: str, dimensions: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """Return random weights in numpy's order of dimensions: the length of a row is last."""
    values = rng.standard_normal(dimensions[::-1], dtype=np.float32)
    if "ssm_a" in name:  # decay rates: a growing state would dominate everything
        return (-np.abs(values) - np.float32(0.1)) * np.float32(0.1)
    if len(dimensions) == 1 or dimensions[-1] == 1 or "norm" in name:
        return values * np.float32(0.1) + np.float32("norm" in name)
    if name.startswith("token_embd"):  # attention must matter more than the token itself
        return values * np.float32(0.3)
    if name.startswith("output"):
        return values * np.float32(2 * dimensions[0] ** -0.5)
    return values * np.float32(dimensions[0] ** -0.5)


def _sharpen(architecture: str, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Make attention select few tokens and weigh them heavily, since random attention averages."""
    # These two do not divide by the square root of the head size.
    sharp = np.float32(0.6 if architecture in {"gemma3n", "gemma4"} else 2.2)
    normed = any("attn_q_norm" in name for name in tensors)
    queries = "attn_q_norm attn_k_norm" if normed else "attn_q. attn_k. attn_qkv."
    tied = "output.weight" not in tensors
    for name, data in tensors.items():
        if any(part in name for part in queries.split()):
            data *= sharp
        elif "attn_out" in name:
            data *= np.float32(6 if tied else 3)
    if tied:  # no token may be certain to follow itself
        tensors["token_embd.weight"] *= np.float32(0.1)
        tensors["output_norm.weight"] *= np.float32(6)


def _write(
    path: Path,
    architecture: str,
    experts: bool,
    heads: int,
    tensors: dict[str, npt.NDArray[np.float32]],
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    write_vocabulary(writer, N_VOCAB)
    sizes = shape(architecture)
    values = _metadata(architecture, sizes)
    if experts:
        values |= _experts(sizes)
    values |= _MORE.get(architecture, {})
    if heads:
        values |= {"block_count": sizes.layers + heads, "nextn_predict_layers": heads}
        for key, each in (("head_count", sizes.heads), ("head_count_kv", sizes.heads)):
            if isinstance(value := values[f"attention.{key}"], list):
                values[f"attention.{key}"] = [*value, *[each] * heads]
        if isinstance(feed := values["feed_forward_length"], list):
            values["feed_forward_length"] = [*feed, *[sizes.ff] * heads]
    for key, value in values.items():
        _put(writer, f"{architecture}.{key}", value)
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        writer.add_float32(f"xielu.{name}", 1e-7 if name == "eps" else 1.0)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    finish(writer)


def _put(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _metadata(architecture: str, sizes: Shape) -> dict[str, object]:
    """Return the metadata; it is more than any one architecture reads."""
    head = sizes.embd // sizes.heads
    heads_per_layer = [0 if layer == 1 else sizes.heads for layer in range(sizes.layers)]
    heads: object = heads_per_layer if architecture in _PER_LAYER_HEADS else sizes.heads
    feed: object = sizes.ff
    if architecture.startswith("nemotron_h"):
        feed = [0 if layer <= 1 else sizes.ff for layer in range(sizes.layers)]
    pattern: object = 5 if architecture == "gemma4" else 2
    if architecture in _PATTERN:
        pattern = [layer % 2 for layer in range(sizes.layers)]
    if architecture == "gemma4":
        pattern = [layer % 5 != 4 for layer in range(sizes.layers)]
    delta = architecture in {"qwen3next", "qwen35", "qwen35moe"}
    values: dict[str, object] = {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX if architecture != "llama4" else 3 * 8192,
        "embedding_length": sizes.embd,
        "features_length": sizes.embd,
        "block_count": sizes.layers,
        "leading_dense_block_count": 1,
        "feed_forward_length": feed,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "time_mix_extra_dim": 32,
        "time_decay_extra_dim": 32,
        "full_attention_interval": 2,
        "token_shift_count": 2,
        "rescale_every_n_layers": 0,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 100.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 64,
        "attention.decay_lora_rank": 32,
        "attention.iclr_lora_rank": 32,
        "attention.value_residual_mix_lora_rank": 32,
        "attention.gate_lora_rank": 32,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": pattern,
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": head,
        "attention.value_length_swa": head,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_sections": [head // 4] * 4,
        "ssm.inner_size": 256 if delta else 2 * sizes.embd,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.time_step_rank": sizes.heads,
        "ssm.group_count": 0 if architecture == "plamo2" else 2,
        "kda.head_dim": 128,
        "wkv.head_size": head,
        "shortconv.l_cache": 3,
    }
    if architecture == "gemma4":
        values["embedding_length_per_layer_input"] = sizes.embd // 2
    if architecture in _MLA:
        values |= {
            "attention.key_length": 128,
            "attention.value_length": 64,
            "rope.dimension_count": 64,
            "attention.key_length_mla": 96,
            "attention.value_length_mla": 64,
        }
    return values


def _experts(sizes: Shape) -> dict[str, object]:
    """Return metadata of experts that every token uses.

    Between two nearly equal experts, rounding would decide which one is used.
    """
    return {
        "expert_feed_forward_length": sizes.ff,
        "expert_shared_feed_forward_length": sizes.ff // 2,
        "expert_latent_length": sizes.ff,
        "interleave_moe_layer_step": 2,
        "expert_count": 2,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_group_scale": 1.0,
        "experts_per_group": 1,
    }


# The tensors that llama.cpp requests.

_SetTensor = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _TensorHead(ctypes.Structure):
    """The beginning of ggml_tensor (ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
    )


@contextmanager
def _open_header(path: Path) -> Iterator[int]:
    libggml.gguf_init_from_file.restype = ctypes.c_void_p
    libggml.gguf_init_from_file.argtypes = (ctypes.c_char_p, _GgufParams)
    libggml.gguf_free.argtypes = (ctypes.c_void_p,)
    handle = libggml.gguf_init_from_file(str(path).encode(), _GgufParams(True, None))
    assert handle, path
    try:
        yield handle
    finally:
        libggml.gguf_free(handle)


def _requested_tensors(header: Path) -> dict[str, tuple[int, ...]]:
    """Return names and dimensions (llama.cpp's order, without trailing ones) of a header's tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    libggml.ggml_get_name.restype = ctypes.c_char_p
    libggml.ggml_get_name.argtypes = (ctypes.c_void_p,)
    libggml.ggml_n_dims.argtypes = (ctypes.c_void_p,)

    def note(tensor: int, _user: int) -> None:
        name = libggml.ggml_get_name(tensor).decode()
        head = _TensorHead.from_address(tensor)
        shapes[name] = tuple(head.ne[: libggml.ggml_n_dims(tensor)])

    library = C._lib
    make = library.llama_model_init_from_user
    make.restype = ctypes.c_void_p
    make.argtypes = (ctypes.c_void_p, _SetTensor, ctypes.c_void_p, C.llama_model_params)
    params = C.llama_model_default_params()
    params.load_mtp = True
    with _open_header(header) as metadata:
        model = make(metadata, _SetTensor(note), None, params)
    if not model:
        raise ValueError(f"llama.cpp refuses {header.name}")
    C.llama_model_free(model)
    return shapes
