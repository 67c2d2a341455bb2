"""Matching tokenizers: synthetic pairs that differ in one thing, and real vocabularies."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from localspec.registry.gguf import FileSource, read_header
from localspec.registry.tokenizer import Verdict, compare, read_vocabulary
from tests.support.gguf_files import ARRAY, BOOL, STRING, U32, Gguf, model

VOCABULARIES = Path(__file__).parents[2].parent / "shared" / "vocabs"
real = pytest.mark.skipif(
    not VOCABULARIES.is_dir(), reason="no folder of real vocabularies beside the checkout"
)
NAMES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35")
# Why each pair of different real vocabularies does not match.
REASONS = {
    ("gpt-2", "llama-bpe"): "the pre-tokenizer is 'gpt-2' in the target and 'llama-bpe'",
    ("gpt-2", "qwen2"): "the pre-tokenizer is 'gpt-2' in the target and 'qwen2'",
    ("gpt-2", "qwen35"): "the pre-tokenizer is 'gpt-2' in the target and 'qwen35'",
    ("llama-bpe", "qwen2"): "the pre-tokenizer is 'llama-bpe' in the target and 'qwen2'",
    ("llama-bpe", "qwen35"): "the pre-tokenizer is 'llama-bpe' in the target and 'qwen35'",
    ("qwen2", "qwen35"): "the pre-tokenizer is 'qwen2' in the target and 'qwen35'",
    ("llama-spm", "phi-3"): "the end token is 2 in the target and 32000 in the draft",
}
KIND = "the kind of tokenizer is '"


def judge(target: Gguf, draft: Gguf, folder: Path) -> Verdict:
    files = [target.write(folder / "target.gguf"), draft.write(folder / "draft.gguf")]
    ours, theirs = (read_vocabulary(read_header(FileSource(file))) for file in files)
    return compare(ours, theirs)


def test_a_tokenizer_matches_itself(tmp_path: Path) -> None:
    assert judge(model(seed=1), model(seed=2), tmp_path) == Verdict(True, "", ())


BASE = model()
TWO_FLAGS = "tokenizer.ggml.add_bos_token"


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (BASE.put("tokenizer.ggml.model", STRING, "llama"), "the kind of tokenizer is 'gpt2'"),
        (BASE.put("tokenizer.ggml.pre", STRING, "qwen35"), "the pre-tokenizer is 'qwen2'"),
        (BASE.put(TWO_FLAGS, BOOL, True), "add_bos_token is false in the target and true"),
        (BASE.put("tokenizer.ggml.add_eos_token", BOOL, True), "add_eos_token is false"),
        (
            BASE.put("tokenizer.ggml.bos_token_id", U32, 9),
            "the begin token is 1 in the target and 9",
        ),
        (BASE.put("tokenizer.ggml.eos_token_id", U32, 9), "the end token is 2 in the target and 9"),
        (BASE.token(299, "other"), "token 299 is 't299' in the target and 'other' in the draft"),
        (BASE.token(5, "other"), "token 5 is 't5' in the target and 'other'"),
        (BASE.type(299, 3), "token 299 is of type normal in the target and control"),
        (model(tokens=429), "the target has 300 tokens and the draft 429"),
        (BASE.drop("tokenizer.ggml.merges"), "only one of the two files lists merges"),
        (BASE.drop("tokenizer.ggml.token_type"), "only one of the two files states the types"),
        (BASE.put("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"])), "merge 0 is 'a0 b0'"),
    ],
)
def test_one_difference_is_named(draft: Gguf, says: str, tmp_path: Path) -> None:
    verdict = judge(BASE, draft, tmp_path)
    assert not verdict.matched
    assert verdict.reason.startswith("not a matched pair: ")
    assert says in verdict.reason


def test_fewer_merges_are_a_difference(tmp_path: Path) -> None:
    merges = [f"a{index} b{index}" for index in range(100)]
    verdict = judge(BASE, BASE.put("tokenizer.ggml.merges", ARRAY, (STRING, merges)), tmp_path)
    assert "150 merges and the draft 100" in verdict.reason


def test_what_llama_cpp_allows_is_noted(tmp_path: Path) -> None:
    """Sizes within 128 (padding), and texts below token 5."""
    bigger = model(tokens=428).put("tokenizer.ggml.merges", *BASE.metadata["tokenizer.ggml.merges"])
    verdict = judge(bigger, BASE.token(3, "other"), tmp_path)
    assert verdict.matched
    assert "428 tokens and the draft 300" in verdict.notes[0]
    assert "token 3 differs" in verdict.notes[1]


def test_converters_habits_are_no_difference(tmp_path: Path) -> None:
    """Control against user-defined; another padding token; an end token the target has too."""
    assert judge(BASE.type(50, 3), BASE.type(50, 4), tmp_path).matched
    padded = BASE.put("tokenizer.ggml.padding_token_id", U32, 7)
    verdict = judge(padded, BASE.put("tokenizer.ggml.padding_token_id", U32, 8), tmp_path)
    assert verdict.notes == ("the padding token is 7 in the target and 8 in the draft",)
    instruct = BASE.put("tokenizer.ggml.eot_token_id", U32, 9)
    verdict = judge(instruct, BASE.put("tokenizer.ggml.eos_token_id", U32, 9), tmp_path)
    assert verdict.matched
    assert verdict.notes == ("the end token is 2 in the target and 9 in the draft",)


def test_a_flag_left_out_means_llama_cpps_default(tmp_path: Path) -> None:
    """llama-bpe adds a begin token unless told otherwise; qwen2 does not."""
    llama = BASE.put("tokenizer.ggml.pre", STRING, "llama-bpe")
    assert judge(llama, llama.put(TWO_FLAGS, BOOL, True), tmp_path).matched
    assert not judge(llama, llama.put(TWO_FLAGS, BOOL, False), tmp_path).matched
    assert judge(BASE, BASE.put(TWO_FLAGS, BOOL, False), tmp_path).matched


@real
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(NAMES, NAMES)))
def test_every_real_vocabulary_against_every_other(ours: str, theirs: str) -> None:
    begin = time.perf_counter()
    files = (VOCABULARIES / f"ggml-vocab-{name}.gguf" for name in (ours, theirs))
    target, draft = (read_vocabulary(read_header(FileSource(file))) for file in files)
    verdict = compare(target, draft)
    seconds = time.perf_counter() - begin
    assert verdict.matched == (ours == theirs)
    if ours < theirs:
        assert REASONS.get((ours, theirs), KIND) in verdict.reason
    elif ours > theirs:
        assert verdict.reason
    assert seconds < 1, "two vocabularies of 150 000 tokens, headers and all"
