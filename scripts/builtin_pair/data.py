"""Rows of tokens to train on: exchanges and code, packed, with a weight for every predicted token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .code import Code, read_sources, standard_library
from .docs import Entry, entries_from_docstrings, entries_from_html, find_html
from .echo import echo
from .popular import MODULES
from .questions import Questions
from .tokenizer import (
    ASSISTANT,
    END,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    PAD,
    SPECIAL_TOKENS,
    USER,
    special_id,
)

ANSWER_WEIGHT = 1.5
"""Answers are short and stand against hundreds of code tokens per row."""
MIDDLE_WEIGHT = 3.0
FIRST_WEIGHT = 20.0
"""What begins a hole (`else`, `try`, `return`) is its hardest token, and there is only one of it per hole."""
CODE_WEIGHT = 0.35
PLAIN_CODE_SHARE = 0.1
DRAWS = 8
"""How many pieces of code are drawn before the rest of a row is left to exchanges, and of those to padding."""
SECOND_TURN_SHARE = 0.2
ECHO_TOKENS = range(len(SPECIAL_TOKENS), 2200)
"""Only the most frequent ones, whose ids are the lowest: fewer to tell apart, so it goes faster."""


@dataclass(frozen=True)
class Sources:
    questions: Questions
    code: Code
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Mixture:
    """One step's batch."""

    rows: int
    length: int
    code_share: float
    """Share of the rows that begin with code; the rest of every row is exchanges."""
    echo_share: float = 0.0
    """Share of the rows, before all others, that hold only :func:`echo`."""
    reach: float = 1.0
    """How much more context than usual is around a hole."""


@dataclass(frozen=True)
class Batch:
    """`rows` x `length` tokens; a token sees only its own document."""

    tokens: Tensor
    """[B, T] int64."""
    mask: Tensor
    """[B, 1, T, T] bool: query may look at key."""
    where: Tensor
    """[N] flat positions whose next token is predicted."""
    targets: Tensor
    """[N] those next tokens."""
    weights: Tensor
    """[N] their weights, summing to 1."""


def load_entries(work: Path, html: Path | None) -> list[Entry]:
    """Return the documentation as records, parsed once and kept in `work`."""
    cache = work / "entries.json"
    if cache.exists():
        return [
            Entry(name, kind, signature, module, tuple(paragraphs), tuple(examples))
            for name, kind, signature, module, paragraphs, examples in json.loads(
                cache.read_text(encoding="utf-8")
            )
        ]
    html = html or find_html()
    if html is not None:
        entries = entries_from_html(html)
    else:
        names = tuple(m for m in MODULES if m not in {"functions", "stdtypes"})
        entries = entries_from_docstrings(("builtins", *names))
    work.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps([astuple(entry) for entry in entries]), encoding="utf-8")
    return entries


def load_code() -> Code:
    return Code(read_sources(standard_library()))


def tokenizer_texts(questions: Questions, code: Code, seed: int) -> Iterator[str]:
    """Text in about the mixture that is trained on; the seed fixes it."""
    rng = random.Random(f"{seed}/tokenizer")
    for _ in range(20_000):
        exchange = questions.draw(rng)
        yield exchange.question
        yield exchange.answer
    for _ in range(4_000):
        yield "".join(code.window(rng))


class Packer:
    """Turns documents into packed rows."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        tokenizer = sources.tokenizer
        self._id = {
            text: special_id(tokenizer, text)
            for text in (END, USER, ASSISTANT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, PAD)
        }

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.sources.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def exchange(self, rng: random.Random) -> tuple[list[int], list[float]]:
        """Tokens of one or two turns, and the weight of predicting each of them."""
        tokens: list[int] = []
        weights: list[float] = []
        for _ in range(2 if rng.random() < SECOND_TURN_SHARE else 1):
            drawn = self.sources.questions.draw(rng)
            question = [self._id[USER], *self._encode(drawn.question)]
            question += [self._id[END], self._id[ASSISTANT]]
            answer = [*self._encode(drawn.answer), self._id[END]]
            tokens += question + answer
            weights += [0.0] * len(question) + [ANSWER_WEIGHT] * len(answer)
        return tokens, weights

    def code(self, rng: random.Random, reach: float) -> tuple[list[int], list[float]]:
        if rng.random() < PLAIN_CODE_SHARE:
            plain = self._encode("".join(self.sources.code.window(rng)))
            return plain, [CODE_WEIGHT] * len(plain)
        hole = self.sources.code.hole(rng, reach)
        prefix, suffix = self._encode(hole.prefix), self._encode(hole.suffix)
        middle = [*self._encode(hole.middle), self._id[END]]
        tokens = [self._id[FIM_PREFIX], *prefix, self._id[FIM_SUFFIX], *suffix]
        tokens += [self._id[FIM_MIDDLE], *middle]
        weights = [0.0] + [CODE_WEIGHT] * len(prefix) + [0.0] + [CODE_WEIGHT] * len(suffix)
        weights += [0.0, FIRST_WEIGHT] + [MIDDLE_WEIGHT] * (len(middle) - 1)
        return tokens, weights

    def _document(
        self, rng: random.Random, wants_code: bool, reach: float, room: int
    ) -> tuple[list[int], list[float]] | None:
        """Return a whole document of at most `room` tokens: one that is cut off teaches nothing."""
        for is_code in (True, False) if wants_code else (False,):
            for _ in range(DRAWS):
                tokens, weights = self.code(rng, reach) if is_code else self.exchange(rng)
                if len(tokens) <= room:
                    return tokens, weights
        return None

    def batch(self, rng: random.Random, mixture: Mixture) -> Batch:
        length = mixture.length
        tokens = torch.full((mixture.rows, length), self._id[PAD])
        weights = torch.zeros(mixture.rows, length)
        document = torch.zeros(mixture.rows, length, dtype=torch.int64)
        echoes = round(mixture.rows * mixture.echo_share)
        for row in range(echoes):
            ids, ws = echo(rng, ECHO_TOKENS, length)
            tokens[row], weights[row] = torch.tensor(ids), torch.tensor(ws)
        for row in range(echoes, mixture.rows):
            filled, count = 0, 0
            wants_code = row - echoes < round((mixture.rows - echoes) * mixture.code_share)
            while drawn := self._document(rng, wants_code, mixture.reach, length - filled):
                ids, ws = drawn
                count += 1
                end = filled + len(ids)
                tokens[row, filled:end] = torch.tensor(ids)
                weights[row, filled:end] = torch.tensor(ws)
                document[row, filled:end] = count
                filled = end
        return _finish(tokens, weights, document)


def _finish(tokens: Tensor, weights: Tensor, document: Tensor) -> Batch:
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (document[:, :, None] == document[:, None, :])[:, None] & causal
    follows = document[:, 1:] == document[:, :-1]
    weight = torch.where(follows, weights[:, 1:], 0.0)
    weight = torch.nn.functional.pad(weight, (0, 1)).flatten()
    where = weight.nonzero().flatten()
    targets = torch.roll(tokens.flatten(), -1)[where]
    chosen = weight[where]
    return Batch(tokens, mask, where, targets, chosen / chosen.sum())
