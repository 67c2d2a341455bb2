"""Parse the header of a GGUF file, its metadata and tensor table, without llama.cpp.

The format is described in github.com/ggml-org/ggml, docs/gguf.md. Nothing in the file is trusted: every
count, length, offset and size is checked against the size of the file before anything is read or allocated.
A bad file thus causes an error message and costs neither memory nor time.

The same code reads local and remote files, through a `Source` that returns byte ranges. The length of a
header is known only at its end: some kilobytes, or 15 MB with a large vocabulary. So the reader requests
growing ranges, 64 KiB at first and then twice as much each time.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from localspec.errors import BadGguf


class Source(Protocol):
    """An object with a name and a size that returns byte ranges."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only if the file turns out to be shorter."""
        ...


class FileSource:
    """A local file. Symbolic links are followed, since the Hugging Face cache consists of them."""

    def __init__(self, path: Path) -> None:
        """Check the file. Raises BadGguf if it is not a regular file, or cannot be read."""
        self.path = path
        self.name = path.name
        try:
            info = path.stat()
        except OSError as error:
            raise BadGguf(f"Cannot read {path}: {error.strerror}.") from error
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would block
            raise BadGguf(f"{path} is not a file.")
        self.size = info.st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`. Raises BadGguf if they cannot be read."""
        try:
            with self.path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise BadGguf(f"Cannot read {self.path}: {error.strerror}.") from error


_MAX_KEYS_BEFORE_ARCHITECTURE = 8
FIRST_FETCH_BYTES = 64 << 10
# The largest known header has 20 MB (262 000 tokens with scores and merges).
MAX_HEADER_BYTES = 128 << 20
# These limits bound the work on a hostile file. Real models are far below (llama.cpp supports 512 layers).
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_LENGTH = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32  # bytes
LLAMA_ALIGNMENT = 32  # bytes; TENSOR_ALIGNMENT of ggml, which ends the process on any other

_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF value type of fixed size → struct code
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# ggml tensor type → (name, elements per block, bytes per block); ggml.h and ggml-common.h
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StringArray:
    """`count` strings as they lie in the file, each with an 8-byte length before its bytes."""

    count: int
    raw: bytes

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        raw, offset, unpack = self.raw, 0, _U64.unpack_from
        for _ in range(self.count):
            start = offset + 8
            offset = start + unpack(raw, offset)[0]
            yield raw[start:offset]


@dataclass(frozen=True, slots=True)
class NumberArray:
    """`count` numbers of one GGUF value type, little-endian as in the file."""

    count: int
    kind: int
    raw: bytes

    def __len__(self) -> int:
        return self.count

    def values(self) -> tuple[int | float | bool, ...]:
        return struct.unpack(f"<{self.count}{_SCALARS[self.kind]}", self.raw)


Value = int | float | bool | str | StringArray | NumberArray


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the tensor table. `shape` has ne[0] first, as in the file; sizes are in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of the file
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a GGUF header.

    table_offset, data_offset: where the tensor table and the tensors' data begin. read: the number of bytes
    that were fetched for it.
    """

    name: str
    file_size: int
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    table_offset: int
    data_offset: int
    read: int

    @property
    def weights(self) -> int:
        """The bytes of tensor data."""
        return sum(tensor.size for tensor in self.tensors)


class _Cursor:
    """Read forward through a growing prefix of the source. Only this class reads from the source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.buffer = bytearray()
        self.position = 0

    def error(self, reason: str) -> BadGguf:
        return BadGguf(f"{self.source.name} is not a usable GGUF file: {reason}.")

    def fetch(self, count: int) -> None:
        """Make sure that the buffer has `count` bytes after the current position.

        Raises:
            BadGguf: the file is too short, or the header too long.
        """
        end, length = self.position + count, len(self.buffer)
        if end <= length:
            return
        if end > self.source.size:
            raise self.error(
                f"it is truncated (its header continues past byte {self.source.size}, where the "
                "file ends); download it again"
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(f"its header is larger than {MAX_HEADER_BYTES >> 20} MiB")
        goal = min(max(end, 2 * length, FIRST_FETCH_BYTES), self.source.size, MAX_HEADER_BYTES)
        data = self.source.read(length, goal - length)
        if len(data) != goal - length:
            raise self.error("it became shorter while it was being read")
        self.buffer += data

    def read_bytes(self, count: int) -> bytes:
        self.fetch(count)
        self.position += count
        return bytes(self.buffer[self.position - count : self.position])

    def read_u32(self) -> int:
        return int.from_bytes(self.read_bytes(4), "little")

    def read_u64(self) -> int:
        return int.from_bytes(self.read_bytes(8), "little")

    def read_name(self, description: str, limit: int) -> str:
        """Read a string that is used as a name, which must be short and valid UTF-8."""
        length = self.read_u64()
        if length > limit:
            raise self.error(f"{description} is {length} bytes long and the limit is {limit}")
        try:
            return self.read_bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{description} is not valid UTF-8") from None

    def read_strings(self, count: int) -> StringArray:
        """Read `count` strings without splitting them: 150 000 tokens take 20 ms."""
        start, remaining = self.position, count
        while remaining:
            self.position, remaining = _skip_strings(self.buffer, self.position, remaining)
            if remaining:  # the next string is not in the buffer yet
                self.fetch(8)
                self.fetch(8 + _U64.unpack_from(self.buffer, self.position)[0])
        return StringArray(count, bytes(self.buffer[start : self.position]))


def _skip_strings(buffer: bytearray, position: int, remaining: int) -> tuple[int, int]:
    """Skip the complete strings in the buffer; return the new position and how many remain."""
    unpack, end = _U64.unpack_from, len(buffer)
    while remaining and position + 8 <= end:
        next_position = position + 8 + unpack(buffer, position)[0]
        if next_position > end:
            break
        position, remaining = next_position, remaining - 1
    return position, remaining


def read_header(source: Source) -> Header:
    """Read and check the header of a GGUF file.

    Raises:
        BadGguf: the file is not GGUF, has another version or byte order, is truncated, or contradicts itself.
    """
    cursor = _Cursor(source)
    version = _read_start(cursor)
    tensor_count, key_count = cursor.read_u64(), cursor.read_u64()
    if key_count > MAX_KEYS:
        raise cursor.error(f"it claims {key_count} metadata keys and the limit is {MAX_KEYS}")
    if tensor_count > MAX_TENSORS:
        raise cursor.error(f"it claims {tensor_count} tensors and the limit is {MAX_TENSORS}")
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.read_name("a metadata key", MAX_KEY_LENGTH)
        if key in metadata or not key:
            raise cursor.error(f"the metadata key '{key[:80]}' is empty or appears twice")
        metadata[key] = _read_value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        alignment = 0
    if alignment.bit_count() != 1:
        raise cursor.error("'general.alignment' is not a power of two up to 1 MiB")
    table_offset = cursor.position
    rows = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_offset = _round_up(cursor.position, alignment)
    tensors = _check_layout(cursor, rows, data_offset, alignment)
    return Header(
        source.name,
        source.size,
        version,
        metadata,
        tensors,
        table_offset,
        data_offset,
        len(cursor.buffer),
    )


def read_architecture(source: Source) -> str:
    """Return the architecture that a file states, or "" if that is not among its first keys.

    Converters write it first, so this reads far less than a header with its tokens.

    Raises:
        BadGguf: as `read_header`.
    """
    cursor = _Cursor(source)
    _read_start(cursor)
    _, key_count = cursor.read_u64(), cursor.read_u64()
    for _ in range(min(key_count, _MAX_KEYS_BEFORE_ARCHITECTURE)):
        key = cursor.read_name("a metadata key", MAX_KEY_LENGTH)
        value = _read_value(cursor, key)
        if key == "general.architecture":
            return value if isinstance(value, str) else ""
    return ""


def _read_start(cursor: _Cursor) -> int:
    if cursor.source.size == 0:
        raise cursor.error("it is empty; download it again")
    cursor.fetch(min(64, cursor.source.size))
    if not cursor.buffer.startswith(b"GGUF"):
        raise cursor.error(_describe_wrong_file(bytes(cursor.buffer[:64])))
    cursor.position = 4
    version = cursor.read_u32()
    if version & 0xFFFF == 0:
        raise cursor.error("it is big-endian; only little-endian files are supported")
    if version not in (2, 3):
        raise cursor.error(f"its GGUF version is {version} and only 2 and 3 are supported")
    return version


def _describe_wrong_file(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run: git lfs pull"
    if head.lstrip()[:1] == b"<":
        return "it is a web page; download the file again"
    if head.startswith(b"FUGG"):
        return "it is big-endian; only little-endian files are supported"
    return "it does not start with the letters GGUF"


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.read_u32()
    if kind in _SCALARS:
        code = struct.Struct("<" + _SCALARS[kind])
        value: int | float | bool = code.unpack(cursor.read_bytes(code.size))[0]
        return value
    if kind == _STRING:
        # A chat template with broken UTF-8 may still be useful. Tokens are kept as bytes.
        return cursor.read_bytes(cursor.read_u64()).decode("utf-8", "replace")
    if kind != _ARRAY:
        raise cursor.error(f"the value of '{key}' has the unknown type {kind}")
    element, count = cursor.read_u32(), cursor.read_u64()
    width = 8 if element == _STRING else struct.calcsize("<" + _SCALARS.get(element, "x"))
    if element != _STRING and element not in _SCALARS:
        raise cursor.error(f"the list '{key}' has elements of the unknown type {element}")
    if count * width > cursor.source.size - cursor.position:
        raise cursor.error(f"the list '{key}' claims {count} elements, more than the file can hold")
    if element == _STRING:
        return cursor.read_strings(count)
    return NumberArray(count, element, cursor.read_bytes(count * width))


def _round_up(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def _read_tensor(cursor: _Cursor) -> Tensor:
    """Read one row of the tensor table; its offset is relative to the tensor data."""
    name = cursor.read_name("a tensor's name", MAX_KEY_LENGTH)
    dimensions = cursor.read_u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"the tensor '{name[:80]}' has {dimensions} dimensions")
    shape = tuple(cursor.read_u64() for _ in range(dimensions))
    kind, offset = cursor.read_u32(), cursor.read_u64()
    if kind not in TENSOR_TYPES:
        raise cursor.error(f"the tensor '{name[:80]}' has the unknown type {kind}")
    type_name, block, block_size = TENSOR_TYPES[kind]
    elements = math.prod(shape)
    if elements == 0 or shape[0] % block:
        raise cursor.error(f"the tensor '{name[:80]}' of type {type_name} has the shape {shape}")
    return Tensor(name, shape, kind, offset, elements // block * block_size)


def _check_layout(
    cursor: _Cursor, rows: list[Tensor], start: int, alignment: int
) -> tuple[Tensor, ...]:
    """Check that the tensors follow each other without gaps and end at the end of the file.

    llama.cpp requires the same layout, but loads a truncated file, or one with bytes after the end, without
    an error, so both are rejected here.
    """
    placed: list[Tensor] = []
    names: set[str] = set()
    expected = end = 0
    for row in rows:
        if row.name in names:
            raise cursor.error(f"the tensor '{row.name[:80]}' appears twice")
        if row.offset != expected:
            raise cursor.error(
                f"the tensor '{row.name[:80]}' is at {row.offset} but should be at {expected}"
            )
        if (start + row.offset) % LLAMA_ALIGNMENT:
            raise cursor.error(
                f"the tensor '{row.name[:80]}' is at byte {start + row.offset}, but llama.cpp "
                f"needs a multiple of {LLAMA_ALIGNMENT}"
            )
        names.add(row.name)
        end = start + row.offset + row.size
        expected = _round_up(row.offset + row.size, alignment)
        placed.append(Tensor(row.name, row.shape, row.kind, start + row.offset, row.size))
    size = cursor.source.size
    if placed and end > size:
        raise cursor.error(
            f"it is truncated (its tensors end at byte {end}, the file at {size}); download "
            "it again"
        )
    if placed and size > _round_up(end, alignment):
        raise cursor.error(f"{size - end} unexpected bytes follow its last tensor")
    return tuple(placed)
