"""The queue: order, limit, and nobody who leaves takes a place along."""

from __future__ import annotations

import asyncio

import pytest

from localspec.daemon.worker.queue import Admission, Job
from localspec.errors import QueueFull, Unavailable


async def hold(admission: Admission, log: list[int], number: int, done: asyncio.Event) -> None:
    async with admission.place():
        log.append(number)
        await done.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_places_are_given_in_order_and_the_limit_holds() -> None:
    async def scenario() -> None:
        admission, log, done = Admission(parallel=2, limit=2), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, log, n, done)) for n in range(4)]
        await settle()
        assert (log, admission.running, admission.waiting) == ([0, 1], 2, 2)
        with pytest.raises(QueueFull) as caught:
            async with admission.place():
                pass
        assert caught.value.retry_after
        done.set()
        await asyncio.gather(*tasks)
        assert (log, admission.running, admission.waiting) == ([0, 1, 2, 3], 0, 0)

    asyncio.run(scenario())


def test_whoever_leaves_the_queue_leaves_its_order_intact() -> None:
    async def scenario() -> None:
        admission, log, done = Admission(parallel=1, limit=9), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, log, n, done)) for n in range(4)]
        await settle()
        tasks[1].cancel()
        await settle()
        tasks[0].cancel()  # hands its place to 2 …
        await asyncio.sleep(0)
        tasks[2].cancel()  # … which leaves before it wakes up
        await settle()
        assert (log, admission.running, admission.waiting) == ([0, 3], 1, 0)
        done.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.running == 0

    asyncio.run(scenario())


def test_a_closed_queue_lets_nobody_in_but_serves_those_who_wait() -> None:
    async def scenario() -> None:
        admission, log, done = Admission(parallel=1, limit=9), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, log, n, done)) for n in range(2)]
        await settle()
        admission.close()
        with pytest.raises(Unavailable):
            async with admission.place():
                pass
        done.set()
        await asyncio.gather(*tasks)
        assert log == [0, 1]

    asyncio.run(scenario())


def test_those_who_wait_can_be_told_that_it_is_over() -> None:
    async def scenario() -> None:
        admission, log, done = Admission(parallel=1, limit=9), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, log, n, done)) for n in range(2)]
        await settle()
        admission.fail_waiting(Unavailable("Over."))
        with pytest.raises(Unavailable, match="Over"):
            await tasks[1]
        done.set()
        await tasks[0]
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(scenario())


def test_an_editor_has_a_place_that_no_chat_takes() -> None:
    async def scenario() -> None:
        admission, log, done = Admission(parallel=1, limit=9), list[str](), asyncio.Event()

        async def come(name: str) -> None:
            async with admission.place(Job(editor=name.startswith("editor"))):
                log.append(name)
                await done.wait()

        names = ("chat 1", "chat 2", "editor 1", "editor 2", "editor 3")
        tasks = [asyncio.create_task(come(name)) for name in names]
        await settle()
        assert (log, admission.running, admission.waiting) == (["chat 1", "editor 1"], 2, 3)
        tasks[2].cancel()
        await settle()
        assert log == ["chat 1", "editor 1", "editor 2"]
        tasks[0].cancel()  # editors first, in their own order
        await settle()
        assert (log[3:], admission.waiting) == (["editor 3"], 1)
        tasks[4].cancel()  # one editor keeps no chat waiting
        await settle()
        assert (log[4:], admission.running) == (["chat 2"], 2)
        done.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(scenario())
