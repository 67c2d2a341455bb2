"""DRY and its sequence breakers agree with llama.cpp's own sampler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import localspec
from localspec.engine import llama
from localspec.engine.llama import Logits, Model, Vocab
from localspec.engine.sampling.penalties import MAX_DRY_PENALTY, BreakerTable
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
        vocab.tokenize(text, add_special=False, parse_special=False)[-1] for text in "ab\n"
    )
    row, history = np.zeros(vocab.size, dtype=np.float32), [a, b, line, a, b]
    breakers = make_breaker_table(vocab).find(("\n",))
    assert Sampler(OFF, breakers=breakers).adjusted(row, history)[line] == 0.0
    assert Sampler(OFF).adjusted(row, history)[line] == -0.5


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


small = st.integers(0, 3)
# Texts with long repeats, and with none.
texts = st.lists(small, max_size=30) | st.builds(
    lambda part, count: part * count, st.lists(small, max_size=6), st.integers(1, 200)
)
drafts = st.lists(small, max_size=8)
penalty_settings = st.builds(
    Settings,
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    repeat_last_n=st.sampled_from([-1, 0, 3, 64, 513, 600]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.1]),
    presence_penalty=st.sampled_from([0.0, 0.3]),
    dry_multiplier=st.sampled_from([0.8, 100.0]),
    dry_base=st.sampled_from([1.0, 1.0000001, 1.01, 1.75]),
    dry_allowed_length=st.sampled_from([0, 1, 2, 5]),
    dry_penalty_last_n=st.sampled_from([-1, 0, 1, 7, 50, 700]),
)
# Breakers of one to three tokens, some of which begin alike.
breaker_tables = st.dictionaries(
    small, st.lists(st.lists(small, max_size=2), max_size=2), max_size=2
)


@settings(max_examples=400)
@given(
    penalty_settings,
    breaker_tables,
    texts,
    st.lists(st.tuples(drafts, drafts, st.integers(0, 8)), max_size=8),
)
def test_penalties_of_a_growing_text_are_those_of_the_whole(
    chosen: Settings,
    breakers: dict[int, list[list[int]]],
    text: list[int],
    rounds: list[tuple[list[int], list[int], int]],
) -> None:
    """Each round drafts, tries other drafts one by one, keeps some of them, and adds a token of its own."""
    sampler = Sampler(chosen, breakers=breakers)
    row = np.random.default_rng(1).normal(0, 3, 4).astype(np.float32)

    def check(drafted: list[int]) -> None:
        expected = Sampler(chosen, breakers=breakers).adjusted(row, text + drafted)
        adjusted = sampler.adjusted(row, text, drafts=drafted)
        assert adjusted.tobytes() == expected.tobytes(), (text, drafted)

    check([])
    for first, tried, n_kept in rounds:
        for size in range(len(first)):
            check(first[:size])
        for size in range(len(tried) + 1):
            check(tried[:size])
        text += [*tried[:n_kept], n_kept % 4]
    check([])
    text = list(text)  # Another list is read anew.
    check([])


def test_pictures_are_not_counted() -> None:
    chosen = Settings(repeat_penalty=1.5, frequency_penalty=0.5, dry_multiplier=1.0)
    row = np.arange(1, 6, dtype=np.float32)
    expected = Sampler(chosen).adjusted(row, [1, 2, 3, 1, 2])
    sampler, text = Sampler(chosen), [1, -5, -6, 2, 3, -7]
    sampler.adjusted(row, text)
    text += [-8, 1]
    assert sampler.adjusted(row, text, drafts=[2]).tolist() == expected.tolist()
