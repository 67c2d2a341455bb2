"""Vocabularies of the kinds that models have, learnt from Python's standard library in seconds.

Each is the header of a model's file without its weights: a byte-level vocabulary with merges (GPT-2, Llama 3,
Qwen), SentencePiece's with scores and byte tokens (Llama 2), and the latter with tokens added later
(Phi 3). They are made as the real ones were, from other text and at a tenth of the size; where the real ones
are in `shared/vocabs` beside the checkout, tests use those too.
"""

from __future__ import annotations

import heapq
import os
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from localspec.engine.llama import Model, Vocab
from tests.support.gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, Gguf

REAL = Path(__file__).resolve().parents[3] / "shared" / "vocabs"
NAMES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MERGES = 3000

# Texts with little in common, so that no two vocabularies number their tokens alike.
_TEXTS = {
    "gpt-2": "argparse inspect typing unittest/case",
    "llama-bpe": "_pydecimal tarfile zipfile doctest",
    "llama-spm": "email/message difflib pydoc http/client",
    "qwen2": "asyncio/base_events asyncio/tasks subprocess logging/__init__ statistics",
}
# A space belongs to the following word; digits are in groups of three, and single in Qwen's.
_WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+(?!\S)|\s+|_")
_QWEN_WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?[^\s\w]+|\s+(?!\S)|\s+|_")


# The sources of a test that needs one of each kind: those learnt here, and the real ones if available.
SOURCES = ["learnt", *(["real"] if REAL.is_dir() else [])]


def files_of(source: str, folder: Path) -> dict[str, Path]:
    """Return a file of each kind by its name, written to the folder if it is not a real one."""
    if source == "real":
        return {name: REAL / f"ggml-vocab-{name}.gguf" for name in NAMES}
    return {name: vocabulary(name).write(folder / f"{name}.gguf") for name in NAMES}


@cache
def vocabulary(name: str) -> Gguf:
    """Return a model's header with a tokenizer of the kind called `name`, and no tensors."""
    makers: dict[str, Callable[[], Gguf]] = {
        "gpt-2": _gpt2,
        "llama-bpe": _llama_bpe,
        "llama-spm": _llama_spm,
        "phi-3": _phi3,
        "qwen2": _qwen2,
        "qwen35": lambda: _qwen2().put("tokenizer.ggml.pre", STRING, "qwen35"),
    }
    return makers[name]()


def with_tokens(file: Gguf, added: dict[str, int]) -> Gguf:
    """Return a copy with more tokens, each of the given type."""
    existing = file.array("tokenizer.ggml.tokens")
    new_tokens = {text: kind for text, kind in added.items() if text not in existing}
    lists: dict[str, tuple[int, list[Any]]] = {
        "tokens": (STRING, list(new_tokens)),
        "token_type": (I32, list(new_tokens.values())),
        "scores": (F32, [0.0] * len(new_tokens)),
    }
    for key, (kind, values) in lists.items():
        name = f"tokenizer.ggml.{key}"
        if name in file.metadata:
            file = file.put(name, ARRAY, (kind, [*file.array(name), *values]))
    return file


def token_count(name: str) -> int:
    """Return the number of tokens of a vocabulary."""
    return len(_list(vocabulary(name), "tokens"))


# The kinds of vocabularies.


def _gpt2() -> Gguf:
    merges = _byte_merges("gpt-2")
    normal = [*_BYTES.values(), *(a + b for a, b in merges)]
    end = len(normal)
    return _bpe("gpt2", "gpt-2", normal, {"<|endoftext|>": CONTROL}, merges, bos=end, eos=end)


def _llama_bpe() -> Gguf:
    merges = _byte_merges("llama-bpe")
    normal = [*_BYTES.values(), *(a + b for a, b in merges)]
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
    special = [f"<|{name}|>" for name in names]
    special += [f"<|reserved_special_token_{at}|>" for at in range(251)]
    begin = len(normal)
    return _bpe(
        "llama", "llama-bpe", normal, dict.fromkeys(special, CONTROL), merges, begin, begin + 1
    )


