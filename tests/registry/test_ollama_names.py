"""Names of models in Ollama lead to the pairs with the same model, and to no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import ModelNotFound
from localspec.registry import ollama_names
from localspec.registry.catalogue import Catalogue, load_catalogue, shipped_catalogue_path

CATALOGUE = load_catalogue(Path("/nonexistent"), shipped_catalogue_path())


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("qwen2.5-coder:7b", "coder-7b"),
        ("qwen2.5-coder:7b-instruct", "coder-7b"),
        ("qwen2.5-coder:7b-base", "fim-7b"),
        ("Qwen3:4B", "qwen3-4b"),
        ("library/qwen3:4b", "qwen3-4b"),
        ("registry.ollama.ai/library/qwen3:4b", "qwen3-4b"),
        ("llama3.1:8b", "llama31-8b"),
        ("llama3.3:70b-instruct", "llama33-70b"),
        ("gemma3:12b", "gemma3-12b"),
        ("gemma3:12b-it", "gemma3-12b"),
        ("deepseek-r1:32b", "r1-32b"),
        ("smollm2:1.7b", "smollm2"),
        ("nomic-embed-text:latest", "nomic-embed"),
    ],
)
def test_a_name_of_ollamas_is_the_pair_with_that_model(name: str, pair: str) -> None:
    assert CATALOGUE.find(name)[0] == pair


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("qwen2.5-coder:3b", "coder-7b"),  # a size that the catalogue does not have
        ("qwen2.5-coder:latest", "coder-7b"),  # which size that is, Ollama decides
        ("deepseek-r1:8b", "r1-32b"),
        ("llama3:18b", ""),  # not Llama 3.1 with 8b
        ("mistral-small:22b", "mistral-small"),  # an older model than the catalogue's
        ("gemma3:12b-it-q4_K_M", "gemma3-12b"),  # other files than those that would be pulled
    ],
)
def test_a_name_of_another_model_is_refused(name: str, suggestion: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        CATALOGUE.find(name)
    assert suggestion in refused.value.message


NAMES = sorted({*CATALOGUE.pairs, *CATALOGUE.aliases})


@given(name=st.sampled_from(NAMES), data=st.data())
def test_a_colon_in_place_of_a_hyphen_means_the_same_pair(name: str, data: st.DataObject) -> None:
    hyphens = [index for index, char in enumerate(name) if char == "-"]
    if not hyphens:
        return
    index = data.draw(st.sampled_from(hyphens))
    typed = f"{name[:index]}:{name[index + 1 :]}"
    assert CATALOGUE.find(typed)[0] == CATALOGUE.find(name)[0]


@given(model=st.from_regex(r"[a-z0-9.-]{1,12}", fullmatch=True),
       tag=st.from_regex(r"[a-z0-9.-]{1,12}", fullmatch=True))  # fmt: skip
def test_model_and_tag_agree_each_by_itself(model: str, tag: str) -> None:
    bare = str.maketrans("", "", ".-_")
    for pair_name in ollama_names.find_same_model(f"{model}:{tag}", NAMES):
        splits = {
            (pair_name[:index].translate(bare), pair_name[index + 1 :].translate(bare))
            for index, char in enumerate(pair_name)
            if char == "-"
        }
        any_tag = tag == "latest" or not ollama_names._CHAT_SUFFIX.sub("", tag)
        assert any_tag or any(model_part == model.translate(bare) for model_part, _ in splits)


def test_two_pairs_with_one_model_are_both_named() -> None:
    pair = CATALOGUE.pairs["qwen3-4b"]
    catalogue = Catalogue({"qwen3-4b": pair, "qwen-3-4b": pair}, {})
    with pytest.raises(ModelNotFound, match=r"Did you mean qwen3-4b or qwen-3-4b\?"):
        catalogue.find("qwen3:4b")


@pytest.mark.parametrize(
    "name",
    [
        "coder-7b",
        "a/b:q4",
        "/x/y:z.gguf",
        "a:b,c:d",
        "~x:y",
        "hf.co/a/b:c",
        ":b",
        "a:",
        "a b:c",
        "a:b:c",
    ],
)
def test_other_names_are_not_ollama_names(name: str) -> None:
    assert not ollama_names.is_ollama_name(name)
