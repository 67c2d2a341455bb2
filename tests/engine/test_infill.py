"""Fill-in-the-middle prompts, compared with the layout of llama-server's /infill."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import localspec
from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.llama import FimTokens, Model
from localspec.engine.prompt.infill import infill_tokens, make_text_tokenizer, prompt_budget
from localspec.errors import InvalidRequest
from localspec.protocol.frames import InfillPrompt

PREFIX, SUFFIX, MIDDLE, REPO, FILE, BOS = 1001, 1002, 1003, 1004, 1005, 1000
NAMES = {PREFIX: "<P>", SUFFIX: "<S>", MIDDLE: "<M>", REPO: "<R>", FILE: "<F>", BOS: "<B>"}


@dataclass
class Vocab:
    """A vocabulary with one token per character, and the markers."""

    fim: Any
    bos: int = BOS
    add_bos: bool = False

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        assert not parse_special  # a file that contains "<fim>" is text like any other
        return [ord(char) for char in text]


def make_markers(**changed: int) -> Any:
    fields = dict.fromkeys(FimTokens.__dataclass_fields__, -1)
    fields |= {
        "prefix": PREFIX,
        "suffix": SUFFIX,
        "middle": MIDDLE,
        "repo": REPO,
        "separator": FILE,
    }
    return FimTokens(**{**fields, **changed})


def render_prompt(
    prompt: InfillPrompt,
    n_ctx: int = 4096,
    add_bos: bool = False,
    budget: int = 1 << 20,
    **changed: int,
) -> str:
    vocab = Vocab(make_markers(**changed), add_bos=add_bos)
    tokens = infill_tokens(cast(Any, vocab), prompt, n_ctx, budget)
    assert len(tokens) <= n_ctx
    return "".join(NAMES.get(token) or chr(token) for token in tokens)


def test_the_repository_comes_first_and_the_line_follows_the_prefix() -> None:
    prompt = InfillPrompt("above\n", "\nbelow", [("a.py", "x = 1\n")], "lin")
    assert render_prompt(prompt) == (
        "<R>myproject\n<F>a.py\nx = 1\n<F>filename\n<P>above\nlin<S>\nbelow<M>"
    )


def test_without_markers_for_files_they_are_snippets() -> None:
    prompt = InfillPrompt("above", "below", [("a.py", "x = 1")])
    text = render_prompt(prompt, repo=-1, separator=-1, add_bos=True)
    assert text == "\n\n--- snippet ---\n\nx = 1<B><P>above<S>below<M>"


def test_a_model_without_markers_is_named_as_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="no fill-in-the-middle tokens"):
        render_prompt(InfillPrompt("a", "b"), middle=-1)


def test_long_text_is_cut_far_from_the_cursor() -> None:
    prompt = InfillPrompt("a" * 5000 + "near", "next" + "b" * 5000, [("f", "c" * 5000)], "line")
    text = render_prompt(prompt, n_ctx=600)
    assert "nearline<S>next" in text
    assert text.endswith("b<M>")
    assert text.count("a") > 2 * text.count("b")


def test_a_small_context_has_room_for_the_end_of_the_repository() -> None:
    text = render_prompt(InfillPrompt("p", "s", [("f", "c" * 5000 + "end")]), n_ctx=1024)
    assert text.endswith("cend<F>filename\n<P>p<S>s<M>")
    assert text.count("c") > 150


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    with Model(str(Path(localspec.__file__).parent / "builtin" / "target.gguf")) as model:
        yield cast(Any, model.vocab)


SOURCE = Path(argparse.__file__).read_text(encoding="utf-8").splitlines(keepends=True)


def cut_at_cursor(
    above: str, below: str, extra: list[tuple[str, str]], n_predict: int = 128
) -> InfillPrompt:
    """Cut a buffer like llama.vim: 256 lines above, the beginning of the line, 64 lines below."""
    above, newline, line = above.rpartition("\n")
    lines_above = (above + newline).splitlines(keepends=True)[-256:]
    lines_below = below.splitlines(keepends=True)[:64]
    return InfillPrompt("".join(lines_above), "".join(lines_below), extra, line, n_predict)


def make_snippets(start: int, count: int) -> list[tuple[str, str]]:
    return [(f"{at}.py", "".join(SOURCE[at * 50 : at * 50 + 64])) for at in range(start, count)]


@pytest.mark.parametrize(("n_ctx", "pieces"), [(1024, 0), (8192, 0), (8192, 4), (8192, 16)])
@pytest.mark.parametrize("place", [300, 700])
@pytest.mark.parametrize(("budget", "batch"), [(1024, 512), (2048, 1024)])
def test_keystroke_reads_only_what_changed_and_follows_the_cursor(
    vocab: Vocab, n_ctx: int, pieces: int, place: int, budget: int, batch: int
) -> None:
    """This includes new lines, and large buffers whose window moves with the cursor."""
    above, below = "".join(SOURCE[:place]), "".join(SOURCE[place + 20 :])
    typed = "".join(SOURCE[place : place + 20])
    extra = make_snippets(0, pieces)
    remembered = make_text_tokenizer(cast(Any, vocab))
    previous: list[int] = []
    read_counts = []
    for count in range(0, len(typed), 5):
        prompt = cut_at_cursor(above + typed[:count], below, extra)
        tokens = infill_tokens(cast(Any, vocab), prompt, n_ctx, budget, remembered)
        assert len(tokens) <= n_ctx - 128
        read_counts.append(len(tokens) - common_prefix(previous, tokens))
        previous = tokens
    # As many tokens as llama-server reads with such a batch.
    keys, limit = (sorted(read_counts[1:]), batch // 4)
    assert keys[len(keys) * 9 // 10] <= limit
    assert sum(keys) <= limit * len(keys)  # the window above the cursor moves now and then


def build_like_llama_server(vocab: Any, prompt: InfillPrompt, n_batch: int) -> list[int]:
    """Build the prompt of llama-server (`format_prompt_infill`) with room for all other files.

    The text of a marker in the cursor's line stays text, unlike in llama-server.
    """

    def tokenize(text: str) -> list[int]:
        tokens: list[int] = vocab.tokenize(text, add_special=False, parse_special=False)
        return tokens

    fim = vocab.fim
    extra = [fim.repo, *tokenize("myproject\n")] if fim.repo >= 0 else []
    for name, text in [*prompt.extra, ("filename", "")]:
        if fim.separator >= 0:
            extra += [fim.separator, *tokenize(f"{name}\n")]
        elif text:
            extra += tokenize("\n\n--- snippet ---\n\n")
        extra += tokenize(text)
    bos = [vocab.bos] if vocab.add_bos else []
    line, quarter = tokenize(prompt.prompt), n_batch // 4
    prefix = tokenize(prompt.prefix)[-3 * quarter :] + line
    suffix = tokenize(prompt.suffix)[: max(quarter - 2 - len(line), 0)]
    return [*extra, *bos, fim.prefix, *prefix, fim.suffix, *suffix, fim.middle]


@given(data=st.data(), place=st.integers(0, 500), budget=st.sampled_from([1024, 2048, 4096]))
def test_prompt_near_the_file_start_is_that_of_llama_server(
    vocab: Vocab, data: st.DataObject, place: int, budget: int
) -> None:
    """They agree in every token, wherever the cursor is and however much follows it."""
    ends = ["\n", "\r\n", "\t", "日本 é", "\n\n\n", " ", "<|fim_middle|>"]
    end = data.draw(st.sampled_from(ends))
    lines = budget // 80  # as many as fit in 3/4 · budget / 2 tokens
    above = "".join(SOURCE[place : place + data.draw(st.integers(0, lines))]) + end
    below = end + "".join(SOURCE[place + lines : place + lines + data.draw(st.integers(0, 200))])
    pieces = data.draw(st.integers(0, 3))
    prompt = cut_at_cursor(
        above, below, [(name, text[:150]) for name, text in make_snippets(0, pieces)]
    )
    prefix = vocab.tokenize(prompt.prefix, add_special=False, parse_special=False)
    assume(len(prefix) <= budget // 2 * 3 // 4)
    ours = infill_tokens(cast(Any, vocab), prompt, 32768, budget)
    assert ours == build_like_llama_server(vocab, prompt, budget // 2)


def test_warm_up_has_the_tokens_of_the_next_request(vocab: Vocab) -> None:
    above, below, extra = "".join(SOURCE[:500]), "".join(SOURCE[500:]), make_snippets(0, 8)
    warm, requested = (
        infill_tokens(cast(Any, vocab), cut_at_cursor(above, below, extra, n_predict), 2048, 4096)
        for n_predict in (0, 96)
    )
    assert warm == requested


@given(
    pieces=st.integers(0, 16),
    lines=st.integers(1, 64),
    place=st.integers(0, 2000),
    above=st.integers(0, 400),
    below=st.integers(0, 400),
    typed=st.text(st.sampled_from("ab ,("), max_size=300),
    n_predict=st.sampled_from([1, 32, 128, 200]),
    n_ctx=st.sampled_from([1024, 2048, 4096, 8192]),
    budget=st.sampled_from([1024, 2048, 16384]),
)
def test_snippets_are_warmed_up_for_any_file(
    vocab: Vocab,
    pieces: int,
    lines: int,
    place: int,
    above: int,
    below: int,
    typed: str,
    n_predict: int,
    n_ctx: int,
    budget: int,
) -> None:
    """llama.vim warms up a changed ring of snippets without a file, wherever the cursor is."""
    extra = [
        (name, "".join(text.splitlines(keepends=True)[:lines]))
        for name, text in make_snippets(0, pieces)
    ]
    warm = infill_tokens(cast(Any, vocab), InfillPrompt("", "", extra, "", 0), n_ctx, budget)
    file = SOURCE[max(place - above, 0) : place], SOURCE[place : place + below]
    prompt = cut_at_cursor("".join(file[0]) + typed, "".join(file[1]), extra, n_predict)
    requested = infill_tokens(cast(Any, vocab), prompt, n_ctx, budget)
    if n_predict <= 128:  # a longer completion leaves less room for snippets
        assert common_prefix(warm, requested) >= len(warm) - 2  # all but the markers <S> and <M>
    assert len(requested) <= n_ctx - n_predict


@given(
    st.lists(st.sampled_from(["x = 1\n", "\n", "é\r\n", "def f(a):\n", "long " * 400, "\t}\n"])),
    st.lists(st.sampled_from(["return 0\n", "\n", "a" * 900, "# end"])),
    st.lists(st.tuples(st.sampled_from(["a.py", ""]), st.text(max_size=40)), max_size=5),
    st.one_of(st.text(max_size=30), st.text(st.sampled_from("ab ,"), min_size=30, max_size=3000)),
    st.integers(0, 600),
    st.sampled_from([256, 700, 1024, 4096]),
    st.sampled_from([1024, 2048, 4096]),
)
def test_prompt_surrounds_the_cursor_and_fits(
    above: list[str],
    below: list[str],
    extra: list[tuple[str, str]],
    line: str,
    n_predict: int,
    n_ctx: int,
    budget: int,
) -> None:
    prompt = InfillPrompt("".join(above), "".join(below), extra, line, min(n_predict, n_ctx // 2))
    text = render_prompt(prompt, n_ctx, budget=budget)
    assert len(text) <= n_ctx * 3  # a marker is rendered as three characters
    above_cursor, _, below_cursor = text.partition("<P>")[2].removesuffix("<M>").partition("<S>")
    # A minimum of the cursor's line, since a warm-up must leave the rest of a small context free.
    least = min(len(line), 24)
    assert above_cursor.endswith(line[len(line) - least :])
    # Nothing is left out in the middle of a long line.
    assert (prompt.prefix + line).endswith(above_cursor)
    assert prompt.suffix.startswith(below_cursor)
    if len(text) < n_ctx // 2 and len(prompt.prefix) < n_ctx // 4 and len(line) <= least:
        assert above_cursor == prompt.prefix + line


def test_prompt_budget_follows_the_prefill_speed() -> None:
    # The minimum is what plug-ins recommend for slow machines, and the maximum what users can wait for.
    assert prompt_budget(20.0) == prompt_budget(4.5) == prompt_budget(2.0) == 1024
    assert prompt_budget(1.9) == prompt_budget(1.0) == 2048
    assert prompt_budget(0.1) == prompt_budget(0.11) == 16384


@given(
    keys=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 40)), min_size=1, max_size=6),
    pieces=st.integers(0, 3),
    budget=st.sampled_from([1024, 4096]),
)
def test_cached_tokens_do_not_change_a_prompt(
    vocab: Vocab, keys: list[tuple[int, int]], pieces: int, budget: int
) -> None:
    remembered = make_text_tokenizer(cast(Any, vocab))
    for place, typed in keys:
        above = "".join(SOURCE[:place]) + SOURCE[place][:typed]
        prompt = cut_at_cursor(above, "".join(SOURCE[place:]), make_snippets(place % 5, pieces))
        fresh = infill_tokens(cast(Any, vocab), prompt, 8192, budget)
        assert infill_tokens(cast(Any, vocab), prompt, 8192, budget, remembered) == fresh


@pytest.mark.parametrize("place", [20, 300])
def test_text_sent_before_is_not_tokenized_again(vocab: Vocab, place: int) -> None:
    class CountingVocab:
        fim, bos, add_bos = vocab.fim, vocab.bos, vocab.add_bos
        characters = 0

        def tokenize(self, text: str, **options: bool) -> list[int]:
            CountingVocab.characters += len(text)
            tokens: list[int] = vocab.tokenize(text, **options)
            return tokens

    counting_vocab = cast(Any, CountingVocab())
    remembered = make_text_tokenizer(counting_vocab)
    above, below, typed = (
        "".join(SOURCE[:place]),
        "".join(SOURCE[place + 1 :]),
        "    value = list",
    )
    for count in range(len(typed)):
        characters_before = CountingVocab.characters
        prompt = cut_at_cursor(above + typed[:count], below, make_snippets(0, 4))
        infill_tokens(counting_vocab, prompt, 8192, 4096, remembered)
        if count:
            assert CountingVocab.characters - characters_before == count
