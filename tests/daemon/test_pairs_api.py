"""The endpoints /localspec/pairs, /pulls, /gc and /drafts."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import FAKE_WORKER, RunningDaemon, UnixConnection, wait_for
from tests.support.patience import PATIENCE
from tests.support.pulling import PullingHome, pulling_home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PullingHome]:
    """Run a daemon with the scripted engine, and a hub."""
    with pulling_home(tmp_path) as home:
        home.environment["LOCALSPEC_ENGINE"] = f"{sys.executable} {FAKE_WORKER}"
        RunningDaemon(home)
        yield home


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PullingHome]:
    """Run one daemon for all tests that leave nothing behind."""
    with pulling_home(tmp_path_factory.mktemp("pair")) as home:
        RunningDaemon(home)
        yield home


def read_events(home: PullingHome, method: str, target: str, body: Any = None) -> list[Any]:
    answer = home.request(method, target, body)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.events[-1] == "[DONE]"
    return [json.loads(event) for event in answer.events[:-1]]


def pull(home: PullingHome) -> list[Any]:
    assert home.request("POST", "/localspec/pulls", {"name": "tiny"}).status == 202
    return read_events(home, "GET", "/localspec/pulls/tiny/events")


def test_a_pull_with_many_watchers_is_transferred_once(home: PullingHome) -> None:
    home.hub.rate = 800_000
    first = home.request("POST", "/localspec/pulls", {"name": "tiny"})
    assert (first.status, first.json["state"], first.json["name"]) == (202, "checking", "tiny")
    assert home.request("POST", "/localspec/pulls", {"name": "LITTLE"}).status == 202
    states_by_watcher: list[list[Any]] = []
    watchers = [
        threading.Thread(
            target=lambda: states_by_watcher.append(
                read_events(home, "GET", "/localspec/pulls/tiny/events")
            )
        )
        for _ in range(3)
    ]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    assert len(states_by_watcher) == 3
    for states in states_by_watcher:
        assert [state["state"] for state in states][-1] == "done"
        assert [state["done"] for state in states] == sorted(state["done"] for state in states)
        assert {file["file"] for file in states[-1]["files"]} == {"target.gguf", "draft.gguf"}
    assert home.hub.sent < 1_100_000
    (listed,) = home.request("GET", "/localspec/pulls").json["pulls"]
    assert listed["state"] == "done"


# Every process hashes half of a file and goes on once the file "go" exists. Pulls run in a child process.
HALF = """
import os, time
from localspec.registry.store import files
real = files.sha256_of

