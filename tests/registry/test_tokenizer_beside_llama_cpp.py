"""Headers edited at random: our verdict beside llama.cpp's rule over what llama.cpp itself read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest

from localspec.compatibility import MIN_COVERAGE, compare
from localspec.engine import llama
from localspec.registry.header.gguf import FileSource, read_header
from localspec.registry.header.vocabulary import read_vocabulary
from tests.support.gguf_files import ARRAY, BOOL, STRING, U32, Gguf, model

llama.initialise()
BASE = model()
PRE = ("qwen2", "llama-bpe", "tekken", "glm4", "gemma4", "gpt-2", "deepseek-r1-qwen", "chameleon")
IDS = ("bos", "eos", "eot", "padding", "unknown")


def edited(dice: random.Random) -> Gguf:
    """BASE with up to three changes of the kinds that converters and fine-tuners make."""
    file = BASE
    for _ in range(dice.randint(0, 3)):
        key = f"tokenizer.ggml.{dice.choice(IDS)}_token_id"
        at = dice.randrange(len(file.metadata["tokenizer.ggml.tokens"][1][1]))  # type: ignore[index]
        edits: list[Callable[[Gguf], Gguf]] = [
            lambda f: f.put("tokenizer.ggml.pre", STRING, dice.choice(PRE)),
            lambda f: f.put("tokenizer.ggml.model", STRING, dice.choice(("gpt2", "gemma4"))),
            lambda f: f.put("tokenizer.ggml.add_bos_token", BOOL, dice.random() < 0.5),
            lambda f: f.put("tokenizer.ggml.add_eos_token", BOOL, dice.random() < 0.5),
            lambda f, k=key: f.put(k, U32, dice.choice((0, 1, 2, 9, 299))),  # type: ignore[misc]
            lambda f, k=key: f.drop(k),  # type: ignore[misc]
            lambda f, a=at: f.token(a, f"other {a}"),  # type: ignore[misc]
            lambda f, a=at: f.type(a, dice.choice((1, 3, 4, 5))),  # type: ignore[misc]
            lambda f: f.put("tokenizer.ggml.merges", ARRAY, (STRING, ["a b", "t 1"])),
            lambda _: model(tokens=dice.choice((100, 171, 172, 299, 301, 428, 429, 600))),
        ]
        file = dice.choice(edits)(file)
    return file


class Loaded:
    """A vocabulary as llama.cpp has it."""

    def __init__(self, path: Path) -> None:
        params = C.llama_model_default_params()
        params.vocab_only = True
        self.model = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.model, f"llama.cpp cannot read {path}"
        self.vocab = C.llama_model_get_vocab(self.model)

    def close(self) -> None:
        C.llama_model_free(self.model)


def rule(target: Loaded, draft: Loaded) -> bool:
    """common_speculative_are_compatible over the library's own functions."""

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
    sizes = [C.llama_vocab_n_tokens(each.vocab) for each in (target, draft)]
    if abs(sizes[0] - sizes[1]) > 128:
        return False
    text = C.llama_vocab_get_text
    return all(text(target.vocab, i) == text(draft.vocab, i) for i in range(5, min(sizes)))


@pytest.mark.parametrize("seed", range(4))
def test_edited_headers(seed: int, tmp_path: Path) -> None:
    """Never stricter than llama.cpp; beyond it only in which ids the two share."""
    dice = random.Random(seed)
    accepted = beyond = refused = 0
    for _ in range(60):
        paths = [edited(dice).write(tmp_path / name) for name in ("target.gguf", "draft.gguf")]
        ours = [read_vocabulary(read_header(FileSource(path))).tokenizer for path in paths]
        found = compare(ours[0], ours[1])
        loaded = [Loaded(path) for path in paths]
        try:
            for mine, theirs in zip(ours, loaded, strict=True):
                assert mine.add_bos == C.llama_vocab_get_add_bos(theirs.vocab)
                assert mine.add_eos == C.llama_vocab_get_add_eos(theirs.vocab)
                assert (-1 if mine.bos is None else mine.bos) == C.llama_vocab_bos(theirs.vocab)
            theirs_too = rule(*loaded)
        finally:
            for each in loaded:
                each.close()
        if theirs_too:
            assert found.usable, found.reason
            accepted += 1
        elif found.usable:
            assert found.coverage >= MIN_COVERAGE
            assert found.note
            beyond += 1
        else:
            refused += 1
    assert min(accepted, beyond, refused) >= 5, "edits of every outcome"
