"""When a draft is tuned without being asked for, and when training waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.client.pairs import PairsClient
from localspec.errors import NoDaemon
from localspec.extras.tune import nightly, running
from localspec.machine import CommandResult, Host, is_on_battery
from tests.support.daemons import RunningDaemon, alive, temporary_home, wait_for


def write_supply(folder: Path, **values: str) -> None:
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / name).write_text(value + "\n")


LINUX = replace(Host.current(), system="Linux")


@pytest.mark.parametrize(
    ("mains", "battery", "expected"),
    [
        ("1", "Discharging", False),
        ("0", "Discharging", True),
        ("0", "Full", False),
        (None, "Discharging", True),
        (None, None, False),
    ],
)
@pytest.mark.parametrize("mouse", [None, "Discharging"])
def test_a_battery_that_discharges_without_mains(
    tmp_path: Path, mains: str | None, battery: str | None, expected: bool, mouse: str | None
) -> None:
    """That of a mouse does not count."""
    if mains is not None:
        write_supply(tmp_path / "AC", type="Mains", online=mains)
    if battery is not None:
        write_supply(tmp_path / "BAT0", type="Battery", status=battery)
    if mouse is not None:
        write_supply(tmp_path / "hidpp", type="Battery", status=mouse, scope="Device")
    assert is_on_battery(LINUX, tmp_path) is expected


@pytest.mark.parametrize("source", ["AC Power", "Battery Power"])
def test_a_mac_says_where_its_power_comes_from(source: str) -> None:
    out = f"Now drawing from '{source}'\n -InternalBattery-0 100%; charged; 0:00"
    mac = replace(LINUX, system="Darwin", run=lambda _: CommandResult(0, out))
    assert is_on_battery(mac) is (source == "Battery Power")


def no_daemon(_: object) -> dict[str, Any]:
    raise NoDaemon("none runs")


def test_training_waits_for_answers_on_battery_and_while_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = PairsClient(autostart=False)
    monkeypatch.setattr(running, "is_on_battery", lambda _: False)
    monkeypatch.setattr(running, "memory_bytes", lambda: 100)
    monkeypatch.setattr(running, "available_bytes", lambda _: 50)
    monkeypatch.setattr(PairsClient, "status", no_daemon)
    assert running.find_pause_reason(client, LINUX) == ""
    monkeypatch.setattr(running, "available_bytes", lambda _: 5)
    assert "memory" in running.find_pause_reason(client, LINUX)
    monkeypatch.setattr(running, "is_on_battery", lambda _: True)
    assert "battery" in running.find_pause_reason(client, LINUX)
    monkeypatch.setattr(PairsClient, "status", lambda _: {"running": 0, "waiting": 1})
    assert "answers" in running.find_pause_reason(client, LINUX)


def test_a_night_has_one_run_when_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = SimpleNamespace(requests=5)
    metrics = SimpleNamespace(counts=counts)
    config = SimpleNamespace(tune_by_night=False)
    paths = SimpleNamespace(tuned=tmp_path)
    state: Any = SimpleNamespace(config=config, paths=paths, pairs=SimpleNamespace(metrics=metrics))
    stop, looks = threading.Event(), [0]
    runs: list[str] = []
    hour, day, on_battery = [12], [7], [True]

    def local_time() -> Any:
        looks[0] += 1
        return SimpleNamespace(tm_hour=hour[0], tm_yday=day[0])

    def wait_for_looks() -> None:
        first = looks[0]
        wait_for(lambda: looks[0] > first + 3, "the next looks")

    monkeypatch.setattr(nightly, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(nightly, "_run", lambda _stop, option, *_options: runs.append(option))
    monkeypatch.setattr(nightly, "is_on_battery", lambda _: on_battery[0])
    monkeypatch.setattr(nightly, "time", SimpleNamespace(localtime=local_time))
    nightly.start(state, stop)
    try:
        wait_for_looks()
        hour[0] = 3
        wait_for_looks()
        config.tune_by_night = True
        wait_for_looks()
        assert not runs
        on_battery[0] = False
        wait_for(lambda: bool(runs), "the run")
        wait_for_looks()
        assert runs == ["--by-night"]
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / "record.json").touch()
        for night, tunes in ((8, True), (9, False)):  # a tuned draft is checked in any case
            config.tune_by_night = tunes
            day[0] = night
            wait_for_looks()
        assert runs[1:] == ["--check", "--by-night", "--check"]
    finally:
        stop.set()


def test_what_a_run_by_night_says_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "a sentence of many words. "
    program = f"print({text!r} * 10_000); raise SystemExit(3)"  # more than a pipe holds
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert command[3:] == ["localspec", "tune", "--by-night"]
        return popen([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(nightly, "POLL_INTERVAL_S", 0.01)
    with caplog.at_level("INFO", "localspec.tune"):
        nightly._run(threading.Event(), "--by-night")
    assert f"ended with code 3: {(text * 10_000).strip()}" in caplog.text


NIGHT = """
import sys, types
from localspec.daemon.__main__ import main
from localspec.extras.tune import nightly

nightly.CHECK_INTERVAL_S = 0.01
nightly.NIGHT_HOURS = range(24)
nightly.is_on_battery = lambda _: False
nightly.sys = types.SimpleNamespace(executable={program!r})
sys.exit(main())
"""


def test_a_run_by_night_ends_with_the_daemon(tmp_path: Path) -> None:
    program, started = tmp_path / "tune", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\ntrap '' TERM\necho $$ >{started}\nexec sleep 600\n")
    program.chmod(0o700)
    with temporary_home() as home:
        home.run("tune", "--auto")
        daemon = RunningDaemon(home, NIGHT.format(program=str(program)))
        wait_for(lambda: started.exists() and started.read_text().strip(), "the run")
        pid = int(started.read_text())
        assert alive(pid)
        assert daemon.stop() == 0
        assert not alive(pid)


def test_it_is_switched_on_and_off() -> None:
    with temporary_home() as home:
        for flag, value in (("--auto", "true"), ("--no-auto", "false")):
            assert home.run("tune", flag).returncode == 0
            assert home.run("config", "get", "tune_by_night").stdout.strip() == value
        assert home.run("tune", "--auto", "--files", ".").returncode == 2
