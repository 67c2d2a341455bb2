"""The text that a stream of token bytes may send, and when."""

from __future__ import annotations

import codecs
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.text_stream import Chunk, TextStream
from localspec.protocol.pieces import Text

# Few letters, so that stop strings meet, overlap and begin without ending.
letters = st.text(alphabet="abcé☃", max_size=30)
stop_strings = st.lists(st.text(alphabet="abcé☃", min_size=1, max_size=4), max_size=3)


@st.composite
def cuts(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> list[tuple[bytes, bool]]:
    """Draw bytes in pieces, some of which are drafted."""
    raw = draw(source)
    places = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    edges = [0, *places, len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(edges)]
    return [(piece, draw(st.booleans())) for piece in pieces]


valid = cuts(letters.map(str.encode))
# Bytes that begin, continue and break characters; 0xED with 0xA0 is the beginning of a surrogate.
broken = st.lists(st.sampled_from(b" \x80\xa0\xc3\xe2\xed\xf0\xf4"), max_size=20).map(bytes)
anything = cuts(st.one_of(st.binary(max_size=20), broken, letters.map(str.encode)))


def text_of(chunk: Chunk) -> str:
    return "".join(piece.text for piece in chunk.pieces if isinstance(piece, Text))


def drafted_of(chunk: Chunk) -> list[tuple[int, int]]:
    assert len(chunk.pieces) <= 1
    return [span for piece in chunk.pieces if isinstance(piece, Text) for span in piece.drafted]


def decode(raw: bytes, final: bool) -> str:
    return codecs.utf_8_decode(raw, "replace", final)[0]


def reference(pieces: list[tuple[bytes, bool]], stops: list[str]) -> tuple[str, str]:
    """Return (text to send, its marks), computed from the whole text after every piece."""
    marks = ""
    raws = list(accumulate((piece for piece, _ in pieces), initial=b""))[1:]
    texts = [decode(raw, False) for raw in raws] + [decode(b"".join(p for p, _ in pieces), True)]
    for text, drafted in zip(texts, [*(d for _, d in pieces), False], strict=True):
        marks += ("d" if drafted else "t") * (len(text) - len(marks))
        positions = [text.find(stop) for stop in stops if stop in text]
        if positions:
            return text[: min(positions)], marks[: min(positions)]
    return texts[-1], marks


def stream_pieces(
    pieces: list[tuple[bytes, bool]], stops: list[str]
) -> tuple[str, str, TextStream]:
    """Return (text, marks, stream) as the stream sends them piece by piece."""
    stream = TextStream(stops, reveals_draft=True)
    text = marks = ""
    chunks = [stream.push(piece, drafted) for piece, drafted in pieces]
    for chunk in [*chunks, stream.flush()]:
        chunk_marks = ["t"] * len(text_of(chunk))
        for start, end in drafted_of(chunk):
            assert 0 <= start < end <= len(chunk_marks)
            chunk_marks[start:end] = "d" * (end - start)
        text += text_of(chunk)
        marks += "".join(chunk_marks)
    return text, marks, stream


@given(anything, stop_strings)
def test_text_agrees_with_the_reference_for_any_pieces(
    pieces: list[tuple[bytes, bool]], stops: list[str]
) -> None:
    text, marks, stream = stream_pieces(pieces, stops)
    assert (text, marks) == reference(pieces, stops)
    full_text = decode(b"".join(piece for piece, _ in pieces), True)
    assert (stream.stopped is not None) == any(stop in full_text for stop in stops)


@given(anything, stop_strings)
def test_a_stop_string_is_never_shown_and_is_named(
    pieces: list[tuple[bytes, bool]], stops: list[str]
) -> None:
    text, _, stream = stream_pieces(pieces, stops)
    assert not any(stop in text for stop in stops)
    if stream.stopped is not None:
        assert stream.stopped in stops


@given(valid)
def test_no_half_character_is_shown(pieces: list[tuple[bytes, bool]]) -> None:
    stream = TextStream()
    for piece, drafted in pieces:
        assert "\ufffd" not in text_of(stream.push(piece, drafted))


@given(valid)
def test_without_stop_strings_only_half_characters_are_held(
    pieces: list[tuple[bytes, bool]],
) -> None:
    stream = TextStream()
    raw = b""
    text = ""
    for piece, drafted in pieces:
        raw += piece
        text += text_of(stream.push(piece, drafted))
        assert text == decode(raw, False)


@given(anything, stop_strings)
def test_held_text_is_shorter_than_the_longest_stop_string(
    pieces: list[tuple[bytes, bool]], stops: list[str]
) -> None:
    stream = TextStream(stops)
    raw, text = b"", ""
    for piece, drafted in pieces:
        raw += piece
        text += text_of(stream.push(piece, drafted))
        if stream.stopped is None:
            waiting = len(decode(raw, False)) - len(text)
            assert waiting < max((len(stop) for stop in stops), default=1)


def test_half_a_character_at_the_end_becomes_the_replacement_character() -> None:
    stream = TextStream()
    assert text_of(stream.push("☃".encode()[:2])) == ""
    assert text_of(stream.flush()) == "\ufffd"


def test_a_stop_string_across_pieces_is_cut_with_what_follows() -> None:
    stream = TextStream(["STOP"])
    texts = [text_of(stream.push(piece)) for piece in (b"one ST", b"OP two", b" three")]
    assert texts == ["one ", "", ""]
    assert stream.stopped == "STOP"
    assert text_of(stream.flush()) == ""


def test_partial_stop_string_is_sent_once_it_cannot_match() -> None:
    stream = TextStream(["</end>"])
    assert text_of(stream.push(b"a </en")) == "a "
    assert text_of(stream.push(b"try>")) == "</entry>"


def test_an_empty_stop_string_stops_nothing() -> None:
    stream = TextStream([""])
    assert text_of(stream.push(b"text")) == "text"
    assert stream.stopped is None


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_shorter_of_two_stop_strings_at_one_place_is_named(stops: list[str]) -> None:
    stream = TextStream(stops)
    assert text_of(stream.push(b"xabc")) == "x"
    assert stream.stopped == "ab"


def test_a_character_counts_as_drafted_when_its_last_byte_was() -> None:
    raw = "é".encode()
    stream = TextStream(reveals_draft=True)
    stream.push(raw[:1], drafted=True)
    assert drafted_of(stream.push(raw[1:], drafted=False)) == []
    stream.push(raw[:1], drafted=False)
    assert drafted_of(stream.push(raw[1:] + b"x", drafted=True)) == [(0, 2)]
