"""The tokens that an answer reports depend on tokens and text, not on how many each pass brought."""

from __future__ import annotations

import random
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.chat.reader import AnswerReader
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.protocol.frames import Delta, Generate, TextPrompt, TokenLogprob
from tests.support.running import Running, drafting

EOG = 0
# Whole characters, parts of characters, broken bytes, empty tokens, and several characters in one token.
PIECES = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x80",
    b"\xffa",
    "☃b".encode(),
    b"",
    b" ",
    b"\n",
    b"<think>",
    b"</think>",
]
N_PROMPT = 2


class Vocab:
    def __init__(self, pieces: List[bytes]) -> None:
        self.pieces = pieces

    def is_eog(self, token: int) -> bool:
        return token == EOG

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self.pieces[token]


def make_row(place: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(place).normal(size=size).astype(np.float32)


@dataclass
class Report:
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str = ""

    def add(self, delta: Delta | None) -> None:
        if delta is not None:
            self.text += delta.text
            self.logprobs += delta.logprobs
            self.ids += delta.ids


def report_answer(
    tokens: List[int],
    passes: List[int],
    thinks: bool = False,
    pieces: List[bytes] = PIECES,
    **request_options: Any,
) -> Report:
    """Return the report of an answer whose passes bring `passes` tokens each, then one each."""
    request = Generate(1, TextPrompt("x"), top_logprobs=2, return_tokens=True, **request_options)
    reader = AnswerReader() if thinks else None
    tokenized = TokenizedRequest(request, [1] * N_PROMPT, Sampler(Settings()), reader=reader)
    slot = SimpleNamespace(
        tokens=[1] * N_PROMPT, reused=0, moved=0, reused_exact=0, reused_ahead=0, known=0, loss=None
    )
    verifier = SimpleNamespace(rows=[], reject=False)
    given_vocab, given_slot, given_verifier = cast(Any, (Vocab(pieces), slot, verifier))
    drafts = cast(Any, SimpleNamespace(drafters=[], reason=None))
    sequence = Sequence(
        tokenized, given_slot, given_vocab, room=100, drafting=drafts, verifier=given_verifier
    )
    report, at, sizes = Report(), 0, iter(passes)
    while at < len(tokens) and not sequence.finished:
        accepted = list(tokens[at : at + next(sizes, 1)])
        verifier.rows = [make_row(at + place, len(pieces)) for place in range(len(accepted))]
        _, delta = sequence.append(accepted, 0.0)
        report.add(delta)
        at += len(accepted)
    if not sequence.finished:
        sequence.finish("cancelled")
    report.add(sequence.flush_text())
    report.finish = sequence.finish_reason
    return report


answers = st.lists(st.sampled_from(range(len(PIECES))), max_size=24)
stop_strings = st.lists(
    st.sampled_from(["a", "ab", "ba", "é", "b\n", "\ufffd", "☃", " a"]), max_size=2
)
limits = st.one_of(st.none(), st.integers(1, 24))
sizes = st.lists(st.integers(1, 9), max_size=24)


@settings(max_examples=400)
@given(answers, stop_strings, limits, sizes, st.booleans())
def test_report_does_not_depend_on_the_passes(
    tokens: list[int], stops: list[str], limit: int | None, passes: list[int], thinks: bool
) -> None:
    options: dict[str, Any] = {"stop": stops, "max_tokens": limit}
    assert report_answer(tokens, passes, thinks, **options) == report_answer(
        tokens, [], thinks, **options
    )


@settings(max_examples=400)
@given(answers, stop_strings, limits, sizes)
def test_a_token_is_reported_if_its_bytes_begin_in_the_shown_text(
    tokens: list[int], stops: list[str], limit: int | None, passes: list[int]
) -> None:
    report = report_answer(tokens, passes, stop=stops, max_tokens=limit)
    entries = report.logprobs
    assert [entry.id for entry in entries] == tokens[: len(entries)]
    for entry in entries:  # A token without bytes may follow all of the text.
        assert 0 <= entry.offset < len(report.text) + (not entry.piece)
    # The reported tokens cover the whole text.
    covered = b"".join(entry.piece for entry in entries)
    assert len(covered.decode("utf-8", "replace")) >= len(report.text)


@given(answers, sizes)
def test_every_token_is_reported_of_an_answer_that_its_limit_ends(
    tokens: list[int], passes: list[int]
) -> None:
    tokens = [*filter(None, tokens), 12]  # The last one has no bytes.
    report = report_answer(tokens, passes, max_tokens=len(tokens))
    assert report.finish == "length"
    assert [entry.id for entry in report.logprobs] == tokens == report.ids


@settings(max_examples=400)
@given(st.data(), st.text("abé☃😀\n", max_size=12), stop_strings, sizes)
def test_offsets_are_the_characters_where_tokens_begin(
    data: st.DataObject, text: str, stops: list[str], passes: list[int]
) -> None:
    raw = text.encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=16)))
    begins = [0, *places]
    pieces = [b"", *(raw[a:b] for a, b in zip(begins, [*places, len(raw)], strict=True))]
    report = report_answer(range(1, len(pieces)), passes, pieces=pieces, stop=stops)
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    if cut == len(text):
        assert report.text == text
    length = len(report.text.encode())
    expected = [len(raw[:begin].decode("utf-8", "ignore")) for begin in begins if begin < length]
    assert [entry.offset for entry in report.logprobs] == expected


