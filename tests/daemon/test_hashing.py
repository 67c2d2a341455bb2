"""A pair whose files changed is hashed once, whoever asks, for as long as somebody waits."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localspec.errors import LocalspecError, PullCancelled
from localspec.registry.store import files
from localspec.registry.store.files import HashCache
from tests.support.daemons import Home, RunningDaemon, UnixConnection, temporary_home, wait_for
from tests.support.pairs import cycle_pair
from tests.support.pulling import CATALOGUE

# The daemon, which hashes no faster than the file "go" appears and notes what it does; where the
# file "read-only" lies, it can write no records.
SLOW = """
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


class Changed:
    """A home with a daemon and the pair "mine", whose target has changed since it was hashed."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.go = home.root / "go"
        self.notes = home.root / "hashed"
        made = cycle_pair(home.root / "files")
        self.target = Path(made.target)
        self.go.touch()
        added = home.request(
            "POST",
            "/localspec/pairs",
            {"name": "mine", "target": made.target, "draft": made.draft},
        )
        assert added.status == 201, added.body
        self.change()

    def change(self) -> None:
        """Its text is the same and its time another; hashing it waits for `go`."""
        self.go.unlink()
        self.notes.unlink(missing_ok=True)
        self.target.write_bytes(self.target.read_bytes())

    def noted(self, what: str) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if line.startswith(what)]


@pytest.fixture
def changed(home: Home) -> Iterator[Changed]:
    home.use_fake()
    daemon = RunningDaemon(home, program=SLOW)
    yield Changed(home)
    daemon.stop()


def test_many_requests_wait_for_one_reading_and_nobody_else_waits(changed: Changed) -> None:
    home = changed.home
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(home.chat, f"say {n}", model="mine") for n in range(12)]
        wait_for(lambda: changed.noted("began"), "the hashing")
        assert home.chat("say hello").text == "hello"  # of another pair
        assert home.request("GET", "/v1/models").status == 200
        assert home.request("GET", "/localspec/pairs").status == 200
        size = changed.target.stat().st_size
        assert home.status()["hashing"] == {"file": "target.gguf", "done": 0, "size": size}
        assert "hashing   target.gguf 0%" in home.run("status").stdout
        assert not any(each.done() for each in asked)
        changed.go.touch()
        assert [each.result().text for each in asked] == [str(n) for n in range(12)]
    assert changed.noted("began") == ["began target.gguf"]
    assert home.status()["hashing"] is None
    assert home.chat("say again", model="mine").text == "again"
    assert len(changed.noted("began")) == 1


def test_it_ends_when_all_who_asked_have_left_and_begins_anew_for_the_next(
    changed: Changed,
) -> None:
    home = changed.home
    leaving: list[UnixConnection] = []
    for _ in range(8):
        leaving.append(home.open("/v1/chat/completions", "say x", model="mine"))
        wait_for(lambda: changed.noted("began"), "the hashing")
    assert home.chat("say hello").text == "hello"  # it came after them, so they are all heard
    for connection in leaving[:-1]:
        connection.close()
    assert home.chat("say hello").text == "hello"
    assert not changed.noted("left")  # one waits still
    leaving[-1].close()
    wait_for(lambda: changed.noted("left"), "the end of a hashing that nobody waits for")
    assert len(changed.noted("began")) == 1
    changed.go.touch()
    assert home.chat("say y", model="mine").text == "y"
    assert len(changed.noted("ended")) == 1


def test_the_end_of_the_daemon_waits_for_no_hashing(changed: Changed) -> None:
    """Told twice, it does not wait for answers either; whoever waits for one is told."""
    home = changed.home
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(home.chat, "say x", model="mine")
        wait_for(lambda: changed.noted("began"), "the hashing")
        pid = home.status()["pid"]
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        assert (asked.result().status, asked.result().error["code"]) == (503, "unavailable")
    wait_for(lambda: changed.noted("left"), "the end of the hashing")


def test_what_was_hashed_is_known_although_it_cannot_be_written_down(changed: Changed) -> None:
    home = changed.home
    (home.root / "read-only").touch()
    changed.go.touch()
    for _ in range(3):
        assert home.chat("say x", model="mine").text == "x"
        home.request("POST", "/localspec/unload")
    assert changed.noted("began") == ["began target.gguf"]
    changed.change()
    changed.go.touch()
    assert home.chat("say x", model="mine").text == "x"
    assert changed.noted("began") == ["began target.gguf"]


def test_a_hub_that_hangs_holds_up_nobody_who_does_not_pull() -> None:
    """Its sockets take connections and say nothing; whoever cancels waits, and nobody else."""
    with socket.socket() as hub, temporary_home() as home, ThreadPoolExecutor(16) as pool:
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        home.use_fake()
        home.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
        home.environment["HF_HOME"] = str(home.root / "hf")
        catalogue = home.root / "config" / "models.toml"
        catalogue.parent.mkdir(exist_ok=True)
        catalogue.write_text(CATALOGUE)
        daemon = RunningDaemon(home, program=SLOW)
        changed = Changed(home)
        assert home.request("POST", "/localspec/pulls", {"name": "tiny"}).status == 202
        hanging, _ = hub.accept()
        cancels = [pool.submit(home.request, "DELETE", "/localspec/pulls/tiny") for _ in range(12)]
        wait_for(lambda: home.request("GET", "/localspec/pulls").json["pulls"], "the pull")
        changed.go.touch()
        assert home.chat("say x", model="mine").text == "x"
        assert home.request("GET", "/v1/models").status == 200
        assert not any(cancel.done() for cancel in cancels)
        hanging.close()
        hub.close()
        assert {cancel.result().json["state"] for cancel in cancels} == {"cancelled"}
        daemon.stop()


def test_a_file_is_read_once_by_all_threads_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"first")
    os.link(path, link)
    read: list[Path] = []
    begun, go = threading.Event(), threading.Event()
    real: Callable[..., str] = files.sha256_of

    def slow(each: Path, **more: threading.Event) -> str:
        read.append(each)
        begun.set()
        assert go.wait(10)
        return real(each, **more)

    monkeypatch.setattr(files, "sha256_of", slow)
    hashes, left = HashCache(), threading.Event()
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(hashes.sha256, path)
        assert begun.wait(10)
        others = [pool.submit(hashes.sha256, each) for each in (path, link)]
        leaving = pool.submit(hashes.sha256, link, left)
        left.set()
        assert isinstance(leaving.exception(), PullCancelled | LocalspecError)
        go.set()
        assert {each.result() for each in (first, *others)} == {real(path)}
    assert len(read) == 1
    path.write_bytes(b"second, and longer")
    assert hashes.sha256(link) == real(path)
    assert len(read) == 2


def test_verify_shows_how_far_the_hashing_of_a_changed_file_is(changed: Changed) -> None:
    home = changed.home
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(home.run, "verify", "mine")
        wait_for(lambda: changed.noted("began"), "the hashing")
        time.sleep(1.5)  # what is over sooner needs no lines
        changed.go.touch()
    shown = verified.result()
    assert shown.stderr.startswith("mine  hashing  0%  0 bytes of "), shown
    assert "target.gguf: OK" in shown.stdout
