"""GGUF files of a few kilobytes, written in a millisecond, and ways to break them.

A file is first a description (`Gguf`), so that a test changes one value and writes it; `data` returns its
bytes. Weights are noise: nothing here is meant to be decoded.
"""

from __future__ import annotations

import copy
import hashlib
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localspec.registry.header.gguf import read_header

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_F32, _TYPE_F16 = 0, 1
_SIZES = {_TYPE_F32: 4, _TYPE_F16: 2, 24: 1, 26: 4}  # I8 and I32, too


@dataclass
class Gguf:
    """Metadata as key → (value type, value), lists as key → (ARRAY, (element type, values))."""

    metadata: dict[str, tuple[int, object]]
    tensors: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    seed: int = 0
    version: int = 3

    def put(self, key: str, kind: int, value: object) -> Gguf:
        """Return a copy with one value changed."""
        changed = copy.deepcopy(self)
        changed.metadata[key] = (kind, value)
        return changed

    def drop(self, key: str) -> Gguf:
        """Return a copy without a key, or without a tensor of that name."""
        changed = copy.deepcopy(self)
        changed.metadata.pop(key, None)
        changed.tensors = [row for row in changed.tensors if row[0] != key]
        return changed

    def array(self, key: str) -> list[Any]:
        """Return the values of an array."""
        entry: Any = self.metadata[key][1]
        return list(entry[1])

    def token(self, index: int, text: str) -> Gguf:
        """Return a copy in which one token has another text."""
        tokens = self.array("tokenizer.ggml.tokens")
        tokens[index] = text
        return self.put("tokenizer.ggml.tokens", ARRAY, (STRING, tokens))

    def type(self, index: int, kind: int) -> Gguf:
        """Return a copy in which one token has another type."""
        types = self.array("tokenizer.ggml.token_type")
        types[index] = kind
        return self.put("tokenizer.ggml.token_type", ARRAY, (I32, types))

    def header(self) -> bytes:
        """Return everything before the weights, padded."""
        out = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))]
        for key, (kind, value) in self.metadata.items():
            out += [_string(key), struct.pack("<I", kind), _value(kind, value)]
        offset = 0
        for name, shape, kind in self.tensors:
            out += [_string(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
            out.append(struct.pack("<IQ", kind, offset))
            offset = _padded(offset + _size(shape, kind))
        head = b"".join(out)
        return head + b"\0" * (_padded(len(head)) - len(head))

    def data(self) -> bytes:
        """Return the complete file."""
        noise = random.Random(self.seed)
        body = bytearray()
        for _, shape, kind in self.tensors:
            body += b"\0" * (_padded(len(body)) - len(body))
            size = _size(shape, kind)
            if kind == _TYPE_F32:
                body += b"".join(struct.pack("<f", noise.uniform(0.5, 1)) for _ in range(size // 4))
            else:
                body += noise.randbytes(size)
        return self.header() + bytes(body)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data())
        return path


def model(
    *,
    tokens: int = 300,
    layers: int = 2,
    width: int = 8,
    architecture: str = "llama",
    filler: int = 0,
    seed: int = 0,
) -> Gguf:
    """Return a small complete model; `filler` adds that many bytes of noise as one more tensor."""
    metadata = _tokenizer(tokens) | {
        "general.architecture": (STRING, architecture),
        "general.name": (STRING, f"test {seed}"),
        f"{architecture}.block_count": (U32, layers),
        f"{architecture}.context_length": (U32, 4096),
        f"{architecture}.embedding_length": (U32, width),
        f"{architecture}.feed_forward_length": (U32, 2 * width),
        f"{architecture}.attention.head_count": (U32, 2),
        f"{architecture}.attention.head_count_kv": (U32, 1),
        f"{architecture}.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    }
    tensors: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (width, tokens), _TYPE_F16)
    ]
    for layer in range(layers):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,), "attn_q": (width, width), "attn_k": (width, width // 2),
            "attn_v": (width, width // 2), "attn_output": (width, width), "ffn_norm": (width,),
            "ffn_gate": (width, 2 * width), "ffn_up": (width, 2 * width),
            "ffn_down": (2 * width, width),
        }  # fmt: skip
        for part, shape in shapes.items():
            kind = _TYPE_F32 if len(shape) == 1 else _TYPE_F16
            tensors.append((f"blk.{layer}.{part}.weight", shape, kind))
    if filler:
        tensors.append(("filler.weight", (filler // 128, 64), _TYPE_F16))
    tensors.append(("output_norm.weight", (width,), _TYPE_F32))
    return Gguf(metadata, tensors, seed)


def shards(complete: Gguf, count: int, stem: str) -> dict[str, bytes]:
    """Return the same model in `count` files, named as llama.cpp names them."""
    files = {}
    for index in range(count):
        part = copy.deepcopy(complete)
        part.tensors = complete.tensors[index::count]
        if index:
            part.metadata = {}
        part.metadata |= {
            "split.no": (2, index),
            "split.count": (2, count),
            "split.tensors.count": (I32, len(complete.tensors)),
        }
        files[f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"] = part.data()
    return files


def mutants(data: bytes, header: int, count: int, seed: int = 0) -> list[bytes]:
    """Return `count` files with a damaged header: bits, bytes, numbers, cuts, insertions."""
    rng = random.Random(seed)
    huge = [0, 1, 0x7F, 0xFF, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]
    results = []
    for _ in range(count):
        copy_ = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            index = rng.randrange(header)
            kind = rng.randrange(5)
            if kind == 0:
                copy_[index] ^= 1 << rng.randrange(8)
            elif kind == 1:
                copy_[index] = rng.randrange(256)
            elif kind == 2:
                copy_[index : index + 8] = struct.pack("<Q", rng.choice(huge))
            elif kind == 3:
                copy_[index : index + 4] = struct.pack("<I", rng.choice(huge) & 0xFFFFFFFF)
            else:
                del copy_[index : index + rng.randint(1, 16)]
        if rng.random() < 0.1:
            del copy_[rng.randrange(len(copy_)) :]
        results.append(bytes(copy_))
    return results


def with_text(data: bytes, key: str, text: str) -> bytes:
    """Return the bytes of a file, of any size, with another text under `key`."""
    at = data.index(_string(key) + struct.pack("<I", STRING)) + 12 + len(key.encode())
    (length,) = struct.unpack_from("<Q", data, at)
    return _spliced(data, at, at + 8 + length, _string(text))


def with_key(data: bytes, key: str, kind: int, value: object) -> bytes:
    """Return the bytes of a file, of any size, with one more key."""
    (count,) = struct.unpack_from("<Q", data, 16)
    added = _string(key) + struct.pack("<I", kind) + _value(kind, value)
    return _spliced(data, 16, 24, struct.pack("<Q", count + 1) + added)


def _spliced(data: bytes, start: int, stop: int, new: bytes) -> bytes:
    """Return `data` with other bytes in its header; the weights move to where they must be."""
    header = read_header(_Bytes(data))
    if not header.tensors:
        return data[:start] + new + data[stop:]
    # Only the last row shows where the list of tensors ends and the padding begins.
    last_tensor = header.tensors[-1]
    row = data.rindex(_string(last_tensor.name), 0, header.data_offset)
    end = row + len(_string(last_tensor.name)) + 4 + 8 * len(last_tensor.shape) + 12
    head = data[:start] + new + data[stop:end]
    return head + b"\0" * (_padded(len(head)) - len(head)) + data[header.data_offset :]


def relabelled(source: Path, pre_tokenizer: str, target: Path) -> Path:
    """Write a copy of a model that declares another pre-tokenizer.

    Its tokens stay. The answers differ, and test everything but their sense just as well.
    """
    target.write_bytes(with_text(source.read_bytes(), "tokenizer.ggml.pre", pre_tokenizer))
    return target


class _Bytes:
    """A file in memory, for the reader of headers."""

    name = "a file in memory"

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tokenizer(count: int) -> dict[str, tuple[int, object]]:
    texts = ["<unk>", "<s>", "</s>"] + [f"t{index}" for index in range(3, count)]
    types = [2, 3, 3] + [1] * (count - 3)
    merges = [f"a{index} b{index}" for index in range(count // 2)]
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "qwen2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, texts)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(str(value))
    if kind != ARRAY:
        return struct.pack("<" + _CODES[kind], value)
    element, values = value
    head = struct.pack("<IQ", element, len(values))
    if element == STRING:
        return head + b"".join(_string(text) for text in values)
    return head + struct.pack(f"<{len(values)}{_CODES[element]}", *values)


def _padded(offset: int) -> int:
    return (offset + 31) // 32 * 32


def _size(shape: tuple[int, ...], kind: int) -> int:
    size = _SIZES[kind]
    for length in shape:
        size *= length
    return size
