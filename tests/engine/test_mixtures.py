"""What models really write is read as it is meant in any mixture, at any cut, with stop strings.

LOCALSPEC_TEST_CALLS is the number of random answers of each family, LOCALSPEC_TEST_SEED the first seed.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from localspec.chat.reader import AnswerReader
from localspec.engine.text_stream import TextStream
from localspec.protocol.pieces import Piece
from tests.engine.test_answers import collect
from tests.support.exploration import SEED, count_examples
from tests.support.mixtures import STOP, STYLES, TOOLS, Mixture, mixtures
from tests.support.random_calls import RandomCalls

pytestmark = pytest.mark.explore
ANSWERS = count_examples(60, "LOCALSPEC_TEST_CALLS")


def reader_of(mixture: Mixture) -> AnswerReader:
    return AnswerReader(
        mixture.form,
        TOOLS,
        tail=mixture.tail,
        plain_calls=tuple(TOOLS),
        thoughts=[mixture.thoughts],
    )


def collect_values(
    pieces: list[Piece],
) -> tuple[str, str, list[tuple[str, list[tuple[str, Any]]]]]:
    """Return content, reasoning and calls, with arguments in their order."""
    content, reasoning, calls = collect(pieces)
    return content, reasoning, [(name, [*json.loads(text).items()]) for name, text in calls]


def meaning(mixture: Mixture) -> tuple[str, str, list[tuple[str, list[tuple[str, Any]]]]]:
    calls = [(name, [*arguments.items()]) for name, arguments in mixture.calls]
    return mixture.text("content"), mixture.text("reasoning"), calls


@pytest.mark.parametrize("name", STYLES)
def test_mixtures_mean_what_their_parts_mean(name: str) -> None:
    for rng, mixture in mixtures(name, ANSWERS, SEED):
        answer = mixture.answer
        for parts in ([answer], RandomCalls(rng, []).split(answer), list(answer)):
            reader = reader_of(mixture)
            pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
            assert collect_values(pieces) == meaning(mixture), (mixture.tail, answer, parts[:3])


@pytest.mark.parametrize("name", STYLES)
def test_stop_strings_end_the_content_of_mixtures(name: str) -> None:
    n_stopped = 0
    for rng, mixture in mixtures(name, ANSWERS, SEED, stops=True):
        stream = TextStream([STOP], reader_of(mixture))
        parts = RandomCalls(rng, []).split(mixture.answer)
        chunks = [*(stream.push(part.encode()) for part in parts), stream.flush()]
        expected = mixture.up_to_stop()
        pieces = [piece for chunk in chunks for piece in chunk.pieces]
        assert collect_values(pieces) == meaning(expected), (mixture.tail, mixture.answer)
        assert (stream.stopped == STOP) == (STOP in mixture.text("content"))
        n_stopped += stream.stopped == STOP
        marks = [mark for chunk in chunks for _, mark in chunk.chars]
        wanted = expected.content_chars()
        assert marks == wanted[: len(marks)]
        assert not any(itertools.islice(wanted, len(marks), None))
    assert n_stopped
