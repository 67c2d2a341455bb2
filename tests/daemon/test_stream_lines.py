"""Each value of a stream is one line, whatever a client takes for the end of a line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.daemon.http.sse import EventStream, LineStream, NamedEvent


async def work(_: object) -> None: ...


@pytest.mark.parametrize("kind", [EventStream, LineStream])
@given(
    text=st.text(
        st.sampled_from('a"\\\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\u0085é😀'), min_size=1
    )
)
def test_each_value_is_one_line(kind: type[EventStream], text: str) -> None:
    line = kind(work).event({"text": text, text: 1}).decode()
    assert line.splitlines() == [line.rstrip("\n")] + [""] * (kind is EventStream)
    assert json.loads(line.removeprefix("data: ")) == {"text": text, text: 1}


def test_the_name_of_an_event_has_a_line_of_its_own() -> None:
    event = EventStream(work).event(NamedEvent("delta", {"text": "\u2028"}))
    assert event.splitlines() == [b"event: delta", b'data: {"text":"\\u2028"}', b""]
