"""The header of a GGUF file: metadata and tensor table, read without llama.cpp.

Format: github.com/ggml-org/ggml, docs/gguf.md. Nothing in the file is trusted: every count,
length, offset and size is checked against the size of the file before anything is read or reserved,
so a bad file costs a sentence, not memory or time. The same code reads a local file and one on a
server: a `Source` hands out ranges, and the reader asks for growing ones (64 KiB, then twice as
much …), because a header's length is known only at its end: some kilobytes, or 15 MB with a large
vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localspec.errors import BadGguf
from localspec.registry.header.source import Source

FIRST_FETCH = 64 << 10
# The largest header seen is 20 MB (262 000 tokens with scores and merges).
HEADER_LIMIT = 128 << 20
# Far above any model (llama.cpp stops at 512 layers); they bound the work on a hostile file.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_LENGTH = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
LLAMA_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml: it ends the process where weights lie otherwise

_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type → struct code, of every fixed-size GGUF value type
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

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StringArray:
    """`count` strings as they lie in the file: for each an 8-byte length, then the bytes."""

    count: int
    raw: bytes

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        raw, at, unpack = self.raw, 0, _U64.unpack_from
        for _ in range(self.count):
            start = at + 8
            at = start + unpack(raw, at)[0]
            yield raw[start:at]


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
    """One row of the tensor table. `shape` as in the file, ne[0] first; sizes in bytes."""

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
    """What a GGUF file says of itself. `read` is the number of bytes fetched to learn it."""

    name: str
    file_size: int
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    data_offset: int
    read: int

    @property
    def weights(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.size for tensor in self.tensors)


class _Cursor:
    """Reads forward through a growing prefix of the source; the one place that asks for bytes."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.buffer = bytearray()
        self.at = 0

    def bad(self, what: str) -> BadGguf:
        return BadGguf(f"{self.source.name} is not a usable GGUF file: {what}.")

    def need(self, count: int) -> None:
        """Have `count` bytes from the current position in the buffer."""
        end, have = self.at + count, len(self.buffer)
        if end <= have:
            return
        if end > self.source.size:
            raise self.bad(
                f"it is truncated (its header continues past byte {self.source.size}, where the "
                "file ends); download it again"
            )
        if end > HEADER_LIMIT:
            raise self.bad(f"its header is larger than {HEADER_LIMIT >> 20} MiB")
        goal = min(max(end, 2 * have, FIRST_FETCH), self.source.size, HEADER_LIMIT)
        data = self.source.read(have, goal - have)
        if len(data) != goal - have:
            raise self.bad("it became shorter while it was being read")
        self.buffer += data

    def u32(self) -> int:
        self.need(4)
        self.at += 4
        value: int = _U32.unpack_from(self.buffer, self.at - 4)[0]
        return value

    def u64(self) -> int:
        self.need(8)
        self.at += 8
        value: int = _U64.unpack_from(self.buffer, self.at - 8)[0]
        return value

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return bytes(self.buffer[self.at - count : self.at])

    def text(self, what: str, limit: int) -> str:
        """A string used as a name: short and valid UTF-8."""
        length = self.u64()
        if length > limit:
            raise self.bad(f"{what} is {length} bytes long and the limit is {limit}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not valid UTF-8") from None

    def strings(self, count: int) -> StringArray:
        """`count` strings without cutting them up: 150 000 tokens in 20 ms."""
        start, left = self.at, count
        while left:
            self.at, left = _skip_strings(self.buffer, self.at, left)
            if left:  # the next one is not in the buffer yet
                self.need(8)
                self.need(8 + _U64.unpack_from(self.buffer, self.at)[0])
        return StringArray(count, bytes(self.buffer[start : self.at]))


def _skip_strings(buffer: bytearray, at: int, left: int) -> tuple[int, int]:
    """Step over the whole strings in the buffer; the new position and how many are left."""
    unpack, end = _U64.unpack_from, len(buffer)
    while left and at + 8 <= end:
        after = at + 8 + unpack(buffer, at)[0]
        if after > end:
            break
        at, left = after, left - 1
    return at, left


def read_header(source: Source) -> Header:
    """Read and check the header.

    Raises:
        BadGguf: not a GGUF, of another version or byte order, cut, or contradicting itself or the
            file's size; one sentence that names what.
    """
    cursor = _Cursor(source)
    version = _read_start(cursor)
    tensor_count, key_count = cursor.u64(), cursor.u64()
    if key_count > MAX_KEYS:
        raise cursor.bad(f"it claims {key_count} metadata keys and the limit is {MAX_KEYS}")
    if tensor_count > MAX_TENSORS:
        raise cursor.bad(f"it claims {tensor_count} tensors and the limit is {MAX_TENSORS}")
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key", MAX_KEY_LENGTH)
        if key in metadata or not key:
            raise cursor.bad(f"the metadata key '{key[:80]}' is empty or appears twice")
        metadata[key] = _read_value(cursor, key)
    alignment = _alignment(cursor, metadata)
    rows = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_offset = _padded(cursor.at, alignment)
    tensors = _place(cursor, rows, data_offset, alignment)
    return Header(
        source.name, source.size, version, metadata, tensors, data_offset, len(cursor.buffer)
    )


