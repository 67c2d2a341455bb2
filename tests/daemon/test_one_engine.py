"""A pair never has more than one engine: a load waits for the end of the previous one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.daemons import Home, RunningDaemon, UnixConnection, alive, wait_for

# A daemon with a shorter timeout for an engine that does not end.
IMPATIENT = """
import sys
from localspec.daemon.worker import process as worker
worker._SHUTDOWN_GRACE_S, worker._SAVE_TIMEOUT_S = 0.2, 0.2
from localspec.daemon.__main__ import main
sys.exit(main())
"""


def has_two_engines(home: Home) -> bool:
    """Return whether two engines of a pair were alive at once."""
    return (home.root / "engine.two").exists()


def list_engines(home: Home) -> list[str]:
    return ["--alone", str(home.root / "engine")]


def stop_and_unload(home: Home, daemon: RunningDaemon, pool: ThreadPoolExecutor) -> int:
    """Suspend the engine, unload its pair and return its process id."""
    assert home.chat("say x").text == "x"
    old = daemon.worker_pid()
    os.kill(old, signal.SIGSTOP)
    pool.submit(home.request, "POST", "/localspec/unload")
    wait_for(lambda: home.status()["worker_pid"] != old, "the unloading")
    return old


def test_an_engine_that_does_not_end_is_ended_before_the_next_one_starts(home: Home) -> None:
    daemon = home.start(*list_engines(home), program=IMPATIENT)
    with ThreadPoolExecutor(8) as pool:
        old = stop_and_unload(home, daemon, pool)
        answers = [pool.submit(home.chat, f"say {n}") for n in range(4)]
        wait_for(lambda: home.status()["pair"]["state"] == "loading", "the load that waits")
        assert [answer.result().text for answer in answers] == ["0", "1", "2", "3"]
    assert not alive(old)
    assert not has_two_engines(home)
    assert home.status()["counts"]["worker_starts"] == 2
    assert home.status()["counts"]["worker_deaths"] == 0


def test_an_engine_that_still_saves_after_an_idle_time_is_waited_for(home: Home) -> None:
    home.start(*list_engines(home), "--end-delay", "0.7", idle_unload=0.1)
    assert home.chat("say a").text == "a"
    old = int((home.root / "engine.fake").read_text())
    wait_for(lambda: home.status()["worker_pid"] is None, "the idle time")
    assert home.chat("say b").text == "b"
    assert not alive(old)
    assert not has_two_engines(home)


@pytest.mark.parametrize("how", ["the client leaves", "the daemon is told to end"])
def test_a_load_that_waits_holds_up_neither_those_who_leave_nor_the_end(
    how: str, home: Home
) -> None:
    daemon = home.start(*list_engines(home), program=IMPATIENT)
    with ThreadPoolExecutor(4) as pool:
        old = stop_and_unload(home, daemon, pool)
        connection = UnixConnection(home.socket)
        connection.request("POST", "/localspec/load", "{}")
        wait_for(lambda: home.status()["pair"]["state"] == "loading", "the load that waits")
        if how == "the client leaves":
            connection.close()
            assert home.chat("say next").text == "next"
        else:
            new = pool.submit(daemon.stop)
            connection.getresponse().read()
            connection.close()
            assert new.result() == 0
    assert not alive(old)
    assert not has_two_engines(home)


def test_loads_unloads_and_deaths_in_any_order_leave_one_engine_for_each_pair(home: Home) -> None:
    other = home.root / "other.gguf"
    other.touch()
    home.start(*list_engines(home), "--end-delay", "0.03")
    chosen = random.Random(1)

    def ask(number: int) -> int:
        kind = chosen.randrange(5)
        if kind == 0:
            return home.request("POST", "/localspec/unload", {}).status
        if kind == 1:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(home.status()["worker_pid"], signal.SIGKILL)
        return home.chat("say x", model=str(other) if kind == 2 else "").status

    with ThreadPoolExecutor(4) as pool:
        statuses = set(pool.map(ask, range(24)))
    assert statuses <= {200, 409, 500, 503}
    home.request("POST", "/localspec/reset", {})  # it may have died too often
    assert home.chat("say y").text == "y"
    assert not has_two_engines(home)
