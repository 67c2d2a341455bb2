"""GBNF has the same meaning as in llama.cpp, whose sampler runs random grammars in a child process.

LOCALSPEC_TEST_GRAMMARS is the number of random grammars in each test, LOCALSPEC_TEST_SEED the first seed.
For each grammar the sampler walks along random tokens that it allows. At every step both must allow the
same tokens of the whole vocabulary, and both must agree whether the text may end there.
"""

from __future__ import annotations

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
from tests.support.exploration import SEED, count_examples
from tests.support.gbnf_random import PIECES, RandomGrammar, broken
from tests.support.llama_grammars import Mask, Outcome, Reference, VocabularyFile
from tests.support.vocabularies import small_vocabulary

pytestmark = pytest.mark.explore

GRAMMARS = count_examples(60, "LOCALSPEC_TEST_GRAMMARS")
WALKS = 5  # for each grammar
STEPS = 10
MARKS = ["<think>", "</think>", "<tool>"]
# Without this, llguidance allows only the usual tokens where a single text is possible.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
# The reason for which localspec refuses a grammar that llama.cpp accepts.
EMPTY = "no text matches it."
LIMITS = LLParserLimits(initial_lexer_fuel=2_000_000, max_lexer_states=50_000)


class Comparison:
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
        """Compare every step; with `dead_ends`, localspec may refuse what can no longer be finished."""
        fresh = self._matcher(lark) if outcome.walks else None
        for walk in outcome.walks:
            assert fresh is not None
            matcher = fresh.deep_copy()
            path: list[int] = []
            for step in walk:
                where = f"{source}\n--- behind {[self.vocab.piece(t, special=True) for t in path]}"
                ours = self._mask(matcher, where)
                theirs = step.allowed[: self.vocab.size]
                different = np.flatnonzero((ours != theirs) & compared & (ours | (not dead_ends)))
                names = [
                    (int(t), self.vocab.piece(int(t), special=True), bool(ours[t]))
                    for t in different
                ]
                assert not names, f"{where}\n--- differ (token, piece, ours): {names}"
                if step.token is None or matcher.is_stopped() or not ours[step.token]:
                    break
                path.append(step.token)
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
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    path = small_vocabulary(PIECES, MARKS).write(tmp_path_factory.mktemp("gbnf") / "vocab.gguf")
    with Reference(path) as reference:
        yield Comparison(path, reference)


def make_seeds(number: int) -> list[int]:
    return [number * 1000 + walk for walk in range(WALKS)]


def compare_grammars(
    comparison: Comparison, kind: str, options: dict[str, Any], compared: Mask, avoid: list[int]
) -> None:
    """Compare random grammars of one kind, on walks that take none of the tokens in `avoid`."""
    counts: Counter[str] = Counter()
    for number in range(SEED, SEED + GRAMMARS):
        rng = random.Random(f"{kind} {number}")
        source = RandomGrammar(rng, **options).source()
        outcome = comparison.reference.walk(source, make_seeds(number), STEPS, avoid)
        if outcome is None:
            counts["without an outcome"] += 1
            print("died of:", repr(source))
            continue
        counts["accepted" if outcome.accepted else "refused"] += 1
        lark, cause = comparison.translate(source)
        dead_ends = options.get("dead_ends", False)
        if outcome.accepted and cause == EMPTY and dead_ends:
            ends = [step.allowed[comparison.vocab.ends] for walk in outcome.walks for step in walk]
            assert not np.any(ends), f"{cause}: {source!r}"
            counts["of no text"] += 1
            continue
        assert (not cause) == outcome.accepted, f"llama.cpp {outcome.accepted}: {source!r} {cause}"
        comparison.check_walks(source, lark, outcome, compared, dead_ends=dead_ends)
        counts["walks"] += len(outcome.walks)
        counts["steps"] += sum(map(len, outcome.walks))
    print(kind, dict(counts))
    assert counts["accepted"] >= GRAMMARS / 5
    assert counts["without an outcome"] <= GRAMMARS / 5


def test_random_grammars(comparison: Comparison) -> None:
    compared = comparison.compared.copy()
    compared[comparison.vocab.ends] = True
    compare_grammars(comparison, "any", {}, compared, comparison.uncompared)


def test_random_grammars_whose_parts_overlap(comparison: Comparison) -> None:
    """Recursive grammars of few letters are those in which a greedy lexer fails."""
    options = {"letters": "aaabbc", "recursion": 0.5, "blind": True}
    compared = comparison.compared.copy()
    compared[comparison.vocab.ends] = True
    compare_grammars(comparison, "overlapping", options, compared, comparison.uncompared)


def test_random_grammars_with_dead_ends(comparison: Comparison) -> None:
    """llama.cpp lets an answer begin what it cannot end, such as `"a" [b-a]`; localspec need not."""
    compare_grammars(
        comparison, "dead ends", {"dead_ends": True}, comparison.compared, comparison.uncompared
    )


def test_random_grammars_of_characters_and_tokens(comparison: Comparison) -> None:
    options = {"tokens": [*MARKS, f"<[{comparison.ids['<tool>']}]>"], "blind": True}
    compared = comparison.compared.copy()
    compared[[*comparison.marked, *comparison.vocab.ends]] = True
    # llama.cpp allows some long tokens whose end does not fit, and then aborts.
    compared[comparison.long] = False
    avoid = [token for token in comparison.uncompared if token not in comparison.marked]
    compare_grammars(
        comparison, "characters and tokens", options, compared, [*avoid, *comparison.long]
    )


def test_random_grammars_of_tokens(comparison: Comparison) -> None:
    size = comparison.vocab.size
    names = [
        "<think>",
        "!</think>",
        "!<tool>",
        f"!<[{size}]>",
        f"<[{size + 7}]>",
        "<[65]>",
        "!<[66]>",
    ]
    compared = comparison.compared.copy()
    compared[[*comparison.marked, *comparison.vocab.ends]] = True
    options = {"tokens": names, "characters": False, "dead_ends": True}
    avoid = [token for token in comparison.uncompared if token not in comparison.marked]
    compare_grammars(comparison, "tokens", options, compared, avoid)


def test_broken_grammars(comparison: Comparison) -> None:
    """Exactly those grammars are refused that llama.cpp refuses."""
    counts: Counter[bool] = Counter()
    for number in range(SEED, SEED + 10 * GRAMMARS):
        rng = random.Random(f"broken {number}")
        source = broken(RandomGrammar(rng, dead_ends=True).source(), rng)
        outcome = comparison.reference.walk(source, [number], 0)
        if outcome is not None:
            cause = comparison.translate(source)[1]
            accepted = cause in ("", EMPTY)
            assert accepted == outcome.accepted, f"llama.cpp {outcome.accepted}: {source!r} {cause}"
            counts[accepted] += 1
    print("broken", dict(counts))
    assert min(counts[True], counts[False]) >= GRAMMARS
