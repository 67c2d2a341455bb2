"""Files that are no language models are refused with a message that says what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_heads import TINY_HEADS, Architecture, write_heads, write_heads_apart
from benchmarks.synthetic_sidecar import TINY_GEMMA, write_with_sidecar
from localspec.engine.llama import initialise
from localspec.engine.pair.models import open_model
from localspec.errors import LoadFailed, NotMatched, UnsafeModel
from localspec.protocol.frames import EngineSettings
from localspec.registry.header.model import read_local_model
from localspec.registry.header.pairing import check_pair
from tests.support.gguf_files import BOOL, STRING, U32, Gguf, model, with_key

SHIPPED = Path(__file__).resolve().parents[2] / "localspec" / "builtin" / "draft.gguf"

DESCRIPTIONS = {
    "t5encoder": "encoder-decoder",
    "dream": "diffusion model",
    "llada": "diffusion model",
    "llada-moe": "diffusion model",
    "rnd1": "diffusion model",
    "t5": "encoder-decoder",
    "clip": "projector",
    "wavtokenizer-dec": "speech",
    "eagle3": "draft head",
    "controlvector": "control vector",
}


def read_refusal(file: Gguf, folder: Path) -> str:
    with pytest.raises(UnsafeModel) as caught:
        read_local_model(file.write(folder / "m.gguf"))
    assert caught.value.message.startswith("m.gguf cannot generate text: ")
    return caught.value.message


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_an_architecture_that_writes_nothing_is_named(architecture: str, tmp_path: Path) -> None:
    assert DESCRIPTIONS[architecture] in read_refusal(model(architecture=architecture), tmp_path)


def test_the_kind_of_file_is_named_before_missing_values(tmp_path: Path) -> None:
    for kind, message in (
        ("adapter", "LoRA"),
        ("imatrix", "importance matrix"),
        ("mmproj", "projec"),
    ):
        bare = model().drop("llama.block_count").put("general.type", STRING, kind)
        assert message in read_refusal(bare, tmp_path)
        assert message in read_refusal(bare.drop("general.architecture"), tmp_path)
    assert "projector" in read_refusal(
        model(architecture="clip").drop("clip.block_count"), tmp_path
    )


@pytest.mark.parametrize(
    "architecture", ["bert", "modern-bert", "nomic-bert-moe", "jina-bert-v3", "gemma-embedding"]
)
def test_an_embedding_model_is_known_by_its_architecture(architecture: str, tmp_path: Path) -> None:
    file = model(architecture=architecture)
    info = read_local_model(file.write(tmp_path / "m.gguf"))
    assert (info.pooling, info.needs_whole_text, info.has_no_cache) == ("mean", True, True)
    stated = file.put(f"{architecture}.pooling_type", U32, 2).write(tmp_path / "m.gguf")
    assert read_local_model(stated).pooling == "cls"


def test_a_model_of_a_chat_architecture_may_be_for_embeddings(tmp_path: Path) -> None:
    for number, pooling in enumerate(("mean", "cls", "last", "rank"), 1):
        file = model().put("llama.pooling_type", U32, number)
        if pooling == "rank":
            with pytest.raises(UnsafeModel, match=r"without the part that scores"):
                read_local_model(file.write(tmp_path / "m.gguf"))
            file.tensors.append(("cls.output.weight", (8, 1), 0))
        info = read_local_model(file.write(tmp_path / "m.gguf"))
        assert (info.pooling, info.needs_whole_text) == (pooling, number < 3)
    ahead = model().put("llama.attention.causal", BOOL, False).write(tmp_path / "m.gguf")
    info = read_local_model(ahead)
    assert (info.pooling, info.needs_whole_text, info.has_no_cache) == ("mean", True, False)


def test_an_embedding_model_neither_drafts_nor_is_drafted_for(tmp_path: Path) -> None:
    embedding = model().put("llama.pooling_type", U32, 3).write(tmp_path / "m.gguf")
    with pytest.raises(UnsafeModel, match=r"cannot generate text: it is an embedding model"):
        read_local_model(embedding, as_draft=True)
    writer = read_local_model(model().write(tmp_path / "w.gguf"))
    with pytest.raises(NotMatched, match="nothing can draft for it"):
        check_pair(read_local_model(embedding), writer)


def test_heads_in_their_own_file_draft_for_their_target_only(tmp_path: Path) -> None:
    files = write_with_sidecar(tmp_path)
    target, draft = read_local_model(files[0]), read_local_model(files[1], as_draft=True)
    assert draft.sidecar == "mtp"
    check_pair(target, draft)
    with pytest.raises(UnsafeModel, match="draft head"):
        read_local_model(files[1])
    mismatches = {
        "states of 64": replace(TINY_GEMMA, n_embd=96, n_head=3),
        "attention heads": replace(TINY_GEMMA, n_head=4),
        "a target of gemma4, not llama": None,
    }
    for message, shape in mismatches.items():
        target_file = model().write(tmp_path / "m.gguf")
        if shape:
            target_file = write_with_sidecar(tmp_path / message, shape)[0]
        with pytest.raises(NotMatched, match=message):
            check_pair(read_local_model(target_file), draft)


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35"])
def test_heads_without_a_trunk_draft_for_their_target_only(
    tmp_path: Path, architecture: Architecture
) -> None:
    """As llama.cpp's converter writes them: the target's architecture, and the last block alone."""
    files = tmp_path / "trunk.gguf", tmp_path / "mtp-trunk.gguf"
    write_heads_apart(*files, architecture=architecture)
    whole = read_local_model(write_heads(tmp_path / "whole.gguf", architecture=architecture))
    target, draft = read_local_model(files[0]), read_local_model(files[1], as_draft=True)
    assert (target.sidecar, draft.sidecar, whole.sidecar) == (None, "mtp", None)
    assert (target.drafting_heads, whole.drafting_heads) == (0, 1)
    check_pair(target, draft)
    check_pair(whole, draft)
    # Together, target and heads need what the whole model needs.
    assert (target.kept.keys, target.kept.state) == (whole.kept.keys, whole.kept.state)
    assert (draft.kept.keys, draft.kept.values) == tuple(whole.kept.ahead)
    assert (draft.kept.state, draft.rollback) == (0, "full")
    with pytest.raises(UnsafeModel, match="holds only MTP heads"):
        read_local_model(files[1])
    others = tmp_path / "other.gguf", tmp_path / "mtp-other.gguf"
    for message, shape in {
        "for a model of 2 layers, and the target has 3": replace(TINY_HEADS, n_layer=3),
        "states of 64": replace(TINY_HEADS, n_embd=128),
    }.items():
        write_heads_apart(*others, shape, architecture=architecture)
        with pytest.raises(NotMatched, match=message):
            check_pair(read_local_model(others[0]), draft)
    with pytest.raises(NotMatched, match=f"a target of {architecture}, not llama"):
        check_pair(read_local_model(model().write(tmp_path / "m.gguf")), draft)


def test_a_language_model_may_declare_its_purpose(tmp_path: Path) -> None:
    file = model().put("llama.pooling_type", U32, 0).put("llama.attention.causal", BOOL, True)
    read_local_model(file.put("general.type", STRING, "model").write(tmp_path / "m.gguf"))


def test_missing_layers_are_named(tmp_path: Path) -> None:
    file = model(layers=2)
    file.tensors = [row for row in file.tensors if not row[0].startswith("blk.")]
    with pytest.raises(UnsafeModel, match="none of the 2 layers"):
        read_local_model(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("llama.attention.causal", BOOL, False, "looks ahead"),
        ("llama.pooling_type", U32, 3, "embedding model"),
        ("llama.pooling_type", U32, 4, "reranker"),
    ],
)
def test_the_engine_refuses_other_models_too(
    key: str, kind: int, value: object, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(with_key(SHIPPED.read_bytes(), key, kind, value))
    initialise()
    with pytest.raises(LoadFailed, match=message):
        open_model(str(file), EngineSettings(n_gpu_layers=0), lambda _: None)