def _qwen2() -> Gguf:
    merges = _byte_merges("qwen2")
    normal = [*_BYTES.values(), *(a + b for a, b in merges)]
    end = len(normal)
    special = dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), CONTROL)
    # Rows that the embedding has but the tokenizer lacks.
    padding = {f"[PAD{end + 3 + at}]": USER_DEFINED for at in range(290)}
    return _bpe("qwen2", "qwen2", normal, special | padding, merges, bos=end, eos=end)


def _bpe(
    architecture: str,
    pre: str,
    normal: list[str],
    special: dict[str, int],
    merges: list[tuple[str, str]],
    bos: int,
    eos: int,
) -> Gguf:
    return _model(
        architecture,
        {
            "model": (STRING, "gpt2"),
            "pre": (STRING, pre),
            "tokens": (ARRAY, (STRING, [*normal, *special])),
            "token_type": (ARRAY, (I32, [NORMAL] * len(normal) + list(special.values()))),
            "merges": (ARRAY, (STRING, [f"{a} {b}" for a, b in merges])),
            "bos_token_id": (U32, bos),
            "eos_token_id": (U32, eos),
        },
    )


def small_vocabulary(pieces: list[str], marks: list[str]) -> Gguf:
    """Return a vocabulary of every byte, some longer pieces, marker tokens, and an end of text."""
    letters = list(_BYTES.values())
    longer = ["".join(_BYTES[byte] for byte in piece.encode()) for piece in pieces]
    special = {**dict.fromkeys(marks, USER_DEFINED), "<|end|>": CONTROL}
    end = len(letters) + len(longer) + len(marks)
    return _bpe("gpt2", "gpt-2", [*letters, *longer], special, [("a", "b")], bos=end, eos=end)


def _llama_spm() -> Gguf:
    # A newline is no piece: it is written with the token of its byte.
    words = Counter[str]()
    for word, count in _words("llama-spm", _WORDS).items():
        words[word.rpartition("\n")[2].replace(" ", "▁")] += count
    merged = ["".join(pair) for pair in _learn_merges({w: tuple(w) for w in words}, words)]
    letters = Counter[str]()
    for word, count in words.items():
        letters.update({letter: count * word.count(letter) for letter in set(word)})
    # Pieces are in the order of their merges, then the letters: a score is minus the index.
    pieces = list(dict.fromkeys([*merged, *(letter for letter, _ in letters.most_common())]))
    bytes_ = [f"<0x{at:02X}>" for at in range(256)]
    return _model(
        "llama",
        {
            "model": (STRING, "llama"),
            "pre": (STRING, "default"),
            "tokens": (ARRAY, (STRING, ["<unk>", "<s>", "</s>", *bytes_, *pieces])),
            "scores": (ARRAY, (F32, [0.0] * 259 + [-float(at) for at in range(len(pieces))])),
            "token_type": (
                ARRAY,
                (I32, [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)),
            ),
            "bos_token_id": (U32, 1),
            "eos_token_id": (U32, 2),
            "unknown_token_id": (U32, 0),
            "add_bos_token": (BOOL, True),
            "add_eos_token": (BOOL, False),
        },
    )


def _phi3() -> Gguf:
    """Return Llama 2's vocabulary with 64 more tokens, of which a dozen have a meaning."""
    base = vocabulary("llama-spm")
    tokens, scores, types = (_list(base, name) for name in ("tokens", "scores", "token_type"))
    end = len(tokens)
    names = ["endoftext", "assistant", *(f"placeholder{at}" for at in range(1, 5)), "system"]
    names += ["placeholder5", "placeholder6", "end", "user"]
    added = [f"<|{name}|>" for name in names]
    padding = [f"[PAD{end + at}]" for at in range(len(added), 64)]
    keys = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in base.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    return _model(
        "phi3",
        keys
        | {
            "tokens": (ARRAY, (STRING, [*tokens, *added, *padding])),
            "scores": (ARRAY, (F32, [-1000.0] * 3 + list(scores[3:]) + [-10000.0] * 64)),
            "token_type": (
                ARRAY,
                (I32, [*types, *[CONTROL] * len(added), *[UNKNOWN] * len(padding)]),
            ),
            "eos_token_id": (U32, end),
            "padding_token_id": (U32, end),
        },
    )


