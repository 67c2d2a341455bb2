"""Which models on this disk can draft for which, and how a pair of them is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.registry.catalogue import NAME_PATTERN, explain_reserved_name
from localspec.registry.disk.discovery import FoundModel
from localspec.registry.disk.drafts import free_name, judge_all, propose_pairs
from tests.support.gguf_files import BOOL, Gguf, model


def write_model_file(folder: Path, name: str, file: Gguf, origin: str = "here") -> FoundModel:
    return FoundModel(file.write(folder / name), name, origin)


def paths_of(*models: FoundModel) -> tuple[str, ...]:
    return tuple(str(model.path) for model in models)


def use_name(name: str, path: Path) -> str:
    return name


def test_tokenizer_and_size_decide_which_models_draft(tmp_path: Path) -> None:
    big = write_model_file(tmp_path, "big.gguf", model(layers=8, width=32))
    near = write_model_file(tmp_path, "near.gguf", model(layers=7, width=32))
    small = write_model_file(tmp_path, "small.gguf", model(layers=2))
    tiny = write_model_file(tmp_path, "tiny.gguf", model(layers=1))
    foreign = model(layers=1).put("tokenizer.ggml.add_bos_token", BOOL, True)
    stranger = write_model_file(tmp_path, "other.gguf", foreign)
    mamba = write_model_file(tmp_path, "mamba.gguf", model(layers=1, architecture="mamba"))
    cut = write_model_file(tmp_path, "cut.gguf", model(tokens=280, layers=1))
    models = judge_all([big, near, small, tiny, stranger, mamba])
    judged = {model.name: model for model in models}
    # `near` is larger than half of the target.
    assert judged["big.gguf"].drafts == paths_of(tiny, small)
    assert not judged["mamba.gguf"].problem
    assert judged["tiny.gguf"].drafts == ()
    # The smaller one lacks tokens that the target uses.
    assert judge_all([big, cut, small])[0].drafts == paths_of(small, cut)
    proposed = propose_pairs(list(judged.values()), (), ["big"], use_name)
    pairs = {pair.name: pair for pair in proposed}
    assert set(pairs) == {"big-2", "near", "other", "mamba"}
    assert pairs["big-2"].draft == "tiny.gguf"
    assert pairs["big-2"].target == "big.gguf"
    assert pairs["other"].draft is None


def test_among_equal_drafts_the_one_of_the_same_program_is_first(tmp_path: Path) -> None:
    big = write_model_file(tmp_path, "big.gguf", model(layers=8, width=32), "Ollama")
    far = write_model_file(tmp_path, "a.gguf", model(layers=1, seed=1), "Jan")
    near = write_model_file(tmp_path, "b.gguf", model(layers=1, seed=2), "Ollama")
    assert judge_all([big, far, near])[0].drafts == paths_of(near, far)


def test_models_of_installed_pairs_make_no_new_pairs(tmp_path: Path) -> None:
    big = write_model_file(tmp_path, "big.gguf", model(layers=8, width=32), "pair mine")
    tiny = write_model_file(tmp_path, "tiny.gguf", model(layers=1))
    judged = judge_all([big, tiny])
    assert propose_pairs(judged, [str(big.path)], ["mine"], use_name) == []
    assert [pair.name for pair in propose_pairs(judged, (), ["mine"], use_name)] == ["big"]


def test_reading_stops_when_it_takes_too_long(tmp_path: Path) -> None:
    big = write_model_file(tmp_path, "big.gguf", model())
    (judged,) = judge_all([big], patience=-1.0)
    assert "was not read" in judged.problem


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen2.5:7b", "qwen2.5-7b"),
        ("llama3.2:latest", "llama3.2"),
        ("someone/mine:latest", "mine"),
        ("hf.co/bartowski/X-GGUF:Q4_K_M", "x-gguf-q4_k_m"),
        ("Qwen2.5-Coder-7B-Instruct-Q4_K_M.gguf", "qwen2.5-coder-7b-instruct-q4_k_m"),
        ("big-Q4-00001-of-00003.gguf", "big-q4"),
        ("A.GGUF", "a"),
        ("builtin.gguf", "builtin-2"),
        ("taken.gguf", "taken-3"),
        ("模型.gguf", "model"),
    ],
)
def test_names_of_pairs_are_derived_from_names_of_models(model: str, name: str) -> None:
    assert free_name(model, ["taken", "taken-2"]) == name


@given(st.text(max_size=90), st.lists(st.text(max_size=70), max_size=4))
def test_a_derived_name_is_always_valid_and_free(model: str, taken_names: list[str]) -> None:
    first_name = free_name(model, taken_names)
    for name in (first_name, free_name(model, [*taken_names, first_name])):
        assert NAME_PATTERN.fullmatch(name)
        assert not explain_reserved_name(name)
        assert name not in taken_names
