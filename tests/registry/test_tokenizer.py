"""Matching tokenizers: synthetic pairs that differ in one thing, and vocabularies of every kind."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from localspec.registry.header import pairing
from localspec.registry.header.gguf import FileSource, read_header
from localspec.registry.header.pairing import Verdict
from localspec.registry.header.vocabulary import Vocabulary, read_vocabulary
from tests.support.gguf_files import ARRAY, BOOL, STRING, U32, Gguf, model
from tests.support.vocabularies import NAMES, SOURCES, files_of

# The notes on vocabularies of different kinds that match. Qwen's two split text differently into the same
# tokens; Phi 3 is Llama 2 with 64 more tokens; all others number their tokens differently.
MATCHED = {
    ("qwen2", "qwen35"): "the pre-tokenizer is 'qwen2' in the target and 'qwen35' in the draft",
    ("qwen35", "qwen2"): "the pre-tokenizer is 'qwen35' in the target and 'qwen2' in the draft",
    ("llama-spm", "phi-3"): "the target has {ours} tokens and the draft {theirs}",
    ("phi-3", "llama-spm"): "the target has {ours} tokens and the draft {theirs}",
}
REASONS = ("the kind of tokenizer is", "add_bos_token is", "; the draft knows")


def judge(target: Gguf, draft: Gguf, folder: Path) -> Verdict:
    files = [target.write(folder / "target.gguf"), draft.write(folder / "draft.gguf")]
    ours, theirs = (read_vocabulary(read_header(FileSource(file))) for file in files)
    return pairing.judge_vocabularies(ours, theirs)


def test_a_tokenizer_matches_itself(tmp_path: Path) -> None:
    assert judge(model(seed=1), model(seed=2), tmp_path) == Verdict(True, "", ())


BASE = model()
ADDS_BOS = BASE.put("tokenizer.ggml.add_bos_token", BOOL, True)
ADD_BOS_KEY = "tokenizer.ggml.add_bos_token"


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (BASE, BASE.put("tokenizer.ggml.model", STRING, "llama"), "the kind of tokenizer is 'bpe'"),
        (BASE, ADDS_BOS, "add_bos_token is false in the target and true"),
        (BASE, BASE.put("tokenizer.ggml.add_eos_token", BOOL, True), "add_eos_token is false"),
        (
            ADDS_BOS,
            ADDS_BOS.put("tokenizer.ggml.bos_token_id", U32, 9),
            "the begin token is 1 in the target and 9",
        ),
        (BASE, model(tokens=40), "the target has 300 tokens and the draft 40; the draft knows 24%"),
    ],
)
def test_a_mismatch_is_named(target: Gguf, draft: Gguf, message: str, tmp_path: Path) -> None:
    verdict = judge(target, draft, tmp_path)
    assert not verdict.matched
    assert verdict.reason.startswith("not a matched pair: ")
    assert message in verdict.reason


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (BASE.put("tokenizer.ggml.pre", STRING, "qwen35"), "the pre-tokenizer is 'qwen2' in"),
        (BASE.put("tokenizer.ggml.bos_token_id", U32, 9), "the bos token is 1 in the target and 9"),
        (BASE.put("tokenizer.ggml.eos_token_id", U32, 9), "the eos token is 2 in the target and 9"),
        (BASE.token(299, "other"), "token 299 is 't299' in the target and 'other' in the draft"),
        (BASE.token(5, "other"), "token 5 is 't5' in the target and 'other'"),
        (BASE.type(299, 3), "token 299 is of type normal in the target and control"),
        (BASE.type(299, 5), "token 299 is of type normal in the target and unused"),
        (model(tokens=429), "the target has 300 tokens and the draft 429"),
        (BASE.drop("tokenizer.ggml.merges"), "only one of the two files lists merges"),
        (BASE.drop("tokenizer.ggml.token_type"), "only one of the two files declares the types"),
        (BASE.put("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"])), "the merges of the two"),
    ],
)
def test_a_difference_in_tokenizing_alone_is_a_note(
    draft: Gguf, message: str, tmp_path: Path
) -> None:
    """Only the target tokenizes, so these differences in a draft cost acceptance at most."""
    verdict = judge(BASE, draft, tmp_path)
    assert verdict.matched, verdict.reason
    assert any(message in note for note in verdict.notes)


def test_aliases_of_one_pre_tokenizer_match(tmp_path: Path) -> None:
    target, draft = (
        BASE.put("tokenizer.ggml.pre", STRING, name) for name in ("qwen2", "deepseek-r1-qwen")
    )
    assert judge(target, draft, tmp_path) == Verdict(True, "", ())


def test_a_missing_flag_means_llama_cpps_default(tmp_path: Path) -> None:
    """llama-bpe adds a begin token by default; qwen2 does not."""
    llama = BASE.put("tokenizer.ggml.pre", STRING, "llama-bpe")
    assert judge(llama, llama.put(ADD_BOS_KEY, BOOL, True), tmp_path).matched
    assert not judge(llama, llama.put(ADD_BOS_KEY, BOOL, False), tmp_path).matched
    assert judge(BASE, BASE.put(ADD_BOS_KEY, BOOL, False), tmp_path).matched


@pytest.fixture(scope="module", params=SOURCES)
def vocabularies(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Vocabulary]:
    files = files_of(request.param, tmp_path_factory.mktemp("vocabularies"))
    return {name: read_vocabulary(read_header(FileSource(file))) for name, file in files.items()}


@pytest.mark.parametrize(("target_name", "draft_name"), list(itertools.product(NAMES, NAMES)))
def test_every_vocabulary_against_every_other(
    target_name: str, draft_name: str, vocabularies: dict[str, Vocabulary]
) -> None:
    target, draft = vocabularies[target_name], vocabularies[draft_name]
    verdict = pairing.judge_vocabularies(target, draft)
    if target_name == draft_name:
        assert verdict == Verdict(True, "", ())
    elif (target_name, draft_name) in MATCHED:
        assert verdict.matched
        message = MATCHED[target_name, draft_name].format(
            ours=len(target.tokens), theirs=len(draft.tokens)
        )
        assert any(note.startswith(message) for note in verdict.notes)
    else:
        assert not verdict.matched
        assert any(message in verdict.reason for message in REASONS)