@pytest.mark.parametrize("passes", [[], [9], [2, 3]])
def test_the_tokens_of_a_cut_character_belong_to_it(passes: list[int]) -> None:
    report = report_answer([1, 7, 8, 7], passes, max_tokens=4)
    assert report.text == "a😀\ufffd"
    assert [(entry.id, entry.offset) for entry in report.logprobs] == [
        (1, 0),
        (7, 1),
        (8, 1),
        (7, 2),
    ]


@pytest.mark.parametrize("passes", [[], [9], [2, 3]])
def test_tokens_of_a_stop_string_and_the_end_are_reported_by_id_only(passes: list[int]) -> None:
    report = report_answer([1, 3, 2, 1], passes, stop=["bb"])
    assert (report.text, [entry.id for entry in report.logprobs]) == ("aa", [1, 3])
    assert report.ids == [1, 3, 2]
    ended = report_answer([1, 12, EOG], passes)
    assert ([entry.id for entry in ended.logprobs], ended.ids) == ([1], [1, 12, EOG])


@pytest.mark.parametrize("exact", [False, True])
def test_drafts_do_not_change_the_reported_tokens(contextual: Running, exact: bool) -> None:
    prompt = [1, 7, 9, 4]
    full_text = contextual.ask(prompt, 40, exact=True).text
    for stops in ([], [full_text[9:12]], [full_text[20:23], full_text[3:5]], [full_text[-2:]]):
        reports = set()
        for depth in (0, 1, 4, 8):
            answer = contextual.ask(
                prompt, 40, speculative=drafting(depth), exact=exact, stop=stops, top_logprobs=1
            )
            reports.add(tuple((entry.id, entry.offset) for entry in answer.logprobs))
            assert (
                answer.text
                == full_text[: min((full_text.find(s) for s in stops), default=len(full_text))]
            )
        assert len(reports) == 1


def test_stop_string_in_thoughts_does_not_end_the_answer(contextual: Running) -> None:
    prompt = [1, 7, 9, 4]
    full_text = contextual.ask(prompt, 40, exact=True).text
    rng = random.Random(4)
    for _ in range(12):
        opened, closed = 3, rng.randrange(8, 16)
        marks = [(full_text[:opened], full_text[closed : closed + 3])]
        begins = full_text.find(marks[0][1], opened) + 3  # the start of the visible text
        at = rng.randrange(len(full_text) - 2)
        stop = full_text[at : at + 2]
        for depth in (0, 1, 4, 8):
            drafts = drafting(depth)
            options = {"speculative": drafts, "exact": True, "stop": [stop], "thoughts": marks}
            answer = contextual.ask(prompt, 40, **options)
            visible = full_text[begins:].lstrip()
            end = visible.find(stop)
            assert answer.text == (visible[:end] if end >= 0 else visible)
            assert answer.done.stop_string == (stop if end >= 0 else None)
