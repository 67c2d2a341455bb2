"""Lessons: texts as tokens, with what the target would write at each position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localspec.engine.llama import Vocab
from localspec.engine.prompt.infill import infill_tokens
from localspec.extras.tune.reading import Booleans, Floats, Integers, Reader
from localspec.protocol.frames import InfillPrompt

TOP_TOKENS = 16  # whose probabilities are kept of each position


@dataclass(frozen=True)
class Lesson:
    """A prompt and its answer.

    tokens: of both. answer: where the answer begins. first: the first position whose next token is known.
    top: (n, k) the target's likeliest next tokens at the positions from `first` on. shares: (n, k) their
    probabilities. If the target has not read the text, k is 1 and the token is the text's own. is_own:
    whether the target has written the answer.
    """

    kind: str
    tokens: list[int]
    answer: int
    first: int
    top: Integers
    shares: Floats
    is_own: bool = True

    @property
    def labels(self) -> Integers:
        """The likeliest next token (n,) at each position from `first` on."""
        labels: Integers = self.top[:, 0]
        return labels


def make_lesson(text: dict[str, Any], vocab: Vocab, n_ctx: int) -> Lesson:
    """Return the lesson of a text: {"kind", "answer"} with "prompt", or with "prefix" and "suffix".

    The beginning of a prompt that does not fit into `n_ctx` tokens is left out, and so is an answer's end.
    """
    answer = vocab.tokenize(text["answer"], add_special=False, parse_special=False)[: n_ctx // 2]
    if "prefix" in text:
        gap = InfillPrompt(text["prefix"], text["suffix"], n_predict=len(answer))
        prompt = infill_tokens(vocab, gap, n_ctx, n_ctx)
    else:
        prompt = vocab.tokenize(text["prompt"], add_special=True, parse_special=True)
        if prompt[:2] == [vocab.bos] * 2:  # the template begins with it as well
            prompt = prompt[1:]
    prompt = prompt[-(n_ctx - len(answer)) :]
    first = max(len(prompt) - 1, 0)
    tokens = [*prompt, *answer]
    own = np.array(tokens[first + 1 :], np.int64)[:, None]
    shares = np.ones(own.shape, np.float32)
    is_own = text.get("is_own", True)
    return Lesson(text["kind"], tokens[:-1], len(prompt), first, own, shares, is_own)


def teach(reader: Reader, lesson: Lesson) -> Lesson:
    """Return the lesson with what the target writes at each position, also within the prompt."""
    top, shares = [], []
    for logits in reader.read(lesson.tokens, 0):
        best = np.argpartition(logits, -TOP_TOKENS, axis=1)[:, -TOP_TOKENS:]
        best_logits = np.take_along_axis(logits, best, 1)
        order = np.argsort(-best_logits, axis=1)
        ordered = np.take_along_axis(best_logits, order, 1)
        exponentials = np.exp(ordered - ordered[:, :1])
        top.append(np.take_along_axis(best, order, 1))
        shares.append(exponentials / exponentials.sum(1, keepdims=True))
    taught = np.concatenate(top).astype(np.int64), np.concatenate(shares).astype(np.float32)
    return replace(lesson, first=0, top=taught[0], shares=taught[1])


def count_hits(reader: Reader, lessons: Sequence[Lesson]) -> list[Booleans]:
    """Return for each lesson which tokens of its answer the draft predicts.

    The lessons must be untaught, so that their labels are the texts' own tokens.
    """
    hits = []
    for lesson in lessons:
        parts = [logits.argmax(1) for logits in reader.read(lesson.tokens, lesson.first)]
        predicted = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        hits.append(predicted == lesson.labels)
    return hits


def mean_tokens_per_pass(hits: Sequence[Booleans], depth: int) -> float:
    """Return how many tokens a pass of the target yields at this depth if each hit is accepted.

    A round keeps the drafts before the first miss and adds the target's own token.
    """
    tokens = passes = 0
    for answer in hits:
        position = 0
        while position < len(answer):
            misses = np.flatnonzero(~answer[position : position + depth])
            accepted = int(misses[0]) if len(misses) else min(depth, len(answer) - position)
            position += accepted + 1
            passes += 1
        tokens += len(answer)
    return tokens / passes if passes else 0.0


def read_lessons(
    reader: Reader, lessons: Sequence[Lesson], done: Callable[[int], bool]
) -> list[Lesson]:
    """Return the lessons as the target teaches them, until `done` returns False.

    reader: of the target. done: called with the number of lessons that were read.
    """
    taught: list[Lesson] = []
    for lesson in lessons:
        taught.append(teach(reader, lesson))
        if not done(len(taught)):
            break
    return taught


def select_own(lessons: Sequence[Lesson]) -> list[Lesson]:
    """Return those of untaught lessons that can be learned from: what the target itself has written."""
    return [lesson for lesson in lessons if lesson.is_own]
