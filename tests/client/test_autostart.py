"""Tests of starting and replacing daemons for a client."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import localspec
from localspec.client import autostart
from localspec.client.api import Client
from localspec.errors import ContextExceeded, ModelNotFound, NoDaemon, Unavailable
from localspec.paths import default_paths
from tests.support.daemons import Home, RunningDaemon, wait_for
from tests.support.patience import PATIENCE

OTHER_DAEMON = f"""
import sys, localspec
localspec.API_VERSION = {localspec.API_VERSION + 1}
localspec.__version__ = "99.0"
from localspec.daemon.__main__ import main
sys.exit(main())
"""


def test_a_daemon_is_gone_when_another_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client may have started a daemon before the first was seen to be gone."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    lock = default_paths().lock
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text("1\n", encoding="ascii")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with autostart.until_gone():
            lock.write_text("2\n", encoding="ascii")  # the lock is never free in between
        monkeypatch.setattr(autostart, "STOP_TIMEOUT_S", 0.1)
        with pytest.raises(Unavailable), autostart.until_gone():
            pass


@pytest.fixture
def other_daemon(home: Home) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon of another release."""
    home.use_fake()
    process = subprocess.Popen([sys.executable, "-c", OTHER_DAEMON], env=home.environment)
    wait_for(lambda: autostart.listens(str(home.socket)), "it")
    yield process
    process.terminate()
    process.wait()


def test_an_idle_daemon_of_another_version_is_replaced(
    home: Home, other_daemon: subprocess.Popen[bytes]
) -> None:
    run = home.run("ask", "say hello")
    assert (run.returncode, run.stdout, run.stderr) == (0, "hello\n", "")
    assert other_daemon.wait() == 0
    assert home.status()["version"] == localspec.__version__


def test_a_busy_daemon_of_another_version_is_left_alone(
    home: Home, other_daemon: subprocess.Popen[bytes]
) -> None:
    with home.streaming("forever") as stream:
        stream.readline()
        message = home.refused("ask", "say hello")
        assert "The running daemon is localspec 99.0" in message
        assert "localspec stop" in message
        assert other_daemon.poll() is None


def test_a_daemon_that_cannot_start_says_why(home: Home) -> None:
    home.use_fake()
    home.socket.mkdir(parents=True)
    home.socket.parent.chmod(0o700)
    message = home.refused("ask", "say hello", code=3)
    assert "The daemon did not start: " in message
    assert "is not a socket; remove it" in message
    assert "Traceback" not in message


def test_a_started_daemon_outlives_its_starter_and_can_be_stopped(home: Home) -> None:
    home.use_fake()
    assert home.run("start").returncode == 0
    assert home.status()["pair"]["state"] == "unloaded"
    assert home.run("stop").stdout == "The daemon has stopped.\n"
    assert home.run("stop").stdout == "No daemon is running.\n"


def test_the_methods_of_the_client(home: Home, daemon: RunningDaemon) -> None:
    client = Client(str(home.socket), autostart=False)
    messages = [{"role": "user", "content": "say hello"}]
    assert client.health() == {"status": "ok"}
    assert client.chat({"messages": messages})["choices"][0]["message"]["content"] == "hello"
    chunks = list(client.stream_chat({"messages": messages}))
    assert chunks[1]["choices"][0]["delta"]["content"] == "hello"
    assert client.status()["counts"]["requests"] == 2
    with pytest.raises(ModelNotFound):
        client.chat({"messages": messages, "model": "nope"})
    refused = {"messages": [{"role": "user", "content": "refuse context_length_exceeded"}]}
    with pytest.raises(ContextExceeded) as caught:
        list(client.stream_chat(refused))
    assert caught.value.param == "messages"
    client.shutdown()
    assert daemon.process.wait(timeout=PATIENCE) == 0
    with pytest.raises(NoDaemon):
        client.status()


def test_closing_a_stream_cancels_it(home: Home) -> None:
    home.start(parallel=1)
    client = Client(str(home.socket), autostart=False)
    stream = client.stream_chat({"messages": [{"role": "user", "content": "forever"}]})
    next(stream)
    stream.close()
    assert json.loads(home.chat("running").text) == 0


def test_stop_ends_a_daemon_that_does_not_answer(home: Home, daemon: RunningDaemon) -> None:
    home.socket.unlink()
    assert home.run("stop").stdout == "The daemon has stopped.\n"
    assert daemon.process.wait(timeout=PATIENCE) == 0


def test_a_second_stop_ends_the_answers_that_the_first_waits_for(home: Home) -> None:
    home.start()
    with home.streaming("forever") as response:
        response.readline()
        first = home.open_command("stop")
        assert first.stderr is not None
        assert first.stderr.readline().startswith("Waiting for 1 answer in progress")
        assert home.must_run("stop") == "The daemon has stopped.\n"
        assert first.communicate(timeout=PATIENCE)[0] == "The daemon has stopped.\n"
