"""One byte-level BPE for target and draft.

The pre-tokenizer is GPT-2's, because llama.cpp implements exactly that one under the name "gpt-2";
its ``\\s+(?!\\S)`` also keeps "newline + indentation" together as one token, which suits Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, PAD = "<|fim_pre|>", "<|fim_suf|>", "<|fim_mid|>", "<|pad|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, PAD)
"""In the order of their ids, from 0."""


def train_tokenizer(texts: Iterator[str], vocabulary: int, path: Path) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def special_id(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    if number is None:
        raise KeyError(text)
    return int(number)
