"""Frames between the daemon and its engine."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.protocol import frames
from localspec.protocol.frames import Delta, Timings, TokenLogprob

PIECE = st.tuples(st.text(max_size=6), st.integers(1, 4), st.booleans())


@given(st.lists(PIECE, min_size=1, max_size=8))
def test_text_sent_together_says_what_it_says_apart(pieces: list[tuple[str, int, bool]]) -> None:
    """Text, ids, which of it was drafted, the latest count and times."""
    apart, written = [], 0
    for text, count, drafted in pieces:
        ids = list(range(written, written + count))
        written += count
        scored = [TokenLogprob(token, b"%d" % token, -1.0) for token in ids]
        spans = [(0, len(text))] if drafted else []
        apart.append(Delta(7, text, scored, spans, written, ids, Timings(predicted_n=written)))
    found = reduce(Delta.merge, apart)
    assert (found.id, found.text) == (7, "".join(text for text, _, _ in pieces))
    assert found.ids == [each.id for each in found.logprobs] == list(range(written))
    marked = [found.text[start:end] for start, end in found.drafted]
    assert marked == [text for text, _, drafted in pieces if drafted]
    assert (found.tokens, found.timings) == (written, apart[-1].timings)


@given(st.lists(st.text(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_frames_are_whole_however_their_bytes_arrive(texts: list[str], steps: list[int]) -> None:
    sent = b"".join(frames.encode_frame(frames.Notice(text)) for text in texts)
    buffer, at = bytearray(), 0
    found: list[bytes] = []
    for number in range(len(sent)):
        buffer += sent[at : (at := at + steps[number % len(steps)])]
        found += frames.take_frames(buffer)
    decoded = map(frames.from_worker_decoder.decode, found)
    assert [each.text for each in decoded if isinstance(each, frames.Notice)] == texts
    assert not buffer


def test_what_is_longer_than_any_frame_is_none() -> None:
    """What came whole before it is not lost."""
    whole = frames.encode_frame(frames.Notice("last words"))
    found = frames.take_frames(bytearray(whole + b"\xff\xff\xff\xff and more"))
    assert frames.from_worker_decoder.decode(next(found)) == frames.Notice("last words")
    with pytest.raises(ValueError, match="exceeds"):
        next(found)
