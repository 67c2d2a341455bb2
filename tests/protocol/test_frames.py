"""Frames between the daemon and its engine."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.protocol import frames
from localspec.protocol.frames import Delta, Timings, TokenLogprob
from localspec.protocol.pieces import Piece, Text

PIECE = st.tuples(st.text(max_size=6), st.integers(1, 4), st.booleans())


@given(st.lists(PIECE, min_size=1, max_size=8))
def test_merged_deltas_equal_separate_ones(pieces: list[tuple[str, int, bool]]) -> None:
    """The text, ids, drafted spans, the latest count and timings are preserved."""
    deltas, token_count, at = [], 0, 0
    for text, count, drafted in pieces:
        ids = list(range(token_count, token_count + count))
        token_count += count
        scored = [TokenLogprob(token, b"%d" % token, -1.0) for token in ids]
        spans = [(0, len(text))] if drafted else []
        shown: list[Piece] = [Text("content", text, at, spans)]
        at += len(text)
        deltas.append(Delta(7, shown, scored, token_count, ids, Timings(predicted_n=token_count)))
    merged = reduce(Delta.merge, deltas)
    assert (merged.id, merged.text) == (7, "".join(text for text, _, _ in pieces))
    assert merged.ids == [logprob.id for logprob in merged.logprobs] == list(range(token_count))
    marked = [merged.text[start:end] for start, end in merged.drafted]
    assert marked == [text for text, _, drafted in pieces if drafted]
    assert (merged.tokens, merged.timings) == (token_count, deltas[-1].timings)


@given(st.lists(st.text(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_frames_are_complete_however_their_bytes_arrive(texts: list[str], steps: list[int]) -> None:
    data = b"".join(frames.encode_frame(frames.Notice(text)) for text in texts)
    buffer, position = bytearray(), 0
    bodies: list[bytes] = []
    for number in range(len(data)):
        buffer += data[position : (position := position + steps[number % len(steps)])]
        bodies += frames.take_frames(buffer)
    decoded = map(frames.from_worker_decoder.decode, bodies)
    assert [frame.text for frame in decoded if isinstance(frame, frames.Notice)] == texts
    assert not buffer


def test_a_frame_above_the_size_limit_is_an_error() -> None:
    """A complete frame before it is not lost."""
    complete = frames.encode_frame(frames.Notice("last words"))
    bodies = frames.take_frames(bytearray(complete + b"\xff\xff\xff\xff and more"))
    assert frames.from_worker_decoder.decode(next(bodies)) == frames.Notice("last words")
    with pytest.raises(ValueError, match="exceeds"):
        next(bodies)
