"""Headers of every kind, and headers edited at random: our reading and verdict agree with llama.cpp's."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest

from localspec.compatibility import MIN_COVERAGE, compare_tokenizers
from localspec.engine import llama
from localspec.registry.header.gguf import FileSource, read_header
from localspec.registry.header.vocabulary import Vocabulary, read_vocabulary
from tests.support.gguf_files import ARRAY, BOOL, STRING, U32, Gguf, model
from tests.support.vocabularies import NAMES, SOURCES, files_of

llama.initialise()
BASE = model()
PRE = ("qwen2", "llama-bpe", "tekken", "glm4", "gemma4", "gpt-2", "deepseek-r1-qwen", "chameleon")
IDS = ("bos", "eos", "eot", "padding", "unknown")


def edit_at_random(rng: random.Random) -> Gguf:
    """Return BASE with up to three changes of the kinds that converters and fine-tuners make."""
    file = BASE
    for _ in range(rng.randint(0, 3)):
        key = f"tokenizer.ggml.{rng.choice(IDS)}_token_id"
        index = rng.randrange(len(file.metadata["tokenizer.ggml.tokens"][1][1]))  # type: ignore[index]
        edits: list[Callable[[Gguf], Gguf]] = [
            lambda f: f.put("tokenizer.ggml.pre", STRING, rng.choice(PRE)),
            lambda f: f.put("tokenizer.ggml.model", STRING, rng.choice(("gpt2", "gemma4"))),
            lambda f: f.put("tokenizer.ggml.add_bos_token", BOOL, rng.random() < 0.5),
            lambda f: f.put("tokenizer.ggml.add_eos_token", BOOL, rng.random() < 0.5),
            lambda f, k=key: f.put(k, U32, rng.choice((0, 1, 2, 9, 299))),  # type: ignore[misc]
            lambda f, k=key: f.drop(k),  # type: ignore[misc]
            lambda f, a=index: f.token(a, f"other {a}"),  # type: ignore[misc]
            lambda f, a=index: f.type(a, rng.choice((1, 3, 4, 5))),  # type: ignore[misc]
            lambda f: f.put("tokenizer.ggml.merges", ARRAY, (STRING, ["a b", "t 1"])),
            lambda _: model(tokens=rng.choice((100, 171, 172, 299, 301, 428, 429, 600))),
        ]
        file = rng.choice(edits)(file)
    return file


class Loaded:
    """A vocabulary loaded by llama.cpp."""

    def __init__(self, path: Path) -> None:
        params = C.llama_model_default_params()
        params.vocab_only = True
        self.model = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.model, f"llama.cpp cannot read {path}"
        self.vocab = C.llama_model_get_vocab(self.model)

    def close(self) -> None:
        C.llama_model_free(self.model)


def judge_like_llama_cpp(target: Loaded, draft: Loaded) -> bool:
    """Return the verdict of common_speculative_are_compatible, by the library's own functions."""

    def differ(function: Any) -> bool:
        return bool(function(target.vocab) != function(draft.vocab))

    if differ(C.llama_vocab_type) or differ(C.llama_vocab_get_add_bos):
        return False
    if differ(C.llama_vocab_get_add_eos):
        return False
    if C.llama_vocab_get_add_bos(target.vocab) and differ(C.llama_vocab_bos):
        return False
    if C.llama_vocab_get_add_eos(target.vocab) and differ(C.llama_vocab_eos):
        return False
    sizes = [C.llama_vocab_n_tokens(side.vocab) for side in (target, draft)]
    if abs(sizes[0] - sizes[1]) > 128:
        return False
    text = C.llama_vocab_get_text
    return all(text(target.vocab, i) == text(draft.vocab, i) for i in range(5, min(sizes)))


