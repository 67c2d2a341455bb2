"""Changed files of a pair are hashed once for all requests, while at least one client waits."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localspec.errors import LocalspecError, PullCancelled
from localspec.registry.store import files
from localspec.registry.store.files import HashCache
from tests.support.daemons import Home, RunningDaemon, UnixConnection, temporary_home, wait_for
from tests.support.pairs import cycle_pair
from tests.support.patience import PATIENCE
from tests.support.pulling import CATALOGUE

# A daemon that hashes only once the file "go" exists, and writes notes of what it does. While the
# file "read-only" exists, it cannot write records.
SLOW_DAEMON = """
import os, sys, time
from localspec.registry.store import files
from localspec.errors import StoreReadOnly
home = os.environ["LOCALSPEC_HOME"]
real = files.sha256_of

def slow(path, *, progress=None, cancel=None):
    def note(what):
        with open(f"{home}/hashed", "a") as notes:
            print(what, path.name, file=notes)
    note("began")
    try:
        while not os.path.exists(f"{home}/go"):
            time.sleep(0.01)
            if progress:
                progress(0)
            files.check_cancel(cancel)
        found = real(path, progress=progress, cancel=cancel)
    except BaseException:
        note("left")
        raise
    note("ended")
    return found

files.sha256_of = slow
from localspec.registry.store.store import Store
put = Store.put
def refusing(self, record):
    if os.path.exists(f"{home}/read-only"):
        raise StoreReadOnly("It cannot be written.")
    put(self, record)
Store.put = refusing
from localspec.daemon.handlers import models
models._CANCEL_TIMEOUT_S = 3600
from localspec.daemon.__main__ import main
sys.exit(main())
"""


class ChangedPair:
    """A home with a daemon and the pair "mine", whose target changed after it was hashed."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.go = home.root / "go"
        self.notes = home.root / "hashed"
        pair = cycle_pair(home.root / "files")
        self.target = Path(pair.target)
        self.go.touch()
        added = home.request(
            "POST", "/localspec/pairs", {"name": "mine", "target": pair.target, "draft": pair.draft}
        )
        assert added.status == 201, added.body
        self.change()

    def change(self) -> None:
        """Rewrite the target with the same content and a new time; hashing it waits for `go`."""
        self.go.unlink()
        self.notes.unlink(missing_ok=True)
        self.target.write_bytes(self.target.read_bytes())

    def list_notes(self, what: str) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if line.startswith(what)]


@pytest.fixture
def changed(home: Home) -> ChangedPair:
    home.start(program=SLOW_DAEMON)
    return ChangedPair(home)


def test_requests_share_one_hashing_and_block_no_others(changed: ChangedPair) -> None:
    home = changed.home
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(home.chat, f"say {n}", model="mine") for n in range(12)]
        wait_for(lambda: changed.list_notes("began"), "the hashing")
        assert home.chat("say hello").text == "hello"  # another pair is not blocked
        assert home.request("GET", "/v1/models").status == 200
        assert home.request("GET", "/localspec/pairs").status == 200
        size = changed.target.stat().st_size
        assert home.status()["hashing"] == {"file": "target.gguf", "done": 0, "size": size}
        assert "hashing   target.gguf 0%" in home.run("status").stdout
        assert not any(future.done() for future in futures)
        changed.go.touch()
        assert [future.result().text for future in futures] == [str(n) for n in range(12)]
    assert changed.list_notes("began") == ["began target.gguf"]
    assert home.status()["hashing"] is None
    assert home.chat("say again", model="mine").text == "again"
    assert len(changed.list_notes("began")) == 1


def test_hashing_ends_when_the_last_client_leaves(changed: ChangedPair) -> None:
    home = changed.home
    leaving: list[UnixConnection] = []
    for _ in range(8):
        leaving.append(home.open("/v1/chat/completions", "say x", model="mine"))
        wait_for(lambda: changed.list_notes("began"), "the hashing")
    # This request came after the others, so the daemon has accepted all of them.
    assert home.chat("say hello").text == "hello"
    for connection in leaving[:-1]:
        connection.close()
    assert home.chat("say hello").text == "hello"
    assert not changed.list_notes("left")  # one client still waits
    leaving[-1].close()
    wait_for(lambda: changed.list_notes("left"), "the end of a hashing that nobody waits for")
    assert len(changed.list_notes("began")) == 1
    changed.go.touch()
    assert home.chat("say y", model="mine").text == "y"
    assert len(changed.list_notes("ended")) == 1


