"""Do sampled answers with drafts come from the same distribution as plain ones?

A permutation test of how they begin: it sees gross differences, and no small ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from localspec.cli.bench.asking import How, Ours
from localspec.cli.bench.prompts.workloads import Prompt
from localspec.cli.bench.report import Distribution

ANSWERS = 24  # each way
_TOKENS = 8  # of each
_DEPTH = 3  # drafts of a pass, so that there are some
_WORDS = 4  # whose frequencies are compared
_SHUFFLES = 2000
# Answers to it begin in many ways.
_PROMPT = Prompt(ask="Invent the first sentence of a novel.")


def check(server: Ours, room: int, drafts: dict[str, Any]) -> Distribution | None:
    """Ask the same as often plainly as with drafts; None where nothing was drafted.

    Raises:
        LocalspecError: the daemon's.
    """
    texts: tuple[list[str], list[str]] = ([], [])
    ways: tuple[dict[str, Any], dict[str, Any]] = {"enabled": False}, {**drafts, "depth": _DEPTH}
    drafted = 0
    for _ in range(ANSWERS):
        for said, speculative in zip(texts, ways, strict=True):
            how = How(_TOKENS, room, speculative, own=True, cached=True)
            answer = server.ask(_PROMPT, how)
            said.append(answer.text)
            drafted += int(answer.timings.get("draft_n") or 0)
    return Distribution(ANSWERS, p_value(*texts)) if drafted else None


def p_value(one: Sequence[str], other: Sequence[str]) -> float:
    """How often texts of one distribution, dealt at random, differ as much as these in their first words."""
    texts = [_words(text) for text in (*one, *other)]
    rng = random.Random(0)
    seen = _apart(texts, len(one))
    as_far = 1  # as it was dealt
    for _ in range(_SHUFFLES):
        rng.shuffle(texts)
        as_far += _apart(texts, len(one)) >= seen - 1e-9
    return as_far / (_SHUFFLES + 1)


def _words(text: str) -> list[str]:
    return (text.split() + [""] * _WORDS)[:_WORDS]


def _apart(texts: Sequence[Sequence[str]], first: int) -> float:
    """Over all places, how far the shares of the words there are apart."""
    total, others = 0.0, len(texts) - first
    for at in range(_WORDS):
        one = Counter(each[at] for each in texts[:first])
        other = Counter(each[at] for each in texts[first:])
        words = one.keys() | other.keys()
        total += sum(
            abs(one[word] / max(first, 1) - other[word] / max(others, 1)) for word in words
        )
    return total
