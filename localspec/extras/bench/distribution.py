"""Test whether sampled answers with drafts come from the same distribution as plain ones.

It is a permutation test of how answers begin, which detects large differences but no small ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from localspec.extras.bench.asking import DaemonServer, RequestOptions
from localspec.extras.bench.prompts import Prompt
from localspec.extras.bench.report import Distribution

ANSWERS_PER_MODE = 24  # with drafts, and as many without
_ANSWER_TOKENS = 8
_DEPTH = 3  # drafts per pass, fixed so that there are some
_COMPARED_WORDS = 4  # leading words of an answer whose frequencies are compared
_SHUFFLES = 2000
# Answers to this prompt begin in many ways.
_PROMPT = Prompt(ask="Invent the first sentence of a novel.")


def compare_distributions(
    server: DaemonServer, room: int, drafts: dict[str, Any]
) -> Distribution | None:
    """Request the same answer equally often with and without drafts, and compare the answers.

    None: nothing was drafted.

    Raises:
        LocalspecError: as reported by the daemon.
    """
    texts: tuple[list[str], list[str]] = ([], [])
    modes: tuple[dict[str, Any], dict[str, Any]] = {"enabled": False}, {**drafts, "depth": _DEPTH}
    drafted = 0
    for _ in range(ANSWERS_PER_MODE):
        for answers, speculative in zip(texts, modes, strict=True):
            options = RequestOptions(_ANSWER_TOKENS, room, speculative, own=True, cached=True)
            answer = server.ask(_PROMPT, options)
            answers.append(answer.text)
            drafted += int(answer.timings.get("draft_n") or 0)
    return Distribution(ANSWERS_PER_MODE, p_value(*texts)) if drafted else None


def p_value(first: Sequence[str], second: Sequence[str]) -> float:
    """Return how often random groups of the texts differ as much as these two in their first words."""
    texts = [
        (text.split() + [""] * _COMPARED_WORDS)[:_COMPARED_WORDS] for text in (*first, *second)
    ]
    rng = random.Random(0)
    observed = _distance(texts, len(first))
    at_least = 1  # the observed grouping itself
    for _ in range(_SHUFFLES):
        rng.shuffle(texts)
        at_least += _distance(texts, len(first)) >= observed - 1e-9
    return at_least / (_SHUFFLES + 1)


def _distance(texts: Sequence[Sequence[str]], count: int) -> float:
    """Return the difference in frequency of each word at each position, summed up."""
    total, remaining = 0.0, len(texts) - count
    for position in range(_COMPARED_WORDS):
        first = Counter(words[position] for words in texts[:count])
        second = Counter(words[position] for words in texts[count:])
        vocabulary = first.keys() | second.keys()
        total += sum(
            abs(first[word] / max(count, 1) - second[word] / max(remaining, 1))
            for word in vocabulary
        )
    return total
