"""Projectors of a few kilobytes, in llama.cpp's format, and pictures to show them.

The weights are random, at full strength: the rows of two different pictures differ widely.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

WIDTH, LAYERS, HEADS, PATCH = 32, 2, 2, 8
SIZE = 32  # pixels on each side, to which every picture is scaled
PICTURE_TOKENS = (SIZE // PATCH) ** 2


def write_projector(
    path: Path,
    n_embd: int,
    *,
    kind: str = "mlp",
    size: int = SIZE,
    seed: int = 7,
    scale: float = 1.0,
) -> Path:
    """Write a projector for targets of `n_embd`, which turns a picture into (size / 8)² rows.

    kind: the name of the projector's type. scale: of the rows.
    """
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    for key, value in (
        ("image_size", size),
        ("patch_size", PATCH),
        ("embedding_length", WIDTH),
        ("feed_forward_length", 2 * WIDTH),
        ("block_count", LAYERS),
        ("projection_dim", n_embd),
        ("attention.head_count", HEADS),
    ):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def put(name: str, *shape: int, factor: float = 1.0) -> None:
        data = rng.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-1])
        writer.add_tensor(name, (data * factor).astype(np.float32))

    def one(name: str, *shape: int, value: float = 0.0) -> None:
        writer.add_tensor(name, np.full(shape, value, np.float32))

    put("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH, factor=2.0)
    put("v.position_embd.weight", (size // PATCH) ** 2, WIDTH)
    for layer in range(LAYERS):
        block = f"v.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            put(f"{block}.{part}.weight", WIDTH, WIDTH)
            one(f"{block}.{part}.bias", WIDTH)
        put(f"{block}.ffn_up.weight", 2 * WIDTH, WIDTH)
        put(f"{block}.ffn_down.weight", WIDTH, 2 * WIDTH)
        for part in ("ln1", "ln2"):
            one(f"{block}.{part}.weight", WIDTH, value=1.0)
            one(f"{block}.{part}.bias", WIDTH)
    if kind == "gemma3":  # its rows attend to each other
        writer.add_uint32("clip.vision.projector.scale_factor", 1)
        one("v.post_ln.weight", WIDTH, value=1.0)
        one("v.post_ln.bias", WIDTH)
        put("mm.input_projection.weight", WIDTH, n_embd, factor=scale)
        one("mm.soft_emb_norm.weight", WIDTH, value=1.0)
    else:
        merged = WIDTH
        if kind == "qwen2vl_merger":  # four patches become one row, in lines and columns
            merged = 4 * WIDTH
            put("v.patch_embd.weight.1", WIDTH, 3, PATCH, PATCH, factor=2.0)
        for index, (rows, columns) in ((0, (n_embd, merged)), (2, (n_embd, n_embd))):
            put(f"mm.{index}.weight", rows, columns, factor=scale if index else 1.0)
            one(f"mm.{index}.bias", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def png(seed: int, width: int = 40, height: int = 30) -> bytes:
    """Return a PNG file with random coloured squares."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    pixels = squares.repeat(5, 0).repeat(5, 1)[:height, :width]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return png_of(width, height, zlib.compress(rows))


def png_of(width: int, height: int, data: bytes) -> bytes:
    """Return a PNG file of RGB pixels that states these sizes and has this compressed data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks
