"""The boundary to llama.cpp: every refusal is a Python error, and the process survives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec
from localspec import model_traits
from localspec.engine.llama import (
    BadBatch,
    Batch,
    Context,
    ContextSettings,
    Model,
    NoKvSlot,
    Vocab,
    gpus,
)
from localspec.errors import InvalidRequest, LoadFailed
from localspec.protocol.frames import PairFiles
from localspec.registry.header import architectures
from localspec.registry.header.gguf import FileSource, read_header
from localspec.registry.header.model import describe_model, read_traits
from tests.support import gguf_files
from tests.support.gguf_files import STRING, U32
from tests.support.pairs import BOS, END, EOS, N_VOCAB
from tests.support.rescoring import NEAR_TIE


@pytest.fixture(scope="module")
def model(contextual_files: PairFiles) -> Iterator[Model]:
    with Model(contextual_files.target) as loaded:
        yield loaded


def make_settings(**changes: int) -> ContextSettings:
    chosen = {"n_ctx": 256, "n_batch": 64, "n_seq": 2, "n_outputs": 8, "n_threads": 1, **changes}
    return ContextSettings(**chosen)  # type: ignore[arg-type]


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, make_settings()) as created:
        yield created


def decode_tokens(context: Context, tokens: list[int], start: int = 0, sequence: int = 0) -> Batch:
    batch = Batch(64)
    for at, token in enumerate(tokens, start=start):
        batch.add(token, at, sequence, at == start + len(tokens) - 1)
    context.decode(batch)
    return batch


def test_row_has_logits_only_if_requested(context: Context) -> None:
    decode_tokens(context, [1, 2, 3])
    assert context.logits(2).shape == (N_VOCAB,)
    assert np.all(np.isfinite(context.logits(2)))
    for row in (0, 1, 3, 10**6, -(10**6)):
        with pytest.raises(BadBatch):
            context.logits(row)


def test_a_batch_holds_its_capacity_and_no_more(context: Context) -> None:
    batch = Batch(2)
    with pytest.raises(BadBatch, match="empty"):
        context.decode(batch)
    assert [batch.add(1, 0, 0, False), batch.add(2, 1, 0, True)] == [0, 1]
    with pytest.raises(BadBatch, match="2 rows"):
        batch.add(3, 2, 0, True)
    context.decode(batch)


@pytest.mark.parametrize("sequence", [-1, 2, 10**6])
def test_a_sequence_outside_the_context_is_refused(context: Context, sequence: int) -> None:
    for call in (
        context.length,
        context.save,
        lambda s: context.remove(s, 0),
        lambda s: context.copy(0, s, 1),
        lambda s: context.copy(s, 0, 1),
    ):
        with pytest.raises(BadBatch, match="outside"):
            call(sequence)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**31 - 1])
def test_a_batch_with_an_impossible_token_is_refused(context: Context, token: int) -> None:
    with pytest.raises(BadBatch):
        decode_tokens(context, [1, token])
    decode_tokens(context, [1, 2])


def test_a_gap_in_the_positions_is_refused(context: Context) -> None:
    decode_tokens(context, [1, 2, 3])
    with pytest.raises(BadBatch):
        decode_tokens(context, [4], start=9)
    decode_tokens(context, [4], start=3)


def test_a_full_cache_says_so_and_changes_nothing(context: Context) -> None:
    for start in range(0, 256, 64):
        decode_tokens(context, [5] * 64, start)
    with pytest.raises(NoKvSlot):
        decode_tokens(context, [6], sequence=1)
    assert (context.length(0), context.length(1)) == (256, 0)
    assert context.remove(0, 200)
    decode_tokens(context, [6], sequence=1)


def test_cells_are_shared_by_a_copy_and_outlive_the_original(context: Context) -> None:
    decode_tokens(context, [1, 2, 3, 4])
    context.copy(0, 1, 3)
    assert context.length(1) == 3
    assert context.remove(0, 0)
    decode_tokens(context, [9], start=3, sequence=1)
    copied = context.logits(0).copy()
    context.clear()
    decode_tokens(context, [1, 2, 3, 9])
    # A CPU computes one row and four rows alike; a GPU has a different kernel for each.
    rounding = NEAR_TIE if gpus() else 1e-4
    assert np.allclose(context.logits(3), copied, atol=rounding)
    for tokens in ([1, 2, 4, 9], [4, 2, 3, 9], [9]):  # any wrong or missing cell is detected
        context.clear()
        decode_tokens(context, tokens)
        assert not np.allclose(context.logits(len(tokens) - 1), copied, atol=4 * NEAR_TIE)


@pytest.mark.parametrize("changes", [{"n_seq": 4, "n_outputs": 1}, {"n_seq": 8, "n_batch": 4}])
def test_context_has_fewer_logits_than_sequences(model: Model, changes: dict[str, int]) -> None:
    """llama.cpp would end the process."""
    with Context(model, make_settings(**changes)) as created:
        batch = Batch(4)
        batch.add(1, 0, 0, True)
        created.decode(batch)


def test_a_context_that_cannot_be_made_is_an_error_with_its_reason(model: Model) -> None:
    with pytest.raises(LoadFailed, match=r"256 tokens for .*n_seq_max"):
        Context(model, make_settings(n_seq=1_000_000))


@pytest.fixture(scope="module")
def shipped() -> Iterator[Vocab]:
    path = Path(localspec.__file__).parent / "builtin" / "target.gguf"
    with Model(str(path)) as loaded:
        yield loaded.vocab


@given(st.text(max_size=60))
def test_text_comes_back_from_its_tokens(model: Model, shipped: Vocab, text: str) -> None:
    # The beginning of the synthetic words " w12" is a merge but no token, so llama.cpp loses it.
    for vocab, source in ((model.vocab, text.replace(" w", " v")), (shipped, text)):
        tokens = vocab.tokenize(source, add_special=False, parse_special=False)
        assert b"".join(vocab.piece(token) for token in tokens).decode() == source


def test_special_tokens_are_parsed_only_where_asked(model: Model) -> None:
    vocab = model.vocab
    assert vocab.tokenize("<|end|>", add_special=False, parse_special=True) == [END]
    assert END not in vocab.tokenize("<|end|>", add_special=False, parse_special=False)
    assert vocab.tokenize("a", add_special=True, parse_special=False)[0] == BOS
    assert vocab.piece(END) == b""
    assert vocab.piece(END, special=True) == b"<|end|>"
    assert [vocab.is_eog(token) for token in (EOS, END, BOS, 5)] == [True, True, False, False]
    assert vocab.text(END) == "<|end|>"
    assert vocab.text(-1) == vocab.text(N_VOCAB) == ""


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**31, -(2**40)])
def test_token_ids_that_would_crash_llama_cpp_are_refused(model: Model, token: int) -> None:
    for call in (model.vocab.piece, model.vocab.is_eog, model.vocab.check):
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            call(token)


def test_missing_metadata_key_is_none(model: Model) -> None:
    assert model.metadata("general.architecture") == "llama"
    assert model.metadata("general.nothing") is None


@pytest.mark.parametrize("name", ["target.gguf", "draft.gguf"])
def test_model_description_is_that_of_show(name: str) -> None:
    path = Path(localspec.__file__).parent / "builtin" / name
    with Model(str(path)) as loaded:
        described = loaded.description.split(", ")
        size = f"{loaded.n_params / 1e6:.2f} M parameters"
    header = read_header(FileSource(path))
    architecture, traits = describe_model([header]).architecture, read_traits([header])
    assert described == [architecture, size, traits.quantization]


@pytest.mark.parametrize("file_type", [*range(4), *range(7, 33), 36, 37, 38, 15 | 1024])
def test_each_quantization_has_the_name_that_show_has(
    model: Model, file_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"general.file_type": str(file_type)}
    metadata = model.metadata
    monkeypatch.setattr(model, "metadata", lambda key: values.get(key) or metadata(key))
    assert model.description.endswith(f" parameters, {model_traits.quantization_name(file_type)}")
    assert " - " not in model.description


def test_load_error_has_the_reason_of_llama_cpp(tmp_path: Path) -> None:
    base_file = gguf_files.model()
    for file, reason in (
        (base_file.put("general.architecture", STRING, "foo"), "unknown model architecture: 'foo'"),
        (base_file.put("tokenizer.ggml.pre", STRING, "foo"), "unknown pre-tokenizer type: 'foo'"),
        (base_file.drop("blk.1.attn_q.weight"), "tensor 'blk.1.attn_q.weight' not found"),
        (base_file.put("general.alignment", U32, 7), "alignment 7 is not a power of 2"),
    ):
        path = file.write(tmp_path / "m.gguf")
        with pytest.raises(LoadFailed, match=re.escape(f"cannot load {path} (")) as caught:
            Model(str(path))
        assert f"{reason})." in caught.value.message


def test_the_known_architectures_are_those_of_llama_cpp(tmp_path: Path) -> None:
    for name in sorted(architectures.KNOWN):
        path = gguf_files.Gguf({"general.architecture": (STRING, name)}).write(tmp_path / "m.gguf")
        with pytest.raises(LoadFailed) as caught:  # because everything else is missing
            Model(str(path))
        assert "unknown model architecture" not in caught.value.message