def test_the_daemon_stops_without_waiting_for_hashing(changed: ChangedPair) -> None:
    """After a second signal it does not wait for answers either, and waiting clients get an error."""
    home = changed.home
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(home.chat, "say x", model="mine")
        wait_for(lambda: changed.list_notes("began"), "the hashing")
        pid = home.status()["pid"]
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        assert (future.result().status, future.result().error["code"]) == (503, "unavailable")
    wait_for(lambda: changed.list_notes("left"), "the end of the hashing")


def test_hashes_are_remembered_in_a_read_only_store(changed: ChangedPair) -> None:
    home = changed.home
    (home.root / "read-only").touch()
    changed.go.touch()
    for _ in range(3):
        assert home.chat("say x", model="mine").text == "x"
        home.request("POST", "/localspec/unload")
    assert changed.list_notes("began") == ["began target.gguf"]
    changed.change()
    changed.go.touch()
    assert home.chat("say x", model="mine").text == "x"
    assert changed.list_notes("began") == ["began target.gguf"]


def test_a_hanging_hub_blocks_nobody() -> None:
    """Its socket accepts connections and sends nothing; a pull is cancelled all the same."""
    with socket.socket() as hub, temporary_home() as home, ThreadPoolExecutor(16) as pool:
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        home.use_fake()
        home.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
        home.environment["HF_HOME"] = str(home.root / "hf")
        catalogue = home.root / "config" / "models.toml"
        catalogue.parent.mkdir(exist_ok=True)
        catalogue.write_text(CATALOGUE)
        RunningDaemon(home, program=SLOW_DAEMON)
        changed = ChangedPair(home)
        assert home.request("POST", "/localspec/pulls", {"name": "tiny"}).status == 202
        hanging, _ = hub.accept()
        cancels = [pool.submit(home.request, "DELETE", "/localspec/pulls/tiny") for _ in range(12)]
        wait_for(lambda: home.request("GET", "/localspec/pulls").json["pulls"], "the pull")
        changed.go.touch()
        assert home.chat("say x", model="mine").text == "x"
        assert home.request("GET", "/v1/models").status == 200
        assert {cancel.result().json["state"] for cancel in cancels} == {"cancelled"}
        hanging.close()


def test_threads_share_one_hashing_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"first")
    os.link(path, link)
    paths_read: list[Path] = []
    started, go = threading.Event(), threading.Event()
    real: Callable[..., str] = files.sha256_of

    def slow(path: Path, **more: threading.Event) -> str:
        paths_read.append(path)
        started.set()
        assert go.wait(PATIENCE)
        return real(path, **more)

    monkeypatch.setattr(files, "sha256_of", slow)
    hashes, cancelled = HashCache(), threading.Event()
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(hashes.sha256, path)
        assert started.wait(PATIENCE)
        others = [pool.submit(hashes.sha256, file) for file in (path, link)]
        leaving = pool.submit(hashes.sha256, link, cancelled)
        cancelled.set()
        assert isinstance(leaving.exception(), PullCancelled | LocalspecError)
        go.set()
        assert {future.result() for future in (first, *others)} == {real(path)}
    assert len(paths_read) == 1
    path.write_bytes(b"second, and longer")
    assert hashes.sha256(link) == real(path)
    assert len(paths_read) == 2


def test_verify_shows_the_progress_of_hashing(changed: ChangedPair) -> None:
    home = changed.home
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(home.run, "verify", "mine")
        wait_for(lambda: changed.list_notes("began"), "the hashing")
        time.sleep(1.5)  # a short hashing prints no progress
        changed.go.touch()
    result = verified.result()
    assert result.stderr.startswith("mine  hashing  0%  0 bytes of "), result
    assert "target.gguf: OK" in result.stdout
