"""Which models on this disk can draft for which, and what a pair of them is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.registry.catalogue import NAME_PATTERN, explain_reserved_name
from localspec.registry.disk.discovery import FoundModel
from localspec.registry.disk.drafts import free_name, judge_all, propose_pairs
from tests.support.gguf_files import BOOL, Gguf, model


def found(folder: Path, name: str, file: Gguf, origin: str = "here") -> FoundModel:
    return FoundModel(file.write(folder / name), name, origin)


def paths(*models: FoundModel) -> tuple[str, ...]:
    return tuple(str(each.path) for each in models)


def by_name(name: str, path: Path) -> str:
    return name


def test_the_one_rule_and_the_size_decide(tmp_path: Path) -> None:
    big = found(tmp_path, "big.gguf", model(layers=8, width=32))
    near = found(tmp_path, "near.gguf", model(layers=7, width=32))
    small = found(tmp_path, "small.gguf", model(layers=2))
    tiny = found(tmp_path, "tiny.gguf", model(layers=1))
    other = model(layers=1).put("tokenizer.ggml.add_bos_token", BOOL, True)
    stranger = found(tmp_path, "other.gguf", other)
    mamba = found(tmp_path, "mamba.gguf", model(layers=1, architecture="mamba"))
    cut = found(tmp_path, "cut.gguf", model(tokens=280, layers=1))
    judged = {each.name: each for each in judge_all([big, near, small, tiny, stranger, mamba])}
    assert judged["big.gguf"].drafts == paths(tiny, small)  # half its size is not enough for `near`
    assert not judged["mamba.gguf"].problem
    assert judged["tiny.gguf"].drafts == ()
    # The smaller one lacks tokens that the target uses.
    assert judge_all([big, cut, small])[0].drafts == paths(small, cut)
    pairs = {each.name: each for each in propose_pairs(list(judged.values()), (), ["big"], by_name)}
    assert set(pairs) == {"big-2", "near", "other", "mamba"}
    assert pairs["big-2"].draft == "tiny.gguf"
    assert pairs["big-2"].target == "big.gguf"
    assert pairs["other"].draft is None


def test_of_two_drafts_alike_the_one_of_the_same_program_is_taken(tmp_path: Path) -> None:
    big = found(tmp_path, "big.gguf", model(layers=8, width=32), "Ollama")
    far = found(tmp_path, "a.gguf", model(layers=1, seed=1), "Jan")
    near = found(tmp_path, "b.gguf", model(layers=1, seed=2), "Ollama")
    assert judge_all([big, far, near])[0].drafts == paths(near, far)


def test_models_of_pairs_that_are_here_make_none(tmp_path: Path) -> None:
    big = found(tmp_path, "big.gguf", model(layers=8, width=32), "pair mine")
    tiny = found(tmp_path, "tiny.gguf", model(layers=1))
    judged = judge_all([big, tiny])
    assert propose_pairs(judged, [str(big.path)], ["mine"], by_name) == []
    assert [each.name for each in propose_pairs(judged, (), ["mine"], by_name)] == ["big"]


def test_reading_ends_when_it_takes_too_long(tmp_path: Path) -> None:
    big = found(tmp_path, "big.gguf", model())
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
def test_names_are_made_as_a_person_would(model: str, name: str) -> None:
    assert free_name(model, ["taken", "taken-2"]) == name


@given(st.text(max_size=90), st.lists(st.text(max_size=70), max_size=4))
def test_a_name_is_always_one_that_a_pair_may_have(model: str, taken: list[str]) -> None:
    first = free_name(model, taken)
    for name in (first, free_name(model, [*taken, first])):
        assert NAME_PATTERN.fullmatch(name)
        assert not explain_reserved_name(name)
        assert name not in taken