def half(path, *, progress=None, cancel=None):
    while not os.path.exists(GO):
        if progress:
            progress(path.stat().st_size // 2)
        files.check_cancel(cancel)
        time.sleep(0.01)
    return real(path, progress=progress, cancel=cancel)

files.sha256_of = half
"""


def start_hashing_halves(home: PullingHome) -> RunningDaemon:
    site = home.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"GO = {str(home.root / 'go')!r}\n{HALF}")
    home.environment["PYTHONPATH"] = os.pathsep.join([str(site), home.environment["PYTHONPATH"]])
    return RunningDaemon(home)


def test_the_progress_of_hashing_is_reported(tmp_path: Path) -> None:
    with pulling_home(tmp_path) as home:
        start_hashing_halves(home)
        half = sum(file.stat().st_size // 2 for file in home.files)
        for again in range(2):
            assert home.request("POST", "/localspec/pulls", {"name": "tiny"}).status == 202
            state = wait_for(
                lambda: (
                    (state := home.request("GET", "/localspec/pulls/tiny").json)["hashed"] == half
                    and state
                ),
                "half of the hashing",
            )
            assert (state["state"], state["done"]) == ("verifying", state["size"]), again
            assert re.search(r"verifying +50%", home.run("pulls").stdout)
            (home.root / "go").touch()
            last = read_events(home, "GET", "/localspec/pulls/tiny/events")[-1]
            assert (last["state"], last["hashed"]) == ("done", last["size"])
            (home.root / "go").unlink()


def test_pull_and_verify_show_the_progress_of_hashing(tmp_path: Path) -> None:
    with pulling_home(tmp_path) as home:
        start_hashing_halves(home)
        for command, doing in (("pull", "verifying"), ("verify", "hashing")):
            with home.open_command(command, "tiny") as run:
                assert run.stderr
                # Of `verify` half of the first file, which is not all.
                progress_line = next(line for line in run.stderr if f"tiny  {doing}  " in line)
                assert re.match(rf"tiny  {doing}  [1-9]\d?%  \d.* of \d", progress_line), (
                    progress_line
                )
                (home.root / "go").touch()
                assert run.wait(PATIENCE) == 0
            (home.root / "go").unlink()


def test_a_watcher_that_leaves_does_not_stop_the_pull(home: PullingHome) -> None:
    home.hub.rate = 500_000
    home.request("POST", "/localspec/pulls", {"name": "tiny"})
    connection = UnixConnection(home.socket)
    connection.request("GET", "/localspec/pulls/tiny/events")
    connection.getresponse().readline()
    connection.close()
    home.hub.rate = 0
    wait_for(
        lambda: home.request("GET", "/localspec/pulls/tiny").json["state"] == "done", "the pull"
    )


def test_a_shutdown_ends_the_stream_with_a_state(tmp_path: Path) -> None:
    with pulling_home(tmp_path) as home:
        daemon = RunningDaemon(home)
        home.hub.rate = 100_000  # it is not done for a while, however busy the machine is
        home.request("POST", "/localspec/pulls", {"name": "tiny"})
        wait_for(lambda: home.hub.sent > 10_000, "some bytes")
        connection = UnixConnection(home.socket)
        connection.request("GET", "/localspec/pulls/tiny/events")
        response = connection.getresponse()
        first = response.readline()  # the stream has begun before the end does
        assert daemon.stop() == 0
        *_, last, done, _ = (first + response.read()).decode().split("\n\n")
        connection.close()
        assert json.loads(last.split("\n")[-1].removeprefix("data: "))["state"] == "interrupted"
        assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "code", "says"),
    [
        ("POST", "/localspec/pulls", {"name": "nope"}, 404, "model_not_found", "no pair 'nope'"),
        ("POST", "/localspec/pulls", {}, 400, "invalid_request", "'name' is missing"),
        (
            "POST",
            "/localspec/pulls",
            {"name": "builtin"},
            400,
            "invalid_request",
            "part of the installation",
        ),
        ("POST", "/localspec/pulls", {"name": "tiny", "offline": True}, 503, "offline", "is set"),
        ("GET", "/localspec/pulls/tiny", None, 404, "not_found", "no pull of 'tiny'"),
        ("GET", "/localspec/pulls/tiny/events", None, 404, "not_found", "no pull of 'tiny'"),
        ("DELETE", "/localspec/pulls/x", None, 404, "not_found", "no pull of 'x'"),
        ("GET", "/localspec/pairs/tiny", None, 404, "model_not_found", "localspec pull tiny"),
        ("GET", "/localspec/pairs/builtin?context=x", None, 400, "invalid_request", "'context'"),
        ("GET", "/localspec/pairs/..%2F..%2Fx", None, 404, "model_not_found", "no pair '../../x'."),
        ("GET", "/localspec/pairs/a%2Fb", None, 404, "model_not_found", "no pair 'a/b'."),
        (
            "GET",
            "/localspec/pairs/",
            None,
            404,
            "model_not_found",
            "no pair ''. See: localspec list",
        ),
        ("DELETE", "/localspec/pairs/a%2Fb", None, 404, "model_not_found", "no pair 'a/b'."),
        ("DELETE", "/localspec/pairs/", None, 404, "model_not_found", "no pair ''."),
        ("POST", "/localspec/pairs/a%2Fb/verify", None, 404, "model_not_found", "no pair 'a/b'."),
        ("POST", "/localspec/pairs//verify", None, 404, "model_not_found", "no pair ''."),
        ("DELETE", "/localspec/pulls/a%2Fb", None, 404, "not_found", "no pull of 'a"),
        ("GET", "/localspec/pulls/a%2Fb/events", None, 404, "not_found", "no pull of 'a"),
        ("DELETE", "/localspec/conversations/a%2Fb", None, 404, "not_found", "no conversation"),
        ("DELETE", "/localspec/pairs/tiny", None, 404, "model_not_found", "not pulled"),
        ("DELETE", "/localspec/pairs/builtin", None, 400, "invalid_request", "installation"),
        ("POST", "/localspec/pairs/tiny/verify", None, 404, "model_not_found", "not pulled"),
        ("POST", "/localspec/drafts", {"target": "/x.gguf"}, 404, "model_not_found", "/x.gguf"),
        (
            "POST",
            "/localspec/pairs",
            {"name": "a", "target": "relative.gguf"},
            400,
            "invalid_request",
            "must be an absolute path",
        ),
        (
            "POST",
            "/localspec/pairs",
            {"name": "A B", "target": "/x.gguf"},
            400,
            "invalid_request",
            "is not a valid pair name",
        ),
        (
            "POST",
            "/localspec/pairs",
            {"name": "a", "target": "/nowhere/x.gguf"},
            400,
            "bad_gguf",
            "does not exist",
        ),
    ],
)
def test_refusals(
    shared_home: PullingHome, method: str, target: str, body: Any, status: int, code: str, says: str
) -> None:
    answer = shared_home.request(method, target, body)
    assert (answer.status, answer.error["code"]) == (status, code), answer.body
    assert says in answer.error["message"]
    assert not shared_home.hub.requests


def test_only_a_pair_that_is_not_in_use_is_removed(home: PullingHome) -> None:
    assert pull(home)[-1]["state"] == "done"
    with home.streaming("forever", model="tiny") as stream:
        stream.readline()
        answer = home.request("DELETE", "/localspec/pairs/tiny")
        assert (answer.status, answer.error["code"]) == (409, "conflict")
        assert home.request("POST", "/localspec/unload", {}).status == 409
        measure = {"target": "tiny", "measure": True}
        assert home.request("POST", "/localspec/drafts", measure).status == 409
    wait_for(lambda: not home.status()["running"], "the end of the answer")
    assert home.status()["pair"]["state"] == "ready"
    gone = wait_for(
        lambda: (
            (answer := home.request("DELETE", "/localspec/pairs/tiny")).status == 200 and answer
        ),
        "the removal",  # after the engine has noticed the disconnect
    )
    removed = gone.json
    assert home.status()["pair"]["state"] == "unloaded"
    assert (removed["name"], removed["kept"]) == ("tiny", [])
    assert removed["freed"] == sum(file.stat().st_size for file in home.files)


def test_a_pair_that_is_loaded_and_idle_can_be_replaced(home: PullingHome) -> None:
    target, draft = map(str, home.files)
    body = {"name": "mine", "target": target, "draft": draft}
    assert home.request("POST", "/localspec/pairs", body).status == 201
    with home.streaming("forever", model="mine") as stream:
        stream.readline()
        again = {**body, "draft": None, "replace": True}
        answer = home.request("POST", "/localspec/pairs", again)
        assert (answer.status, answer.error["code"]) == (409, "conflict")
    wait_for(lambda: not home.status()["running"], "the end of the answer")
    replaced = wait_for(
        lambda: (
            (answer := home.request("POST", "/localspec/pairs", again)).status == 201 and answer
        ),
        "the other one",
    )
    assert replaced.json["draft"] is None
    assert home.status()["pair"]["state"] == "unloaded"
    assert home.chat("say x", model="mine").text == "x"


def test_verification_reports_progress_and_each_file(home: PullingHome) -> None:
    pull(home)
    states = read_events(home, "POST", "/localspec/pairs/tiny/verify")
    assert states[0]["files"] is None
    assert states[-1]["done"] == states[-1]["size"]
    assert [(file["role"], file["problem"]) for file in states[-1]["files"]] == [
        ("target", ""),
        ("draft", ""),
    ]


def test_a_failed_pull_says_why_in_its_last_state(home: PullingHome) -> None:
    home.hub.files["own/target", "target.gguf"].faults.gated = True
    last = pull(home)[-1]
    assert (last["state"], last["code"]) == ("failed", "gated")
    assert "hf auth login" in last["message"]


def test_an_idle_daemon_is_small_also_after_a_pull(home: PullingHome) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells")
    pull(home)
    home.request("GET", "/localspec/pairs?all=1")
    text = Path(f"/proc/{home.status()['pid']}/status").read_text()
    resident = int(text.split("VmRSS:")[1].split()[0]) >> 10
    assert resident <= 60