def _model(architecture: str, tokenizer: dict[str, tuple[int, object]]) -> Gguf:
    numbers = {
        "block_count": 32,
        "context_length": 4096,
        "embedding_length": 4096,
        "feed_forward_length": 11008,
        "attention.head_count": 32,
        "attention.head_count_kv": 32,
    }
    return Gguf(
        {
            "general.architecture": (STRING, architecture),
            "general.name": (STRING, f"a vocabulary for {architecture}"),
            **{f"{architecture}.{key}": (U32, value) for key, value in numbers.items()},
            f"{architecture}.attention.layer_norm_rms_epsilon": (F32, 1e-5),
            "general.file_type": (U32, 1),
            **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        }
    )


def _list(file: Gguf, key: str) -> list[Any]:
    value: Any = file.metadata[f"tokenizer.ggml.{key}"][1]
    return list(value[1])


# Learning merges.


def _byte_table() -> dict[int, str]:
    """Return GPT-2's letters for bytes: printable bytes map to themselves, others to U+0100 and up."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {
        byte: chr(256 + at) for at, byte in enumerate(unprintable)
    }


_BYTES = _byte_table()


def _words(name: str, cut: re.Pattern[str]) -> Counter[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        (library / f"{module}.py").read_text(encoding="utf-8") for module in _TEXTS[name].split()
    ]
    return Counter(cut.findall("\n".join(texts)))


def _byte_merges(name: str) -> list[tuple[str, str]]:
    counts = _words(name, _QWEN_WORDS if name == "qwen2" else _WORDS)
    words = {word: tuple(_BYTES[byte] for byte in word.encode()) for word in counts}
    return _learn_merges(words, counts)


def _learn_merges(words: dict[str, tuple[str, ...]], counts: Counter[str]) -> list[tuple[str, str]]:
    """Return the first MERGES merges of byte pair encoding, the most frequent pair each time."""
    spelt = {word: list(symbols) for word, symbols in words.items()}
    frequency: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for word, symbols in spelt.items():
        for pair in pairwise(symbols):
            frequency[pair] += counts[word]
            places[pair].add(word)
    queue = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(queue)
    merges: list[tuple[str, str]] = []
    pieces: set[str] = set()
    while queue and len(merges) < MERGES:
        count, best = heapq.heappop(queue)
        if -count != frequency[best]:  # it has changed since
            if frequency[best] > 0:
                heapq.heappush(queue, (-frequency[best], best))
            continue
        joined = "".join(best)
        if joined not in pieces:  # two merges to one piece would make two tokens of one text
            merges.append(best)
            pieces.add(joined)
        touched: set[tuple[str, str]] = set()
        for word in sorted(places.pop(best)):
            old = spelt[word]
            new = _merged(old, best, joined)
            for symbols, sign in ((old, -1), (new, 1)):
                for pair in pairwise(symbols):
                    frequency[pair] += sign * counts[word]
                    if sign > 0 and joined in pair:
                        places[pair].add(word)
                        touched.add(pair)
            spelt[word] = new
        frequency[best] = 0
        for pair in touched:
            heapq.heappush(queue, (-frequency[pair], pair))
    return merges


def _merged(symbols: list[str], pair: tuple[str, str], joined: str) -> list[str]:
    result, at = [], 0
    while at < len(symbols):
        if symbols[at] == pair[0] and symbols[at + 1 : at + 2] == [pair[1]]:
            result.append(joined)
            at += 2
        else:
            result.append(symbols[at])
            at += 1
    return result


class VocabularyOnly(Model):
    """A model's file without its weights."""

    def __init__(self, path: Path) -> None:
        params = C.llama_model_default_params()
        params.vocab_only = True
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.handle, f"llama.cpp cannot read {path}"
        self.vocab = Vocab(self)
