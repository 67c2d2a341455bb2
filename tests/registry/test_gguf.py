"""The header reader against valid, broken and hostile files."""

from __future__ import annotations

import resource
import struct
import time
from pathlib import Path

import gguf
import pytest

from localspec.errors import BadGguf
from localspec.registry.header.gguf import (
    TENSOR_TYPES,
    FileSource,
    NumberArray,
    StringArray,
    read_header,
)
from localspec.registry.header.model import read_local_model
from tests.support.gguf_files import ARRAY, F32, I32, STRING, U32, U64, model, mutants
from tests.support.vocabularies import NAMES, SOURCES, files_of, token_count, vocabulary


class Bytes:
    """A source in memory that records which ranges are read."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data, self.name = data, "test.gguf"
        self.size = len(data) if size is None else size
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, size: int) -> bytes:
        self.reads.append((offset, size))
        return self.data[offset : offset + size]


def read_refusal(data: bytes) -> str:
    with pytest.raises(BadGguf) as caught:
        read_header(Bytes(data))
    return caught.value.message


def test_a_complete_file_reads_as_it_was_written() -> None:
    file = model(tokens=100).put("a.list", ARRAY, (I32, [1, -2, 3]))
    header = read_header(Bytes(file.data()))
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 2
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert list(tokens)[:4] == [b"<unk>", b"<s>", b"</s>", b"t3"]
    numbers = header.metadata["a.list"]
    assert isinstance(numbers, NumberArray)
    assert numbers.values() == (1, -2, 3)
    assert header.tensors[0].name == "token_embd.weight"
    assert header.tensors[0].shape == (8, 100)
    assert header.tensors[-1].offset + header.tensors[-1].size == len(file.data())


def test_tensor_types_agree_with_the_gguf_package() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # the package counts two floats where ggml has two halves
            assert TENSOR_TYPES[kind.value] == (kind.name, block, size)


def test_the_reader_asks_for_growing_ranges() -> None:
    source = Bytes(model(tokens=20_000, filler=4 << 20).data())
    header = read_header(source)
    assert header.read < source.size / 4
    assert len(source.reads) < 8
    offsets = [offset for offset, _ in source.reads]
    assert offsets == sorted(set(offsets)), "no byte is fetched twice"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"<!doctype html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"PK\x03\x04 something else", "does not start with the letters GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(32), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(32), "version is 1"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(32), "version is 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(32), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(32), "metadata keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60) + bytes(32), "metadata key"),
        (b"GG", "does not start"),
        (b"GGUF\3\0", "truncated"),
    ],
)
def test_a_file_of_another_format_is_named(data: bytes, message: str) -> None:
    assert message in read_refusal(data)


def _raw(*keys: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys) + bytes(64)


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_raw(_key(b"a", STRING, struct.pack("<Q", 2**60))), "truncated"),
        (_raw(_key(b"a", 13, b"")), "unknown type 13"),
        (_raw(_key(b"a", ARRAY, struct.pack("<IQ", I32, 2**60))), "more than the file can hold"),
        (_raw(_key(b"a", ARRAY, struct.pack("<IQ", STRING, 2**40))), "more than the file can hold"),
        (_raw(_key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1))), "unknown type 9"),
        (_raw(_key(b"", U32, bytes(4))), "empty or appears twice"),
        (_raw(_key(b"a", U32, bytes(4)), _key(b"a", U32, bytes(4))), "empty or appears twice"),
        (_raw(_key(b"\xff\xfe", U32, bytes(4))), "UTF-8"),
        (_raw(_key(b"general.alignment", U32, struct.pack("<I", 33))), "power of two"),
    ],
)
def test_hostile_metadata_is_refused(data: bytes, message: str) -> None:
    assert message in read_refusal(data)


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((0,), 0, "shape"),
        ((2**62, 2**62), 0, "truncated"),
        ((33,), 2, "shape"),
        ((32,), 4, "unknown type"),
        ((1, 1, 1, 1, 1), 0, "5 dimensions"),
    ],
)
def test_hostile_tensors_are_refused(shape: tuple[int, ...], kind: int, message: str) -> None:
    row = struct.pack("<Q", 1) + b"w" + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    row += struct.pack("<IQ", kind, 0)
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + row + bytes(64)
    assert message in read_refusal(data)


def test_a_tensor_that_lies_elsewhere_is_refused() -> None:
    file = model()
    data = bytearray(file.data())
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8 + 4
    data[at : at + 8] = struct.pack("<Q", 32)
    assert "should be at" in read_refusal(bytes(data))


def test_every_cut_is_noticed() -> None:
    """Cut at every 61st byte, so that cuts fall into every part of the header and the weights."""
    data = model(tokens=50).data()
    for end in range(0, len(data) - 1, 61):
        read_refusal(data[:end])


def test_bytes_after_the_last_tensor_are_noticed() -> None:
    assert "follow its last tensor" in read_refusal(model().data() + bytes(100))


def test_a_file_that_shrinks_while_it_is_read_is_noticed() -> None:
    data = model().data()
    with pytest.raises(BadGguf, match="shorter"):
        read_header(Bytes(data[:100], size=len(data)))


def test_a_thousand_mutants_neither_hang_nor_eat_memory(tmp_path: Path) -> None:
    """Each mutant gives a clean error or a consistent header, quickly and in little memory."""
    file = model(tokens=60).put("llama.x", U64, 1)
    data, header = file.data(), len(file.header())
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path, refused_count, slowest = tmp_path / "m.gguf", 0, 0.0
    for mutant in mutants(data, header, 1000):
        path.write_bytes(mutant)
        begin = time.process_time()
        try:
            info = read_local_model(path)
            assert 0 < info.layers <= 512
            assert all(tensor.offset + tensor.size <= len(mutant) for tensor in info.header.tensors)
        except BadGguf:
            refused_count += 1
        slowest = max(slowest, time.process_time() - begin)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    assert refused_count > 500
    assert slowest < 1
    assert grown < 50_000  # KiB


def test_a_pipe_and_a_folder_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match="not a file"):
        FileSource(Path("/dev/null"))
    with pytest.raises(BadGguf, match="not a file"):
        FileSource(tmp_path)
    with pytest.raises(BadGguf, match="Cannot read"):
        FileSource(tmp_path / "absent")


@pytest.mark.parametrize("source", SOURCES)
def test_vocabularies_of_every_kind_read(source: str, tmp_path: Path) -> None:
    """These files have a header only; the real ones declare up to 151936 tokens."""
    sizes = {name: token_count(name) for name in NAMES}
    if source == "real":
        sizes = {
            "gpt-2": 50257, "llama-bpe": 128256, "llama-spm": 32000, "phi-3": 32064,
            "qwen2": 151936, "qwen35": 151936,
        }  # fmt: skip
    files = files_of(source, tmp_path)
    for name, count in sizes.items():
        header = read_header(FileSource(files[name]))
        assert header.tensors == ()
        tokens = header.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, StringArray)
        assert tokens.count == count
        assert sum(1 for _ in tokens) == count


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_reads_as_it_was_written(name: str) -> None:
    file = vocabulary(name)
    header = read_header(Bytes(file.data()))
    assert header.metadata.keys() == file.metadata.keys()
    for key, (kind, value) in file.metadata.items():
        actual: object = header.metadata[key]
        if isinstance(actual, StringArray):
            actual = (STRING, [text.decode() for text in actual])
        elif isinstance(actual, NumberArray):
            actual = (value[0], list(actual.values()))  # type: ignore[index]
        assert actual == (pytest.approx(value) if kind == F32 else value), key
