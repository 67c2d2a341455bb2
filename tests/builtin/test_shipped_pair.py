"""The pair inside the package is small, matched, and good at its one task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

import localspec
from builtin_pair.evaluate import HONEST_MARK, Agreement, Pair, Report, evaluate

BUILTIN = Path(localspec.__file__).parent / "builtin"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    opened = Pair(BUILTIN)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def short_report() -> Report:
    return evaluate(BUILTIN, short=True)


def parameters(path: Path) -> int:
    return sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors)


def test_both_files_together_stay_below_40_mb() -> None:
    assert sum(path.stat().st_size for path in BUILTIN.glob("*.gguf")) <= 40_000_000


def test_draft_has_at_most_a_tenth_of_the_targets_parameters() -> None:
    assert 10 * parameters(BUILTIN / "draft.gguf") <= parameters(BUILTIN / "target.gguf")


def test_target_and_draft_have_the_same_tokenizer() -> None:
    target, draft = (gguf.GGUFReader(BUILTIN / f"{role}.gguf") for role in ("target", "draft"))
    keys = [key for key in target.fields if key.startswith("tokenizer.")]
    assert "tokenizer.chat_template" in keys
    assert "tokenizer.ggml.fim_pre_token_id" in keys
    for key in keys:
        assert target.fields[key].contents() == draft.fields[key].contents(), key


def test_the_pair_explains_copytree(pair: Pair) -> None:
    answer = pair.ask("What does shutil.copytree do?", Agreement())
    assert "directory tree" in answer
    assert answer.startswith("`shutil.copytree()`")


@pytest.mark.parametrize("question", ["What is the capital of Sweden?", "Who was Mozart?"])
def test_the_pair_declines_other_questions(pair: Pair, question: str) -> None:
    assert HONEST_MARK in pair.ask(question, Agreement())


def test_short_evaluation_stays_above_its_floor(short_report: Report) -> None:
    """The floors are below the figures of the model card, because the sample is small."""
    assert short_report.questions.share >= 0.7, short_report.questions.misses
    assert short_report.outside.share >= 0.75, short_report.outside.misses
    assert short_report.on_questions.rate() >= 0.75


def test_short_evaluation_of_code_stays_above_its_floor(short_report: Report) -> None:
    if not short_report.parse.total:
        pytest.skip("this Python's standard library has other lines where the holes are")
    assert short_report.parse.share >= 0.6, short_report.parse.misses
    assert short_report.on_code.rate() >= 0.5
