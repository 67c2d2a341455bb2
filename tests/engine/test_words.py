"""Texts of any shape are tokenized: no run of characters ends the process.

The tests use a separate process, since a failure would end it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from localspec.engine.llama import Model, Vocab, vocab
from localspec.engine.llama.vocab import MAX_RUN, WordSplitter
from localspec.engine.sampling.grammars.matcher import WholeMatcher
from localspec.errors import InvalidRequest
from tests.support.gguf_files import relabelled
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "localspec" / "builtin" / "draft.gguf"
CUT_BY_EXPRESSIONS = (
    "default", "tekken", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3", "youtu",
    "llama4", "minimax-m2", "exaone-moe", "poro-chat", "bloom", "viking", "falcon", "chameleon",
    "granite-embed-multi-97m", "tiny_aya", "bailingmoe", "seed-coder", "afmoe", "jais-2",
    "minicpm5", "ufakzeka", "spark2_5", "superbpe", "hunyuan-dense",
)  # fmt: skip
LOOPS = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "starcoder", "kimi-k2", "laguna", "mpt", "glm4")

READ_PROGRAM = """
import sys
from localspec.engine.llama import Model, initialise
from localspec.errors import LocalspecError
initialise()
rows = (" ", "-", "a", "A", "aB", "中", "\\u0301", "e\\u0301", "7", "\\n", "\\u3000", "/\\n", "a b ", "😀")
length, every = int(sys.argv[1]), int(sys.argv[2])
for number, path in enumerate(sys.argv[3:]):
    with Model(path, n_gpu_layers=0) as model:
        for row in rows[number % every :: every]:
            text = (row * length)[:length]
            print(path, repr(row), flush=True)
            try:
                tokens = model.vocab.tokenize(text, add_special=False, parse_special=True)
            except LocalspecError as error:
                assert "run of" in error.message
                continue
            assert b"".join(map(model.vocab.piece, tokens)).decode() == text
print("done")
"""


@pytest.fixture(scope="module")
def shipped() -> Iterator[Vocab]:
    with Model(str(SHIPPED), n_gpu_layers=0) as model:
        yield model.vocab


def assert_runs_are_read(length: int, paths: list[Path], every: int = 1) -> None:
    """Read rows of `length` characters, one in `every` of them, with each of these models."""
    run = subprocess.run(
        [sys.executable, "-c", READ_PROGRAM, str(length), str(every), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, f"ended at {lines[-1:]}: {run.stderr[-500:]}"
    assert lines[-1] == "done"


def test_long_runs_of_every_kind_are_read(tmp_path: Path) -> None:
    paths = [relabelled(SHIPPED, name, tmp_path / name) for name in ("tekken", "deepseek-v3")]
    assert_runs_are_read(30_000, paths)


def test_long_runs_are_read_by_every_pre_tokenizer(tmp_path: Path) -> None:
    paths = [relabelled(SHIPPED, name, tmp_path / name) for name in CUT_BY_EXPRESSIONS]
    assert_runs_are_read(30_000, paths, every=7)


@pytest.mark.slow
def test_a_run_as_long_as_the_longest_is_read(tmp_path: Path) -> None:
    assert_runs_are_read(MAX_RUN, [relabelled(SHIPPED, "tekken", tmp_path / "tekken")], every=7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpt-2", "tekken", "gpt-4o"])
def test_only_the_beginning_of_forced_text_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """Tokenizing all the rest at each token would delay the requests that share a pass."""
    rng = random.Random(seed)
    rows = ("\n", "a", "-", "中", "é", "😀", "word ", "7", " \t", "e\u0301")
    text = "".join(rng.choice(rows) * rng.choice((1, 3, 9_000)) for _ in range(6)) + "\n" * 20_000
    sizes, tokenize = list[int](), C.llama_tokenize

    def recording_tokenize(handle: Any, raw: Any, size: int, *more: Any) -> int:
        sizes.append(size)
        return int(tokenize(handle, raw, size, *more))

    with Model(str(relabelled(SHIPPED, name, tmp_path / name)), n_gpu_layers=0) as model:
        tokens = model.vocab.tokenize(text, add_special=False, parse_special=False)
        monkeypatch.setattr(C, "llama_tokenize", recording_tokenize)
        grammar = LLMatcher.grammar_from_lark(f"start: {json.dumps(text, ensure_ascii=False)}")
        matcher = WholeMatcher(
            LLMatcher(model.vocab.guidance_tokenizer(), grammar), model.vocab.size
        )
        for at in range(60):
            assert matcher.forced_tokens()[:4] == tokens[at : at + 4]
            assert matcher.mask().nonzero()[0].tolist() == [tokens[at]]
            matcher.consume(tokens[at])
    assert sizes
    assert max(sizes) <= vocab.MAX_FORCED_BYTES


def test_pre_tokenizers_with_loops_read_runs_of_any_length(tmp_path: Path) -> None:
    paths = [relabelled(SHIPPED, name, tmp_path / name) for name in LOOPS]
    assert_runs_are_read(100_000, paths, every=7)
    for path in paths:
        with Model(str(path), n_gpu_layers=0) as model:
            assert model.vocab._cut("a" * (2 * MAX_RUN), lambda: 7) == 7


def test_run_too_long_for_any_stack_is_refused_with_its_length() -> None:
    for text in ("a" * (MAX_RUN + 1), "x " + "\n" * (MAX_RUN + 1), "a- 7" + "-" * MAX_RUN):
        with pytest.raises(InvalidRequest, match=r"run of \d{6} characters"):
            WordSplitter("tekken", list).run(text, lambda: pytest.fail("it must not be read"))
    assert WordSplitter("tekken", list).run("word " * MAX_RUN, lambda: 7) == 7


def test_a_run_that_would_take_minutes_is_refused() -> None:
    for name, row in (("deepseek-llm", " "), ("superbpe", "7")):
        with pytest.raises(InvalidRequest, match="minutes"):
            WordSplitter(name, list).run(row * 50_000, lambda: pytest.fail("it must not be read"))
        assert WordSplitter(name, list).run(row * 2_000, lambda: 7) == 7


def test_slow_texts_are_estimated_in_advance(shipped: Vocab) -> None:
    cutter = WordSplitter("gpt-4o", lambda: ["<|end|>"])
    assert cutter.estimate_s("word " * 1000) < 0.1
    assert cutter.estimate_s("<|end|>x" * 1000) > 1
    assert shipped.estimate_s("word " * 1000) < 0.1
    assert shipped.estimate_s("word " * 1_000_000) > 1


@given(text=st.text(max_size=200), repeats=st.integers(1, 3000))
def test_min_tokens_is_a_lower_bound(shipped: Vocab, text: str, repeats: int) -> None:
    full_text = text * repeats
    tokens = shipped.tokenize(full_text, add_special=False, parse_special=True)
    assert shipped.min_tokens(full_text) <= len(tokens)


def test_min_tokens_of_a_long_text_is_large(shipped: Vocab) -> None:
    assert shipped.min_tokens("word " * 1_000_000) > 5000


def test_without_room_for_a_stack_the_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def fail_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    with pytest.raises(InvalidRequest, match="memory for them"):
        WordSplitter("tekken", list).run("a" * 100_000, lambda: 7)


def test_error_on_a_deep_stack_reaches_the_caller() -> None:
    def fail() -> int:
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        WordSplitter("tekken", list).run("a" * 100_000, fail)
