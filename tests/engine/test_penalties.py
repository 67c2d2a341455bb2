"""DRY and its sequence breakers agree with llama.cpp's own sampler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec
from localspec.engine import llama
from localspec.engine.llama import Logits, Model, Vocab
from localspec.engine.sampling.distribution import MAX_DRY_PENALTY, BreakerTable
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.errors import InvalidRequest
from localspec.protocol.frames import PairFiles

# Breakers of one and of several characters, some that few tokens end with, one longer than llama.cpp
# takes, and some that it ignores.
BREAKERS = ["\n", ":", '"', "*", "\n\n", ", and", "return x", " =", "é", "日本", "w12", "12 w3"]
BREAKERS += ["x" * 60, "", "\0", "a\0b"]
OFF = Settings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, dry_multiplier=0.5)


@pytest.fixture(scope="module", params=["shipped", "synthetic"])
def vocab(request: pytest.FixtureRequest, contextual_files: PairFiles) -> Vocab:
    llama.initialise()
    shipped = str(Path(localspec.__file__).parent / "builtin" / "target.gguf")
    return Vocab(Model(shipped if request.param == "shipped" else contextual_files.target))


def make_breaker_table(vocab: Vocab) -> BreakerTable:
    return BreakerTable(lambda: vocab.words, vocab.tokenize_piece)


def apply_llama_cpp_dry(
    vocab: Vocab, row: Logits, history: Sequence[int], settings: Settings
) -> list[float]:
    """Return the row after llama.cpp's sampler."""
    raw = [text.encode() for text in settings.dry_sequence_breakers]
    texts = (ctypes.c_char_p * max(len(raw), 1))(*raw)
    last_n = settings.dry_penalty_last_n
    sampler = llama_cpp.llama_sampler_init_dry(
        vocab.handle,
        settings.dry_multiplier,
        settings.dry_base,
        settings.dry_allowed_length,
        len(history) + 1 if last_n < 0 else last_n,
        texts,
        len(raw),
    )
    for token in history:
        llama_cpp.llama_sampler_accept(sampler, token)
    data = (llama_cpp.llama_token_data * len(row))(
        *[llama_cpp.llama_token_data(token, float(value), 0.0) for token, value in enumerate(row)]
    )
    array = llama_cpp.llama_token_data_array(data, len(row), -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    return [array.data[at].logit for at in range(array.size)]


def list_history_tokens(vocab: Vocab, breakers: Sequence[str]) -> list[int]:
    """Return the tokens for a history of breakers and repeats."""
    tokens = vocab.tokenize("a return x = w12 w3, and: b\n", add_special=False, parse_special=False)
    for breaker in breakers:
        text = "m" + breaker.partition("\0")[0] + "n"
        tokens += vocab.tokenize(text, add_special=False, parse_special=False)
    return sorted(set(tokens))


@st.composite
def cases(draw: st.DrawFn, vocab: Vocab) -> tuple[list[int], Settings]:
    breakers = draw(st.lists(st.sampled_from(BREAKERS), max_size=4))
    pool = draw(
        st.lists(st.sampled_from(list_history_tokens(vocab, breakers)), min_size=1, max_size=6)
    )
    history = draw(st.lists(st.sampled_from(pool), max_size=40))
    for breaker in breakers:  # whole breakers, as tokenized
        breaker_tokens = vocab.tokenize(breaker, add_special=False, parse_special=False)
        at = draw(st.integers(0, len(history)))
        history[at:at] = breaker_tokens
    settings = Settings(
        temperature=1.0,
        dry_multiplier=draw(st.sampled_from([0.1, 0.8, 100.0])),
        dry_base=draw(st.sampled_from([1.0, 1.0000001, 1.75, 100.0])),
        dry_allowed_length=draw(st.sampled_from([0, 1, 2, 3, 2**31 - 1])),
        dry_penalty_last_n=draw(st.sampled_from([-1, 0, 1, 2, 5, 20, 1000])),
        dry_sequence_breakers=tuple(breakers),
    )
    return history * draw(st.sampled_from([1, 1, 3])), settings


def test_dry_penalties_are_those_of_llama_cpp(vocab: Vocab) -> None:
    table = make_breaker_table(vocab)
    row = np.random.default_rng(1).normal(0, 3, vocab.size).astype(np.float32)

    @given(cases(vocab))
    def same(case: tuple[list[int], Settings]) -> None:
        history, settings = case
        sampler = Sampler(settings, breakers=table.find(settings.dry_sequence_breakers))
        ours = sampler.adjusted(row, history)
        expected = np.maximum(
            apply_llama_cpp_dry(vocab, row, history, settings), row - np.float32(MAX_DRY_PENALTY)
        )
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)

    same()


def test_breaker_that_continues_a_repeat_is_not_penalized(vocab: Vocab) -> None:
    a, b, line = (
        vocab.tokenize(text, add_special=False, parse_special=False)[-1]
        for text in ("a", "b", "\n")
    )
    history = [a, b, line, a, b]
    row = np.zeros(vocab.size, dtype=np.float32)
    with_breaker = Sampler(OFF, breakers=make_breaker_table(vocab).find(("\n",))).adjusted(
        row, history
    )
    assert with_breaker[line] == 0.0
    without = Sampler(OFF).adjusted(row, history)
    assert without[line] == -0.5


def test_a_breaker_of_several_tokens_ends_a_repeat(vocab: Vocab) -> None:
    words = [token for token in range(vocab.size) if vocab.piece(token).strip().isalnum()]
    x, y, head, second = words[10], words[20], words[30], words[40]
    breaker = (vocab.words[head] + vocab.piece(second)).decode()
    breakers = make_breaker_table(vocab).find((breaker,))
    assert any(tail for tail in breakers[head])
    tail = max(breakers[head], key=len)
    history = [x, y, head, *tail, x, y, head, *tail]
    row = np.zeros(vocab.size, dtype=np.float32)
    assert Sampler(OFF).adjusted(row, history)[x] < 0.0
    assert Sampler(OFF, breakers=breakers).adjusted(row, history)[x] == 0.0


def test_invalid_unicode_in_a_breaker_is_refused(vocab: Vocab) -> None:
    with pytest.raises(InvalidRequest, match="Unicode") as caught:
        make_breaker_table(vocab).find(("a\ud800",))
    assert caught.value.param == "dry_sequence_breakers"


def test_looking_back_further_than_any_text_costs_nothing(vocab: Vocab) -> None:
    """llama.cpp would allocate memory for each token of the span."""
    row = np.zeros(vocab.size, dtype=np.float32)
    history = [3, 4, 5, 3, 4]
    rows = []
    for last_n in (-1, 2**31 - 1):
        settings = Settings(dry_multiplier=1.0, dry_penalty_last_n=last_n, repeat_last_n=last_n)
        rows.append(Sampler(settings).adjusted(row, history).tolist())
    assert rows[0] == rows[1]
