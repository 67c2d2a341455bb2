"""Values that would crash llama.cpp, or make a model useless without an error, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.errors import BadGguf, UnsafeModel
from localspec.registry.header.architectures import rollback_kind
from localspec.registry.header.model import read_local_model, shard_names
from localspec.registry.header.weights import check_weights
from tests.support.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    Gguf,
    model,
    shards,
    with_key,
)


def read_refusal(file: Gguf, folder: Path) -> str:
    with pytest.raises(UnsafeModel) as caught:
        read_local_model(file.write(folder / "m.gguf"))
    return caught.value.message


def test_a_model_is_described(tmp_path: Path) -> None:
    file = model(tokens=200, layers=3, width=16)
    info = read_local_model(file.write(tmp_path / "m.gguf"))
    assert (info.architecture, info.layers, info.width, info.vocabulary) == ("llama", 3, 16, 200)
    assert (info.heads, info.kv_heads, info.key_length) == (2, (1, 1, 1), 8)
    assert info.context == 4096
    assert info.rollback == "full"
    assert info.parameters == sum(tensor.elements for tensor in info.header.tensors)


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        (
            "general.architecture",
            STRING,
            "llama9",
            "'llama9', which this localspec's llama.cpp does",
        ),
        ("llama.block_count", U32, 1000, "block_count' is 1000"),
        ("llama.block_count", U32, 0, "block_count' is 0"),
        ("llama.block_count", U32, 3, "lacks layer 2"),
        ("llama.block_count", U32, 1, "contains layer 1"),
        ("llama.block_count", F32, 2.0, "whole number"),
        ("llama.attention.layer_norm_rms_epsilon", F32, float("nan"), "not a finite number"),
        ("llama.attention.layer_norm_rms_epsilon", F32, -1e-5, "between 0 and 0.1"),
        ("llama.rope.freq_base", F32, float("inf"), "not a finite number"),
        ("llama.attention.head_count", U32, 0, "head_count"),
        ("llama.attention.head_count_kv", ARRAY, (I32, [1]), "1 entries for 2 layers"),
        ("llama.embedding_length", U32, 0, "embedding_length' is 0"),
        ("llama.embedding_length", U32, 16, "shape"),
        ("llama.context_length", U32, 0, "context_length"),
        ("llama.context_length", U32, 2**31, "context_length"),
        ("llama.expert_used_count", U32, 4, "experts"),
        ("llama.rope.scaling.type", STRING, "x", "must be one of none, linear"),
        ("tokenizer.ggml.eos_token_id", U32, 1_000_000_000, "there are 300 tokens"),
        ("tokenizer.ggml.bos_token_id", U32, 300, "there are 300 tokens"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"] * 299), "lists 299 tokens"),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [1] * 299), "one entry per token"),
        ("general.architecture", STRING, "../etc", "architecture"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"] * 300), "lists the token b'a' twice"),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [6] * 300), "is not a byte"),
    ],
)
def test_a_dangerous_value_is_named(
    key: str, kind: int, value: object, message: str, tmp_path: Path
) -> None:
    assert message in read_refusal(model().put(key, kind, value), tmp_path)


def test_a_begin_token_to_be_added_must_exist(tmp_path: Path) -> None:
    rwkv = model().put("tokenizer.ggml.model", STRING, "rwkv")
    rwkv = rwkv.drop("tokenizer.ggml.bos_token_id")
    added = rwkv.put("tokenizer.ggml.add_bos_token", BOOL, True)
    assert "for the begin of a text but has none" in read_refusal(added, tmp_path)


def test_empty_tokens_are_not_duplicates(tmp_path: Path) -> None:
    read_local_model(model().token(7, "").token(8, "").write(tmp_path / "m.gguf"))


def test_tokens_equal_up_to_a_nul_are_duplicates(tmp_path: Path) -> None:
    """llama.cpp reads no further than the NUL, and aborts the process at the second token."""
    assert "lists the token b'ab' twice" in read_refusal(
        model().token(7, "ab").token(8, "ab\0c"), tmp_path
    )


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight", "output_norm.weight", "blk.1.attn_norm.weight", "blk.0.attn_q.weight",
        "blk.1.ffn_down.weight", "blk.1.attn_v.weight",
    ],
)  # fmt: skip
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    assert name in read_refusal(model().drop(name), tmp_path)


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count"])
def test_a_missing_number_is_named(key: str, tmp_path: Path) -> None:
    read_refusal(model().drop(key), tmp_path)


def test_a_vocabulary_without_weights_is_no_model(tmp_path: Path) -> None:
    empty = model()
    empty.tensors = []
    assert "no weights" in read_refusal(empty, tmp_path)


def test_zeros_at_the_end_are_noticed(tmp_path: Path) -> None:
    """A download that reserved its space and then stopped leaves such a file."""
    path = model().write(tmp_path / "m.gguf")
    check_weights(path)
    data = path.read_bytes()
    path.write_bytes(data[:-512] + bytes(512))
    read_local_model(path)  # the header alone does not show it
    with pytest.raises(UnsafeModel, match="ends in zeros"):
        check_weights(path)


def test_a_norm_of_nan_is_noticed(tmp_path: Path) -> None:
    path = model().write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[-4:] = b"\0\0\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(UnsafeModel, match=r"output_norm\.weight"):
        check_weights(path)


def test_shards_are_one_model(tmp_path: Path) -> None:
    complete = model(layers=4)
    for name, data in shards(complete, 3, "m").items():
        (tmp_path / name).write_bytes(data)
    info = read_local_model(tmp_path / "m-00002-of-00003.gguf")  # any part will do
    assert info.layers == 4
    assert info.parameters == read_local_model(complete.write(tmp_path / "w.gguf")).parameters


def test_a_missing_or_foreign_shard_is_named(tmp_path: Path) -> None:
    files = shards(model(layers=4), 3, "m")
    names = list(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / names[1]).write_bytes(files[names[2]])
    with pytest.raises(BadGguf, match="is not part 2 of 3"):
        read_local_model(tmp_path / names[0])
    (tmp_path / names[1]).unlink()
    with pytest.raises(BadGguf, match="00002-of-00003"):
        read_local_model(tmp_path / names[0])
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(files[names[0]])
    with pytest.raises(BadGguf, match="one of 3 parts"):
        read_local_model(lone)


def test_shard_names() -> None:
    assert shard_names("a.gguf") == ["a.gguf"]
    assert shard_names("a-00002-of-00002.gguf") == [
        "a-00001-of-00002.gguf",
        "a-00002-of-00002.gguf",
    ]
    for impossible in ("a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-00001-of-99999.gguf"):
        with pytest.raises(BadGguf):
            shard_names(impossible)


@pytest.mark.parametrize(
    ("architecture", "window", "kind"),
    [
        ("llama", 0, "full"),
        ("qwen3", 0, "full"),
        ("phi3", 2048, "full"),  # llama.cpp reads its window and does not use it
        ("gemma3", 1024, "short"),
        ("gemma3", 0, "full"),
        ("mamba2", 0, "none"),
        ("jamba", 0, "none"),
        ("qwen35", 0, "snapshots"),
        ("dream", 0, "none"),
        ("one-of-the-future", 0, "full"),
    ],
)
def test_rollback_by_architecture(architecture: str, window: int, kind: str) -> None:
    assert rollback_kind(architecture, window) == kind


def test_tensors_of_types_without_kernels_are_named(tmp_path: Path) -> None:
    for name, kind in (
        ("output_norm.weight", 1),
        ("blk.1.attn_k.weight", 24),
        ("selector_hidden.weight", 26),  # also those that main models do not have
        ("blk.0.attn_conv_base", 1),
        ("blk.0.layer_output_scale.weight", 26),
    ):
        file = model()
        shape = (1,) if "scale" in name else (8, 8)
        if name not in {tensor[0] for tensor in file.tensors}:
            file.tensors.append((name, shape, kind))
        file.tensors = [(n, s, kind if n == name else k) for n, s, k in file.tensors]
        assert name in read_refusal(file, tmp_path)


def test_a_layer_count_that_is_all_draft_layers_is_refused(tmp_path: Path) -> None:
    assert "nextn" in read_refusal(model().put("llama.nextn_predict_layers", U32, 3), tmp_path)


def test_a_pre_tokenizer_that_crashes_llama_cpp_is_refused(tmp_path: Path) -> None:
    file = model().put("tokenizer.ggml.pre", STRING, "whitespace")
    assert "two spaces" in read_refusal(file, tmp_path)


def test_misaligned_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(with_key(model().data(), "general.alignment", U32, 8))
    with pytest.raises(BadGguf, match="multiple of 32"):
        read_local_model(tmp_path / "m.gguf")
