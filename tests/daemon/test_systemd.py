"""Socket activation: an inherited socket is served and kept, and the service manager is notified."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.daemon.http import sockets
from tests.support.daemons import Home, RunningDaemon
from tests.support.patience import PATIENCE

# Like systemd between fork and exec, this makes the socket descriptor 3.
HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "localspec"}
os.execv(sys.executable, [sys.executable, "-m", "localspec.daemon"])
"""


class Manager:
    """A service manager that holds the daemon's socket and receives its notifications."""

    def __init__(self, home: Home, notify: str) -> None:
        self.home = home
        home.use_fake()
        home.socket.parent.mkdir(mode=0o700)
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(home.socket))
        self.listening.listen()
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(notify.replace("@", "\0"))
        self._ear.settimeout(PATIENCE)
        home.environment["NOTIFY_SOCKET"] = notify

    def start(self, handed: socket.socket | None = None) -> subprocess.Popen[str]:
        number = (handed or self.listening).fileno()
        return subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(number)],
            env=self.home.environment,
            pass_fds=[number],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )

    def told(self) -> list[str]:
        return self._ear.recv(4096).decode().splitlines()

    def close(self) -> None:
        self.listening.close()
        self._ear.close()


@pytest.fixture(params=["in a folder", "abstract"])
def manager(request: pytest.FixtureRequest, home: Home) -> Iterator[Manager]:
    if request.param == "abstract" and sys.platform != "linux":
        notify = str(home.root / "n2")  # only Linux has those names
    else:
        notify = f"@{home.root}" if request.param == "abstract" else str(home.root / "notify")
    service_manager = Manager(home, notify)
    yield service_manager
    service_manager.close()


def test_a_request_before_the_start_is_answered(home: Home, manager: Manager) -> None:
    with socket.socket(socket.AF_UNIX) as early:
        early.connect(str(home.socket))
        early.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        early.settimeout(PATIENCE)
        process = manager.start()
        assert early.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert manager.told()[0] == "READY=1"
    assert home.chat("say hello").text == "hello"

    with home.streaming("slow 20") as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        messages = manager.told()
        assert messages == ["STOPPING=1", "STATUS=Stopping; finishing 1 answers"]
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert process.communicate(timeout=PATIENCE)[0] == ""
    assert process.returncode == 0
    assert home.socket.exists()  # the manager keeps it for the next daemon

    second = manager.start()
    assert manager.told()[0] == "READY=1"
    assert home.chat("say again").text == "again"
    second.terminate()
    assert second.communicate(timeout=PATIENCE)[0] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows another process's files")
def test_the_engine_inherits_no_descriptors(home: Home, manager: Manager) -> None:
    process = manager.start()
    manager.told()
    home.chat("say hello")
    worker = home.status()["worker_pid"]
    environment = Path(f"/proc/{worker}/environ").read_bytes().decode()
    assert "LISTEN_" not in environment
    open_files = [file.readlink() for file in Path(f"/proc/{worker}/fd").iterdir()]
    number = manager.listening.fileno()
    assert Path(f"/proc/self/fd/{number}").readlink() not in open_files
    process.terminate()
    process.communicate()


def test_stop_names_the_service_manager(home: Home, manager: Manager) -> None:
    process = manager.start()
    manager.told()
    run = home.run("stop")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("The daemon has stopped.\nsystemd will start it again")
    assert process.wait(PATIENCE) == 0
    process.communicate()


def test_a_socket_that_does_not_listen_is_refused(home: Home, manager: Manager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        process = manager.start(tcp)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert output == (
        "localspec: File descriptor 3, passed by the service manager, is not a listening Unix "
        "stream socket; for TCP, set `listen` in config.toml.\n"
    )


def test_variables_for_another_process_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    assert not sockets.has_inherited_sockets()
    assert sockets.take_inherited_sockets() == []
    assert "LISTEN_FDS" not in os.environ


def test_a_missing_manager_is_no_error(home: Home) -> None:
    home.use_fake()
    home.environment["NOTIFY_SOCKET"] = str(home.root / "nobody")
    daemon = RunningDaemon(home)
    assert home.chat("say hello").text == "hello"
    daemon.stop()
    assert "could not be told" in home.log.read_text()
