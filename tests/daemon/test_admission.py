"""The queue: its order and limit, and requests that leave it."""

from __future__ import annotations

import asyncio

import pytest

from localspec.daemon.worker.queue import Admission, Job
from localspec.errors import QueueFull, Unavailable
from localspec.protocol.frames import Generate, TextPrompt
from tests.support.asynchronous import asynchronous


async def hold(admission: Admission, log: list[int], number: int, finished: asyncio.Event) -> None:
    async with admission.place():
        log.append(number)
        await finished.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynchronous
async def test_slots_are_given_in_order_up_to_the_limit() -> None:
    admission, log, finished = Admission(parallel=2, limit=2), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, log, n, finished)) for n in range(4)]
    await settle()
    assert (log, admission.running, admission.waiting) == ([0, 1], 2, 2)
    with pytest.raises(QueueFull) as caught:
        async with admission.place():
            pass
    assert caught.value.retry_after
    finished.set()
    await asyncio.gather(*tasks)
    assert (log, admission.running, admission.waiting) == ([0, 1, 2, 3], 0, 0)


def test_what_is_read_ahead_takes_no_chats_place() -> None:
    admission = Admission(parallel=1, limit=0)
    guess, chat = (
        Job.of(Generate(1, TextPrompt("x"), priority=kind)) for kind in ("ahead", "chat")
    )
    admission._start(guess)
    assert admission.check_room(chat)


@asynchronous
async def test_leaving_the_queue_keeps_its_order() -> None:
    admission, log, finished = Admission(parallel=1, limit=9), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, log, n, finished)) for n in range(4)]
    await settle()
    tasks[1].cancel()
    await settle()
    tasks[0].cancel()  # hands its place to 2 …
    await asyncio.sleep(0)
    tasks[2].cancel()  # … which leaves before it wakes up
    await settle()
    assert (log, admission.running, admission.waiting) == ([0, 3], 1, 0)
    finished.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.running == 0


@asynchronous
async def test_a_closed_queue_serves_only_waiting_requests() -> None:
    admission, log, finished = Admission(parallel=1, limit=9), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, log, n, finished)) for n in range(2)]
    await settle()
    admission.close()
    with pytest.raises(Unavailable):
        async with admission.place():
            pass
    finished.set()
    await asyncio.gather(*tasks)
    assert log == [0, 1]


@asynchronous
async def test_waiting_requests_can_be_ended() -> None:
    admission, log, finished = Admission(parallel=1, limit=9), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, log, n, finished)) for n in range(2)]
    await settle()
    admission.fail_waiting(Unavailable("Over."))
    with pytest.raises(Unavailable, match="Over"):
        await tasks[1]
    finished.set()
    await tasks[0]
    assert (admission.running, admission.waiting) == (0, 0)


@asynchronous
async def test_a_slot_is_reserved_for_editors() -> None:
    admission, log, finished = Admission(parallel=1, limit=9), list[str](), asyncio.Event()

    async def wait_for_slot(name: str) -> None:
        async with admission.place(Job(editor=name.startswith("editor"))):
            log.append(name)
            await finished.wait()

    names = ("chat 1", "chat 2", "editor 1", "editor 2", "editor 3")
    tasks = [asyncio.create_task(wait_for_slot(name)) for name in names]
    await settle()
    assert (log, admission.running, admission.waiting) == (["chat 1", "editor 1"], 2, 3)
    tasks[2].cancel()
    await settle()
    assert log == ["chat 1", "editor 1", "editor 2"]
    tasks[0].cancel()  # editors go first, in their own order
    await settle()
    assert (log[3:], admission.waiting) == (["editor 3"], 1)
    tasks[4].cancel()  # a single editor does not delay chats
    await settle()
    assert (log[4:], admission.running) == (["chat 2"], 2)
    finished.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)