@pytest.mark.parametrize("seed", range(4))
def test_verdicts_on_edited_headers_agree_with_llama_cpp(seed: int, tmp_path: Path) -> None:
    """We are never stricter than llama.cpp, and more lenient only in which ids both must share."""
    rng = random.Random(seed)
    accepted = lenient = refused = 0
    for _ in range(60):
        paths = [
            edit_at_random(rng).write(tmp_path / name) for name in ("target.gguf", "draft.gguf")
        ]
        ours = [read_vocabulary(read_header(FileSource(path))).tokenizer for path in paths]
        verdict = compare_tokenizers(ours[0], ours[1])
        loaded = [Loaded(path) for path in paths]
        try:
            for mine, llama_vocabulary in zip(ours, loaded, strict=True):
                assert mine.add_bos == C.llama_vocab_get_add_bos(llama_vocabulary.vocab)
                assert mine.add_eos == C.llama_vocab_get_add_eos(llama_vocabulary.vocab)
                assert (-1 if mine.bos is None else mine.bos) == C.llama_vocab_bos(
                    llama_vocabulary.vocab
                )
            compatible = judge_like_llama_cpp(*loaded)
        finally:
            for vocabulary in loaded:
                vocabulary.close()
        if compatible:
            assert verdict.usable, verdict.reason
            accepted += 1
        elif verdict.usable:
            assert verdict.coverage >= MIN_COVERAGE
            assert verdict.note
            lenient += 1
        else:
            refused += 1
    assert min(accepted, lenient, refused) >= 5, "edits of every outcome"


# Words, digits, indentation, letters without a token of their own, and a code point above 16 bits.
TEXT = "def read(self, size=1024):\n        return self.file.read(size)  # é ß 漢字 👀\n\n\t3.14 isn't <s>"


@pytest.fixture(scope="module", params=SOURCES)
def vocabularies(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Vocabulary, Loaded]]]:
    """Yield one vocabulary of each kind, as we read its header and as llama.cpp loads it."""
    files = files_of(request.param, tmp_path_factory.mktemp("vocabularies"))
    ours = {name: read_vocabulary(read_header(FileSource(file))) for name, file in files.items()}
    loaded = {name: Loaded(file) for name, file in files.items()}
    yield {name: (ours[name], loaded[name]) for name in NAMES}
    for vocabulary in loaded.values():
        vocabulary.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_is_read_as_llama_cpp_reads_it(
    name: str, vocabularies: dict[str, tuple[Vocabulary, Loaded]]
) -> None:
    vocabulary, loaded = vocabularies[name]
    ours, theirs = vocabulary.tokenizer, loaded.vocab
    assert len(ours.texts) == C.llama_vocab_n_tokens(theirs)
    texts = [C.llama_vocab_get_text(theirs, index) for index in range(len(ours.texts))]
    assert list(ours.texts) == texts
    assert (
        ours.kind
        == {C.LLAMA_VOCAB_TYPE_SPM: "spm", C.LLAMA_VOCAB_TYPE_BPE: "bpe"}[
            C.llama_vocab_type(theirs)
        ]
    )
    assert (ours.bos, ours.eos) == (C.llama_vocab_bos(theirs), C.llama_vocab_eos(theirs))
    assert ours.add_bos == C.llama_vocab_get_add_bos(theirs)
    assert ours.add_eos == C.llama_vocab_get_add_eos(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_learnt_vocabulary_tokenizes_text_as_a_models_does(
    name: str, vocabularies: dict[str, tuple[Vocabulary, Loaded]]
) -> None:
    """A vocabulary whose merges llama.cpp cannot use would be no substitute for a model's."""
    vocab, data = vocabularies[name][1].vocab, TEXT.encode()
    tokens = (C.llama_token * len(data))()
    count = C.llama_tokenize(vocab, data, len(data), tokens, len(data), False, False)
    assert 10 < count < 0.7 * len(TEXT)
    room = ctypes.create_string_buffer(2 * len(data))
    length = C.llama_detokenize(vocab, tokens, count, room, len(room), False, True)
    assert room.raw[:length].decode().lstrip() == TEXT


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.permutations(NAMES, 2)))
def test_pairs_match_exactly_when_llama_cpp_accepts_them(
    ours: str, theirs: str, vocabularies: dict[str, tuple[Vocabulary, Loaded]]
) -> None:
    target, draft = vocabularies[ours], vocabularies[theirs]
    usable = compare_tokenizers(target[0].tokenizer, draft[0].tokenizer).usable
    assert usable == judge_like_llama_cpp(target[1], draft[1])
