"""Completions end like with llama.cpp's own sampler, on the shipped vocabulary."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec
from localspec.engine import llama
from localspec.engine.llama import Model, Vocab, infill_rule
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.sampler import Sampler, infill_sampler
from localspec.engine.sampling.settings import Settings


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    llama.initialise()
    model = Model(str(Path(localspec.__file__).parent / "builtin" / "target.gguf"), n_gpu_layers=0)
    yield Vocab(model)
    model.close()


def apply_llama_cpp_sampler(vocab: Vocab, logits: dict[int, float]) -> dict[int, float]:
    """Return the candidates that llama.cpp's sampler leaves, and their probabilities.

    The probabilities follow from the logits alone, without the tokens merged for the decision.
    """
    data = (llama_cpp.llama_token_data * len(logits))(
        *[llama_cpp.llama_token_data(token, logit, 0.0) for token, logit in logits.items()]
    )
    array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    sampler = llama_cpp.llama_sampler_init_infill(vocab.handle)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    remaining = [array.data[at] for at in range(array.size)]
    if len(remaining) == 1:
        return {int(remaining[0].id): 1.0}
    max_logit = max(candidate.logit for candidate in remaining)
    weights = {int(candidate.id): math.exp(candidate.logit - max_logit) for candidate in remaining}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def apply_sampler(vocab: Vocab, logits: dict[int, float]) -> dict[int, float]:
    ids = np.fromiter(logits, dtype=np.int64)
    weights = np.exp(np.fromiter(logits.values(), dtype=np.float64) - max(logits.values()))
    distribution = infill_sampler(Distribution(ids, weights / weights.sum()), infill_rule(vocab))
    return dict(zip(distribution.ids.tolist(), distribution.probs.tolist(), strict=True))


def candidates(vocab: Vocab) -> st.SearchStrategy[dict[int, float]]:
    """Draw tokens with distinct logits, including common prefixes and ends of text."""
    ends = [token for token in range(vocab.size) if vocab.is_eog(token)]
    alike = [
        token for token in range(vocab.size) if vocab.piece(token)[:3] in (b" re", b"ret", b" r")
    ]
    tokens = st.one_of(
        st.sampled_from(ends), st.sampled_from(alike), st.integers(0, vocab.size - 1)
    )
    return st.lists(tokens, min_size=1, max_size=40, unique=True).flatmap(
        lambda ids: st.permutations([at * 0.37 - 6 for at in range(len(ids))]).flatmap(
            lambda logits: st.floats(0.1, 4.0).map(
                lambda scale: {i: scale * logit for i, logit in zip(ids, logits, strict=True)}
            )
        )
    )


def test_remaining_candidates_are_those_of_llama_cpp(vocab: Vocab) -> None:
    @given(candidates(vocab))
    def same(logits: dict[int, float]) -> None:
        assert apply_sampler(vocab, logits) == pytest.approx(
            apply_llama_cpp_sampler(vocab, logits), rel=1e-3
        )

    same()


def get_token(vocab: Vocab, text: str) -> int:
    (token_id,) = vocab.tokenize(text, add_special=False, parse_special=True)
    return token_id


def test_uncertain_model_ends_the_completion(vocab: Vocab) -> None:
    unsure = {get_token(vocab, text): 0.01 * at for at, text in enumerate('a=b(7:x+"]')}
    assert list(apply_sampler(vocab, unsure)) == [vocab.end]


def test_certain_model_continues_with_the_greedy_sampler(vocab: Vocab) -> None:
    row = np.full(vocab.size, -20.0, np.float32)
    certain = get_token(vocab, " return")
    row[certain], row[get_token(vocab, "def")] = 5.0, 3.0

    narrow = partial(infill_sampler, rule=infill_rule(vocab))
    greedy = Sampler(Settings(temperature=0.0, top_p=0.9, min_p=0.0), narrowed=narrow)
    assert greedy.sample(row, 0) == certain
    flat = np.zeros(vocab.size, np.float32)
    flat[certain] = 0.1
    assert greedy.sample(flat, 0) == vocab.end
