"""Test that a pull interrupted by the daemon's end resumes when the daemon starts again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.registry.hub.transfer import count_written_bytes
from tests.support.daemons import FAKE_WORKER, temporary_home, wait_for
from tests.support.gguf_files import model
from tests.support.patience import PATIENCE
from tests.support.pulling import PullingHome, pulling_home

REPO = "maker/Tiny-8B-GGUF"
BIG = model(filler=12_000_000, seed=1).data()
SMALL = model(layers=1, filler=2_000_000, seed=2).data()
NEEDED = len(BIG) + len(SMALL)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PullingHome]:
    with pulling_home(tmp_path) as home:
        home.environment["LOCALSPEC_ENGINE"] = f"{sys.executable} {FAKE_WORKER}"
        home.hub.add(REPO, "Tiny-8B-Q4_K_M.gguf", BIG)
        home.hub.add(REPO, "Tiny-8B-F16.gguf", BIG + b"\0" * 32)
        home.hub.add("maker/draft", "d-Q8_0.gguf", SMALL)
        home.catalogue.write_text(
            '[pairs.tin]\nsummary = "s"\n'
            '[pairs.tin.target]\nrepo = "else/Tiny-14b"\nfile = "t.gguf"\n'
            '[pairs.tin.draft]\nrepo = "maker/draft"\nfile = "d-Q8_0.gguf"\n'
        )
        yield home


def journal_file(home: PullingHome) -> Path:
    return home.root / "state" / "pulls.json"


def list_pulls(home: PullingHome) -> dict[str, Any]:
    return {pull["name"]: pull for pull in json.loads(home.run("pulls", "--json").stdout)}


def start_pull(home: PullingHome, *arguments: str) -> None:
    """Start a pull of some seconds and wait until a part of it has arrived."""
    home.hub.rate = 1.5e6
    home.must_run("pull", *(arguments or (REPO,)), "--no-wait")
    wait_for(lambda: home.hub.sent > NEEDED // 10, "some bytes")


def count_missing_bytes(home: PullingHome) -> int:
    """Return the number of bytes of the pair that are still missing."""
    remaining = 0
    for data in (BIG, SMALL):
        name = hashlib.sha256(data).hexdigest()
        # In this order, since a pull may move the part to its place meanwhile.
        written = count_written_bytes(home.store / "parts" / f"{name}.part", len(data))
        if not (home.store / "blobs" / name).exists():
            remaining += len(data) - written
    return remaining


def wait_until_settled(home: PullingHome) -> tuple[int, int]:
    """Wait until the hub sends nothing more, and return the missing bytes and the sent bytes.

    Data in flight when a daemon ends is lost: one piece and the contents of the system's buffers,
    which hold more on a busy machine than on a quiet one.
    """
    bytes_sent = -1
    while bytes_sent != (bytes_sent := home.hub.sent):
        time.sleep(0.1)
    return count_missing_bytes(home), bytes_sent


def daemon_pid(home: PullingHome) -> int:
    return int((home.root / "run" / "daemon.lock").read_text())


def test_a_pull_resumes_after_a_stop_and_after_a_kill(home: PullingHome) -> None:
    home.environment["HF_TOKEN"] = "hf_canaryofthisshell"
    start_pull(home)
    watching = home.open_command("pull", "own/draft", REPO)
    wait_for(lambda: list_pulls(home).get("own-draft", {}).get("state") == "done", "the small one")
    run = home.run("stop")
    stdout, stderr = watching.communicate(timeout=PATIENCE)
    assert "own-draft is installed" in stdout
    assert "is interrupted because the daemon is stopping; it resumes" in stderr
    assert stderr.splitlines()[-1] == f"localspec: 1 of 2 pulls failed: {REPO}"
    assert watching.returncode == 1
    assert "canary" not in journal_file(home).read_text()
    assert "The pull of maker-tiny-8b resumes when the daemon starts again" in run.stdout
    at_stop, _ = wait_until_settled(home)
    assert stat.S_IMODE(journal_file(home).stat().st_mode) == 0o600
    listed = home.run("pulls")
    assert listed.stdout.startswith("No daemon is running, so nothing is pulled.")
    assert list_pulls(home) == {}
    assert home.run("status").returncode == 3  # A list starts nothing.
    home.run("start")
    assert list_pulls(home)["maker-tiny-8b"]["state"] in ("checking", "downloading")
    wait_for(lambda: count_missing_bytes(home) < at_stop, "more bytes")
    os.kill(daemon_pid(home), signal.SIGKILL)
    at_kill, bytes_sent = wait_until_settled(home)
    assert at_kill < at_stop < NEEDED
    home.hub.rate = 0
    home.run("start")
    record = home.store / "pairs" / "maker-tiny-8b.json"
    wait_for(record.exists, "the pair")
    pair = json.loads(record.read_text())
    assert pair["target"]["parts"][0]["file"] == "Tiny-8B-Q4_K_M.gguf"
    assert pair["draft"]["parts"][0]["file"] == "d-Q8_0.gguf"
    assert home.hub.sent - bytes_sent <= at_kill + 0.05 * NEEDED  # The headers are read again.
    wait_for(lambda: not journal_file(home).exists(), "nothing to be wanted")
    assert home.run("stop").stdout == "The daemon has stopped.\n"


def test_gc_keeps_parts_of_pulls_that_will_resume(home: PullingHome) -> None:
    start_pull(home)
    home.run("stop")
    home.hub.list_page = True
    # The hub fails from now on, so the pull fails but stays in the journal.
    for entry in home.hub.files.values():
        entry.faults.portal = True
    home.run("start")
    wait_for(lambda: list_pulls(home)["maker-tiny-8b"]["state"] == "failed", "the failure")
    parts = {path.name for path in (home.store / "parts").glob("*.part")}
    assert parts
    assert ".part" not in home.run("gc", "-y").stdout
    assert parts == {path.name for path in (home.store / "parts").glob("*.part")}
    run = home.run("pulls", "cancel", REPO)
    assert (
        run.stdout
        == "The pull is cancelled; anything already downloaded is kept for the next one.\n"
    )
    assert not journal_file(home).exists()
    assert ".part" in home.run("gc", "-y").stdout
    assert not list((home.store / "parts").glob("*.part"))


def test_only_interrupted_pulls_are_journaled(home: PullingHome) -> None:
    start_pull(home)
    assert journal_file(home).exists()
    home.run("pulls", "cancel", "maker-tiny-8b")
    assert not journal_file(home).exists()
    home.hub.rate = 0
    assert home.run("pull", f"{REPO}:Q9").returncode == 1
    assert home.run("pull", REPO).returncode == 0
    assert not journal_file(home).exists()


def test_watching_a_pull_starts_no_daemon_that_was_stopped() -> None:
    """It was stopped between the answer that the pull has begun and the first look at its progress."""
    body = json.dumps({"name": "tiny", "state": "queued"}).encode()
    with temporary_home() as home, socket.socket(socket.AF_UNIX) as daemon:
        home.socket.parent.mkdir(mode=0o700, parents=True)
        daemon.bind(str(home.socket))
        daemon.listen()
        with home.open_command("pull", "tiny") as command:
            connection, _ = daemon.accept()
            daemon.close()
            home.socket.unlink()
            with connection:
                connection.recv(1 << 16)
                head = f"HTTP/1.1 202 Accepted\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
            _, errors = command.communicate(timeout=PATIENCE)
        assert command.returncode == 3, errors
        assert "daemon" in errors
        assert not home.socket.exists()
