"""GBNF means what it means in llama.cpp: random grammars beside its own sampler, which runs in a child.

LOCALSPEC_TEST_GRAMMARS is how many random grammars each test tries, LOCALSPEC_TEST_SEED where they begin.
For each one the sampler walks along random tokens that it allows. At every step both must allow the same
tokens of the whole vocabulary, and the same ones must be able to end there.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from localspec.engine.llama.vocab import Vocab
from localspec.engine.sampling.grammars.gbnf import GrammarSyntaxError, TokenTable
from localspec.engine.sampling.grammars.lexemes import gbnf_to_lark
from tests.support.gbnf_random import PIECES, RandomGrammar, broken
from tests.support.llama_grammars import Mask, Outcome, Reference, VocabularyFile
from tests.support.vocabularies import small_vocabulary

GRAMMARS = int(os.environ.get("LOCALSPEC_TEST_GRAMMARS", "60"))
SEED = int(os.environ.get("LOCALSPEC_TEST_SEED", "1"))
WALKS = 5  # along each grammar
STEPS = 10
MARKS = ["<think>", "</think>", "<tool>"]
# Where only one text is possible, llguidance otherwise allows only its usual tokens.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
EMPTY = "no text matches it."  # why localspec refuses a grammar that llama.cpp accepts
LIMITS = LLParserLimits(initial_lexer_fuel=2_000_000, max_lexer_states=50_000)


class Beside:
    """llama.cpp and localspec with the same small vocabulary."""

    def __init__(self, path: Path, reference: Reference) -> None:
        self.reference = reference
        self._file = VocabularyFile(path)
        self.vocab: Vocab = self._file.vocab()
        self._tokenizer: LLTokenizer = self.vocab.guidance_tokenizer()
        size = self.vocab.size
        pieces = [self.vocab.piece(token, special=True) for token in range(size)]
        self.ids = {mark: pieces.index(mark.encode()) for mark in MARKS}
        self.table = TokenTable(size, self.ids, frozenset(self.vocab.ends))
        self.marked = [*self.ids.values()]
        # A part of a character and NUL are left out. llama.cpp refuses the first byte of every character
        # that shares it with one in a negated class.
        self.compared = np.array([self._is_compared(piece) for piece in pieces])
        self.compared[self.marked] = False
        self.compared[self.vocab.ends] = False
        self.long = [
            token for token, piece in enumerate(pieces) if len(piece.decode("latin-1")) > 1
        ]
        self.uncompared = [token for token in range(size) if not self.compared[token]]

    @staticmethod
    def _is_compared(piece: bytes) -> bool:
        try:
            return piece.decode() != "\0"
        except UnicodeDecodeError:
            return False

    def translate(self, source: str) -> tuple[str, str]:
        """Return localspec's translation, or else why it refuses the grammar."""
        try:
            return NO_FORCING + gbnf_to_lark(source, self.table), ""
        except GrammarSyntaxError as error:
            return "", str(error)

    def _matcher(self, lark: str) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        assert not matcher.is_error(), f"{lark}\n---\n{matcher.get_error()}"
        return matcher

    def check_walks(
        self, source: str, lark: str, outcome: Outcome, compared: Mask, *, dead_ends: bool
    ) -> None:
        """Compare every step. dead_ends: localspec may refuse what cannot be finished any more."""
        fresh = self._matcher(lark) if outcome.walks else None
        for walk in outcome.walks:
            assert fresh is not None
            matcher = fresh.deep_copy()
            taken: list[int] = []
            for step in walk:
                where = f"{source}\n--- behind {[self.vocab.piece(t, special=True) for t in taken]}"
                ours = self._mask(matcher, where)
                theirs = step.allowed[: self.vocab.size]
                wrong = np.flatnonzero((ours != theirs) & compared & (ours | (not dead_ends)))
                names = [
                    (int(t), self.vocab.piece(int(t), special=True), bool(ours[t])) for t in wrong
                ]
                assert not names, f"{where}\n--- differ (token, piece, ours): {names}"
                if step.token is None or matcher.is_stopped() or not ours[step.token]:
                    break
                taken.append(step.token)
                matcher.consume_token(step.token)
                assert not matcher.is_error(), f"{where}\n--- {matcher.get_error()}"

    def _mask(self, matcher: LLMatcher, where: str) -> Mask:
        if matcher.is_stopped():  # complete, and nothing can follow
            mask = np.zeros(self.vocab.size, dtype=np.bool_)
            mask[self.vocab.ends] = True
            return mask
        bias = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)
        assert not matcher.is_error(), f"{where}\n--- {matcher.get_error()}"
        allowed: Mask = bias[: self.vocab.size] != 0
        return allowed


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    path = small_vocabulary(PIECES, MARKS).write(tmp_path_factory.mktemp("gbnf") / "vocab.gguf")
    with Reference(path) as reference:
        yield Beside(path, reference)


