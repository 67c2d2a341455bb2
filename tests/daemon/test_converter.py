"""The processes that convert files: which of them are started, shared, limited and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_projector import png
from localspec.daemon.completion import files
from localspec.daemon.completion.conversion_child import Conversion
from localspec.daemon.completion.files import Converter
from localspec.errors import Unavailable
from tests.support.asynchronous import asynchronous
from tests.support.documents import SQUARE, pdf, show, slow_pdf

REPORT = pdf(show("Hello"), f"{show('Look')} {SQUARE}")
SLOW = slow_pdf()  # It needs more time than any of these tests takes.
LIMIT_S = 120.0  # of one scenario, on any machine
Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Return the list of all processes that are started from now on."""
    started, start_process = Processes(), subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start_process(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def begin(
    shared: Converter, *documents: bytes, with_pictures: bool = True
) -> list[asyncio.Task[Conversion]]:
    conversions = (shared.convert(data, with_pictures=with_pictures) for data in documents)
    return [asyncio.create_task(conversion) for conversion in conversions]


async def count(processes: Processes, number: int) -> None:
    """Wait until so many processes were started."""
    while len(processes) < number:
        await asyncio.sleep(0.01)


async def leave(tasks: Sequence[asyncio.Task[Conversion]]) -> None:
    """Have the clients behind these conversions leave."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_file_is_converted_once(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(shared: Converter) -> list[Conversion]:
        return [
            await shared.convert(data, with_pictures=with_pictures)
            for data in (REPORT, pdf(show("B")), REPORT)
            for with_pictures in (True, False)
        ]

    results = asyncio.run(scenario(Converter()))
    assert results[:2] == results[4:]
    assert len(processes) == 4
    monkeypatch.setattr(files, "CACHE_BYTES", 0)  # then the last one alone is kept
    asyncio.run(scenario(Converter()))
    assert len(processes) == 4 + 6


def test_a_file_that_exceeds_a_limit_is_tried_once(processes: Processes) -> None:
    async def scenario(shared: Converter) -> list[Conversion]:
        return [await shared.convert(SLOW, with_pictures=True) for _ in range(2)]

    first, second = asyncio.run(scenario(Converter(cpu_limit_s=1)))
    assert first == second
    assert first.problem == "cannot be read: that takes too much time or memory"
    assert len(processes) == 1


@asynchronous
async def test_a_process_that_something_else_ends_says_nothing_about_its_file(
    processes: Processes,
) -> None:
    shared = Converter()
    [task] = begin(shared, SLOW)
    await count(processes, 1)
    processes[0].kill()
    with pytest.raises(Unavailable, match="was ended; try again") as raised:
        await task
    assert raised.value.retry_after
    again = begin(shared, SLOW)
    await count(processes, 2)
    await leave(again)


def test_equal_files_share_a_process_until_the_last_client_leaves(processes: Processes) -> None:
    async def scenario(shared: Converter) -> None:
        tasks = begin(shared, *[SLOW] * 3)
        await count(processes, 1)
        await leave(tasks[:2])
        tasks += begin(shared, SLOW)
        await leave(tasks[2:3])
        assert not tasks[3].done()
        assert processes[0].poll() is None
        await leave(tasks[3:])
        assert await asyncio.to_thread(processes[0].wait) == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(scenario(Converter()), LIMIT_S))
    assert len(processes) == 1


def test_those_who_share_a_process_get_the_same_result(processes: Processes) -> None:
    async def scenario(shared: Converter) -> list[Conversion]:
        first, *others = begin(shared, *[REPORT] * 4)
        await count(processes, 1)
        await leave([first])
        return await asyncio.gather(*others)

    results = asyncio.run(asyncio.wait_for(scenario(Converter()), LIMIT_S))
    assert [len(result.pages) for result in results] == [2] * 3
    assert len(processes) == 1


@asynchronous
async def test_too_many_files_are_refused_for_a_while(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_CONVERSIONS", files.MAX_PROCESSES + 1)
    other = [SLOW + b"\n" * number for number in range(files.MAX_CONVERSIONS)]

    shared = Converter()
    tasks = begin(shared, *other, other[0])
    await count(processes, files.MAX_PROCESSES)
    with pytest.raises(Unavailable, match="files are being converted; try again") as raised:
        await shared.convert(REPORT, with_pictures=True)
    assert raised.value.retry_after
    assert not any(task.done() for task in tasks)
    await leave(tasks)
    assert (await shared.convert(REPORT, with_pictures=True)).pages


def _gives_way(pid: int) -> bool:
    """Return whether a process's session gives way to other sessions, or the kernel has no such groups."""
    group = Path(f"/proc/{pid}/autogroup")
    return not group.exists() or group.read_text().endswith(" nice 19\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of this kind")
@asynchronous
async def test_a_process_that_takes_long_gives_way(processes: Processes) -> None:
    shared = Converter()
    tasks = begin(shared, SLOW)
    await count(processes, 1)
    pid = processes[0].pid
    while os.sched_getscheduler(pid) != os.SCHED_IDLE or not _gives_way(pid):
        await asyncio.sleep(0.01)
    await leave(tasks)


@asynchronous
async def test_a_picture_waits_for_no_document(processes: Processes) -> None:
    shared = Converter()
    tasks = begin(shared, *[SLOW + b"\n" * number for number in range(files.MAX_PROCESSES + 1)])
    await count(processes, files.MAX_PROCESSES)
    assert (await shared.convert(png(1), with_pictures=True)).pages
    assert not any(task.done() for task in tasks)
    await leave(tasks)


def test_an_abort_ends_what_runs_waits_or_comes_later(processes: Processes) -> None:
    async def scenario(shared: Converter) -> None:
        kept = await shared.convert(REPORT, with_pictures=True)
        tasks = begin(shared, *[SLOW + b"\n" * number for number in range(5)])
        await count(processes, 1 + files.MAX_PROCESSES)
        shared.abort()
        tasks += begin(shared, SLOW)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == ["The daemon was stopped."] * 6
        assert await shared.convert(REPORT, with_pictures=True) == kept

    asyncio.run(asyncio.wait_for(scenario(Converter()), LIMIT_S))
    first, *others = [process.returncode for process in processes]
    assert first in (0, -signal.SIGKILL)  # it has answered, and is not waited for
    assert others == [-signal.SIGKILL] * files.MAX_PROCESSES