def _read_start(cursor: _Cursor) -> int:
    """Magic and version."""
    if cursor.source.size == 0:
        raise cursor.bad("it is empty; download it again")
    cursor.need(min(64, cursor.source.size))
    if not cursor.buffer.startswith(b"GGUF"):
        raise cursor.bad(_what_it_is(bytes(cursor.buffer[:64])))
    cursor.at = 4
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise cursor.bad("it is big-endian; only little-endian files are supported")
    if version not in (2, 3):
        raise cursor.bad(f"its GGUF version is {version} and only 2 and 3 are supported")
    return version


def _what_it_is(head: bytes) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run: git lfs pull"
    if head.lstrip()[:1] == b"<":
        return "it is a web page; download the file again"
    if head.startswith(b"FUGG"):
        return "it is big-endian; only little-endian files are supported"
    return "it does not start with the letters GGUF"


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.u32()
    if kind in _SCALARS:
        return _scalar(cursor, kind)
    if kind == _STRING:
        # Templates may hold broken UTF-8 and still be of use; names and tokens are kept as bytes.
        return cursor.take(cursor.u64()).decode("utf-8", "replace")
    if kind != _ARRAY:
        raise cursor.bad(f"the value of '{key}' has the unknown type {kind}")
    element, count = cursor.u32(), cursor.u64()
    width = 8 if element == _STRING else struct.calcsize("<" + _SCALARS.get(element, "x"))
    if element != _STRING and element not in _SCALARS:
        raise cursor.bad(f"the list '{key}' has elements of the unknown type {element}")
    if count * width > cursor.source.size - cursor.at:
        raise cursor.bad(f"the list '{key}' claims {count} elements, more than the file can hold")
    if element == _STRING:
        return cursor.strings(count)
    return NumberArray(count, element, cursor.take(count * width))


def _scalar(cursor: _Cursor, kind: int) -> int | float | bool:
    code = struct.Struct("<" + _SCALARS[kind])
    value: int | float | bool = code.unpack(cursor.take(code.size))[0]
    return value


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.bad("'general.alignment' is not a power of two up to 1 MiB")
    return value


def _padded(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def _read_tensor(cursor: _Cursor) -> Tensor:
    """One row, with the offset still relative to the tensor data."""
    name = cursor.text("a tensor's name", MAX_KEY_LENGTH)
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.bad(f"the tensor '{name[:80]}' has {dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(dimensions))
    kind, offset = cursor.u32(), cursor.u64()
    if kind not in TENSOR_TYPES:
        raise cursor.bad(f"the tensor '{name[:80]}' has the unknown type {kind}")
    type_name, block, block_size = TENSOR_TYPES[kind]
    elements = math.prod(shape)
    if elements == 0 or shape[0] % block:
        raise cursor.bad(f"the tensor '{name[:80]}' of type {type_name} has the shape {shape}")
    return Tensor(name, shape, kind, offset, elements // block * block_size)


def _place(cursor: _Cursor, rows: list[Tensor], start: int, alignment: int) -> tuple[Tensor, ...]:
    """Check that the tensors lie one behind the other and end where the file ends.

    llama.cpp asks for the same layout and loads a file with bytes behind it or a cut one without a
    word, so both are named here.
    """
    placed: list[Tensor] = []
    names: set[str] = set()
    expected = end = 0
    for row in rows:
        if row.name in names:
            raise cursor.bad(f"the tensor '{row.name[:80]}' appears twice")
        if row.offset != expected:
            raise cursor.bad(
                f"the tensor '{row.name[:80]}' is at {row.offset} but should be at {expected}"
            )
        if (start + row.offset) % LLAMA_ALIGNMENT:
            raise cursor.bad(
                f"the tensor '{row.name[:80]}' is at byte {start + row.offset}, but llama.cpp "
                f"needs a multiple of {LLAMA_ALIGNMENT}"
            )
        names.add(row.name)
        end = start + row.offset + row.size
        expected = _padded(row.offset + row.size, alignment)
        placed.append(Tensor(row.name, row.shape, row.kind, start + row.offset, row.size))
    size = cursor.source.size
    if placed and end > size:
        raise cursor.bad(
            f"it is truncated (its tensors end at byte {end}, the file at {size}); download "
            "it again"
        )
    if placed and size > _padded(end, alignment):
        raise cursor.bad(f"{size - end} unexpected bytes follow its last tensor")
    return tuple(placed)
