"""Recordings of streams: whatever is read of them, in whatever parts, is what was written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import accumulate
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.daemon.http import recordings
from localspec.daemon.http.recordings import Recording, Recordings
from localspec.daemon.http.sse import Emit, EventStream
from localspec.errors import Cancelled, InvalidRequest, Unavailable
from tests.support.asynchronous import asynchronous

EVENTS = st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"") + b"\n\n"))
LIMIT = 40


async def write_all(recording: Recording, messages: list[list[bytes]]) -> None:
    for events in messages:
        await recording.write({"type": "http.response.body", "body": b"".join(events)})
        await asyncio.sleep(0)
    recording.finish()


async def read(recording: Recording, position: int = 0) -> bytes:
    return b"".join([data async for data in recording.follow(position)])


@given(st.lists(EVENTS), st.data())
@asynchronous
async def test_readers_at_any_time_and_position_get_the_rest(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    events = [event for group in messages for event in group]
    written = b"".join(events)
    positions = data.draw(st.lists(st.integers(0, len(written) + 3), max_size=5))
    delays = [data.draw(st.integers(0, 6)) for _ in positions]

    async def read_late(recording: Recording, position: int, delay: int) -> bytes:
        for _ in range(delay):
            await asyncio.sleep(0)
        return await read(recording, position)

    recording = Recording()
    readers = [
        asyncio.create_task(read_late(recording, *reader))
        for reader in zip(positions, delays, strict=True)
    ]
    await write_all(recording, messages)
    bodies = await asyncio.gather(*readers)
    assert bodies == [written[position:] for position in positions]
    for number in range(-1, len(events)):
        position = recording.position_after(number)
        assert await read(recording, position) == b"".join(events[number + 1 :])
    with pytest.raises(InvalidRequest, match="no event"):
        recording.position_after(len(events))


@given(st.lists(EVENTS, min_size=1))
def test_a_long_stream_loses_whole_events_of_its_beginning(messages: list[list[bytes]]) -> None:
    events = [event for group in messages for event in group]
    written = b"".join(events)

    async def run() -> None:
        recording = Recording()
        await write_all(recording, messages)
        kept = await read(recording, recording.first_byte)
        assert len(kept) <= LIMIT
        assert written.endswith(kept)
        assert recording.total_bytes == len(written)
        assert recording.first_byte in [0, *accumulate(map(len, events))]
        dropped = sum(end <= recording.first_byte for end in accumulate(map(len, events)))
        assert await read(recording, recording.position_after(dropped - 1)) == kept
        if dropped:
            with pytest.raises(InvalidRequest, match="no longer kept"):
                recording.position_after(dropped - 2)
            with pytest.raises(InvalidRequest, match="was dropped"):
                await read(recording, recording.first_byte - 1)

    with mock.patch.object(recordings, "MAX_BYTES", LIMIT):
        asyncio.run(run())


def stream(work: Callable[[Emit], object]) -> EventStream:
    return EventStream(work, done=False)  # type: ignore[arg-type] # a coroutine function


async def wait_forever(emit: Emit) -> None:
    await emit(b"begun\n\n")
    await asyncio.Event().wait()


async def write_one(emit: Emit) -> None:
    await emit(b"one\n\n")


@asynchronous
async def test_the_oldest_that_has_ended_makes_room() -> None:
    kept = Recordings()
    running = kept.start(("kind", "running"), stream(wait_forever))
    for number in range(recordings.MAX_RECORDINGS - 1):
        await read(kept.start(("kind", str(number)), stream(write_one)))
    await read(kept.start(("kind", "new"), stream(write_one)))
    names = [name for name, _ in kept.find("kind")]
    assert names == ["running", *map(str, range(1, recordings.MAX_RECORDINGS - 1)), "new"]
    await kept.remove(("kind", "running"))
    assert (await read(running)).startswith(b"begun\n\n")


@asynchronous
async def test_no_room_is_an_error_that_starts_nothing() -> None:
    kept = Recordings()
    for number in range(recordings.MAX_RECORDINGS):
        kept.start(("kind", str(number)), stream(wait_forever))
    with pytest.raises(Unavailable):
        kept.start(("kind", "more"), stream(write_one))
    # One with the same key takes the place of its predecessor.
    assert await read(kept.start(("kind", "0"), stream(write_one))) == b"one\n\n"
    await kept.close(0)
    assert kept.find("kind") == []


def test_a_recording_is_kept_for_a_time() -> None:
    async def run() -> None:
        kept = Recordings()
        await read(kept.start(("kind", "a"), stream(write_one)))
        while kept.get(("kind", "a")):
            await asyncio.sleep(0)

    with mock.patch.object(recordings, "KEPT_S", 0.0):
        asyncio.run(run())


@asynchronous
async def test_a_recording_that_is_removed_ends_with_an_error() -> None:
    kept = Recordings()
    recording = kept.start(("kind", "a"), stream(wait_forever))
    assert await anext(recording.follow()) == b"begun\n\n"
    await kept.remove(("kind", "a"))
    _, error, rest = (await read(recording)).split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "cancelled"
    assert rest == b""


@asynchronous
async def test_a_recording_that_is_removed_before_it_began_is_an_error() -> None:
    kept = Recordings()
    recording = kept.start(("kind", "a"), stream(wait_forever))
    await kept.remove(("kind", "a"))
    with pytest.raises(Cancelled):
        await read(recording)
