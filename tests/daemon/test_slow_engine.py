"""A slow engine is not ended, but a hanging one is, even within a pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.daemons import Home, RunningDaemon

WISH: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 2}


def use_slow(home: Home, seconds: float) -> Path:
    home.environment["LOCALSPEC_WATCHDOG"] = "1"
    return home.use_slow_engine(seconds)


def test_a_prompt_slower_than_the_watchdog_is_answered(home: Home) -> None:
    """The prompt has 360 rows of 5 ms, so that one pass would be silent for 1.8 s."""
    use_slow(home, 0.005)
    daemon = RunningDaemon(home)
    assert home.chat("x", **WISH).status == 200
    first = daemon.worker_pid()
    answer = home.chat("a long prompt " * 120, **WISH)
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] > 300
    assert daemon.worker_pid() == first
    assert home.status()["counts"]["worker_deaths"] == 0


def test_a_hanging_pass_ends_its_engine(home: Home) -> None:
    hang = use_slow(home, 0.0)
    RunningDaemon(home)
    assert home.chat("x", **WISH).status == 200
    hang.touch()
    answer = home.chat("x", **WISH)
    assert answer.status == 504
    assert answer.error["code"] == "worker_timeout"
    hang.unlink()
    assert home.chat("x", **WISH).status == 200