def seeds(first: int) -> list[int]:
    return [first * 1000 + walk for walk in range(WALKS)]


def run(
    beside: Beside, kind: str, options: dict[str, Any], compared: Mask, avoid: list[int]
) -> None:
    """Try random grammars of one kind. avoid: tokens that no walk takes."""
    seen: Counter[str] = Counter()
    for number in range(SEED, SEED + GRAMMARS):
        dice = random.Random(f"{kind} {number}")
        source = RandomGrammar(dice, **options).source()
        outcome = beside.reference.walk(source, seeds(number), STEPS, avoid)
        if outcome is None:
            seen["without an outcome"] += 1
            print("died of:", repr(source))
            continue
        seen["accepted" if outcome.accepted else "refused"] += 1
        lark, cause = beside.translate(source)
        dead_ends = options.get("dead_ends", False)
        if outcome.accepted and cause == EMPTY and dead_ends:
            ends = [step.allowed[beside.vocab.ends] for walk in outcome.walks for step in walk]
            assert not np.any(ends), f"{cause}: {source!r}"
            seen["of no text"] += 1
            continue
        assert (not cause) == outcome.accepted, f"llama.cpp {outcome.accepted}: {source!r} {cause}"
        beside.check_walks(source, lark, outcome, compared, dead_ends=dead_ends)
        seen["walks"] += len(outcome.walks)
        seen["steps"] += sum(map(len, outcome.walks))
    print(kind, dict(seen))
    assert seen["accepted"] >= GRAMMARS / 5
    assert seen["without an outcome"] <= GRAMMARS / 5


def test_random_grammars(beside: Beside) -> None:
    compared = beside.compared.copy()
    compared[beside.vocab.ends] = True
    run(beside, "any", {}, compared, beside.uncompared)


def test_random_grammars_whose_parts_overlap(beside: Beside) -> None:
    """Recursive grammars of few letters: where a lexer that takes as much as it can goes wrong."""
    options = {"letters": "aaabbc", "recursion": 0.5, "blind": True}
    compared = beside.compared.copy()
    compared[beside.vocab.ends] = True
    run(beside, "overlapping", options, compared, beside.uncompared)


def test_random_grammars_with_dead_ends(beside: Beside) -> None:
    """llama.cpp lets an answer begin what it cannot end, such as `"a" [b-a]`; localspec need not."""
    run(beside, "dead ends", {"dead_ends": True}, beside.compared, beside.uncompared)


def test_random_grammars_of_characters_and_tokens(beside: Beside) -> None:
    options = {"tokens": [*MARKS, f"<[{beside.ids['<tool>']}]>"], "blind": True}
    compared = beside.compared.copy()
    compared[[*beside.marked, *beside.vocab.ends]] = True
    compared[beside.long] = False  # llama.cpp allows some whose end does not fit, and then aborts
    avoid = [token for token in beside.uncompared if token not in beside.marked]
    run(beside, "characters and tokens", options, compared, [*avoid, *beside.long])


def test_random_grammars_of_tokens(beside: Beside) -> None:
    size = beside.vocab.size
    names = [
        "<think>",
        "!</think>",
        "!<tool>",
        f"!<[{size}]>",
        f"<[{size + 7}]>",
        "<[65]>",
        "!<[66]>",
    ]
    compared = beside.compared.copy()
    compared[[*beside.marked, *beside.vocab.ends]] = True
    options = {"tokens": names, "characters": False, "dead_ends": True}
    avoid = [token for token in beside.uncompared if token not in beside.marked]
    run(beside, "tokens", options, compared, avoid)


def test_broken_grammars(beside: Beside) -> None:
    """What llama.cpp refuses is refused, and nothing else."""
    seen: Counter[bool] = Counter()
    for number in range(SEED, SEED + 10 * GRAMMARS):
        dice = random.Random(f"broken {number}")
        source = broken(RandomGrammar(dice, dead_ends=True).source(), dice)
        outcome = beside.reference.walk(source, [number], 0)
        if outcome is not None:
            cause = beside.translate(source)[1]
            accepted = cause in ("", EMPTY)
            assert accepted == outcome.accepted, f"llama.cpp {outcome.accepted}: {source!r} {cause}"
            seen[accepted] += 1
    print("broken", dict(seen))
    assert min(seen[True], seen[False]) >= GRAMMARS
