"""Where a completion ends, held against llama.cpp's own sampler on the shipped vocabulary."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec
from localspec.engine import llama
from localspec.engine.llama import Model, Vocab
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.sampler import Sampler, infill_sampler
from localspec.engine.sampling.settings import Settings


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    llama.initialise()
    model = Model(str(Path(localspec.__file__).parent / "builtin" / "target.gguf"), n_gpu_layers=0)
    yield Vocab(model)
    model.close()


def theirs(vocab: Vocab, logits: dict[int, float]) -> dict[int, float]:
    """What llama.cpp's sampler leaves of these candidates, and how likely its last one draws each: by the
    logits, in which what was merged for the decision does not count.
    """
    data = (llama_cpp.llama_token_data * len(logits))(
        *[llama_cpp.llama_token_data(token, logit, 0.0) for token, logit in logits.items()]
    )
    array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    sampler = llama_cpp.llama_sampler_init_infill(vocab._handle)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    left = [array.data[at] for at in range(array.size)]
    if len(left) == 1:
        return {int(left[0].id): 1.0}
    most = max(each.logit for each in left)
    weights = {int(each.id): math.exp(each.logit - most) for each in left}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def ours(vocab: Vocab, logits: dict[int, float]) -> dict[int, float]:
    ids = np.fromiter(logits, dtype=np.int64)
    weights = np.exp(np.fromiter(logits.values(), dtype=np.float64) - max(logits.values()))
    found = infill_sampler(
        Distribution(ids, weights / weights.sum()), vocab.is_eog, vocab.end, vocab.piece
    )
    return dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))


def candidates(vocab: Vocab) -> st.SearchStrategy[dict[int, float]]:
    """Tokens with distinct logits: alike ones, so that some begin others, and ends of text."""
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


def test_what_is_left_is_what_llama_cpp_leaves(vocab: Vocab) -> None:
    @given(candidates(vocab))
    def same(logits: dict[int, float]) -> None:
        assert ours(vocab, logits) == pytest.approx(theirs(vocab, logits), rel=1e-3)

    same()


def token(vocab: Vocab, text: str) -> int:
    (found,) = vocab.tokenize(text, add_special=False, parse_special=True)
    return found


def test_an_unsure_model_ends_the_completion(vocab: Vocab) -> None:
    unsure = {token(vocab, text): 0.01 * at for at, text in enumerate('a=b(7:x+"]')}
    assert list(ours(vocab, unsure)) == [vocab.end]


def test_a_sure_model_goes_on_and_the_greedy_sampler_takes_its_word(vocab: Vocab) -> None:
    row = np.full(vocab.size, -20.0, np.float32)
    sure = token(vocab, " return")
    row[sure], row[token(vocab, "def")] = 5.0, 3.0

    def narrowed(found: Distribution) -> Distribution:
        return infill_sampler(found, vocab.is_eog, vocab.end, vocab.piece)

    greedy = Sampler(Settings(temperature=0.0, top_p=0.9, min_p=0.0), narrowed=narrowed)
    assert greedy.sample(row, 0) == sure
    flat = np.zeros(vocab.size, np.float32)
    flat[sure] = 0.1
    assert greedy.sample(flat, 0) == vocab.end
