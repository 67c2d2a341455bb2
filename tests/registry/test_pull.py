"""Pulls: checks before any weight is fetched, concurrent pulls, cancelling, reuse of files, offline."""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from localspec.errors import (
    CannotRollBack,
    DiskFull,
    DoesNotFit,
    NotMatched,
    Offline,
    PullCancelled,
)
from localspec.registry.catalogue import CataloguePair
from localspec.registry.header import fit
from localspec.registry.pulls.messages import FileState
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.targets import PullTarget
from localspec.registry.store import files as files_module
from localspec.registry.store import integrity
from localspec.registry.store.local import add_own_pair
from tests.registry.conftest import QUICK
from tests.registry.pulling import DRAFT, SIZE, TARGET, Rig, create_pulls, flip_byte
from tests.support.daemons import wait_for
from tests.support.gguf_files import BOOL, Gguf, model, sha256, shards
from tests.support.hub import TestHub
from tests.support.patience import PATIENCE
from tests.support.programs import in_hub


def test_a_pair_is_pulled(rig: Rig) -> None:
    updates: list[tuple[FileState, ...]] = []
    record = rig.puller.pull("p", rig.pair, updates.append)
    rig.assert_installed()
    assert record.target.repo == "own/target"
    assert record.target.parts[0].sha256 == sha256(TARGET)
    assert sum(file.done for file in updates[-1]) == sum(file.size for file in updates[-1]) == SIZE
    assert [file.file for file in updates[-1]] == ["target.gguf", "draft.gguf"]
    assert rig.hub.sent < 1.2 * SIZE  # small files: the headers weigh
    assert not [request for request in rig.hub.requests if request.authorized]


def test_a_finished_pull_leaves_no_parts(rig: Rig) -> None:
    rig.faults.close_after = [1000]
    rig.pull()
    remaining = [path.name for path in rig.store.parts.iterdir() if path.suffix != ".lock"]
    assert not remaining


# Refusals before any weight is fetched.


def pull_refused_by_headers(
    rig: Rig, error: type[Exception], target: Gguf | None = None, draft: Gguf | None = None
) -> str:
    """Pull a pair of 2 × 20 MB that must be refused by its headers alone, and return the message."""
    files = {"target": target or model(layers=4), "draft": draft or model(layers=1)}
    for repo, file in files.items():
        file.tensors.insert(0, ("filler.weight", (64, (20 << 20) // 128), 1))
        rig.hub.add(f"own/{repo}", f"{repo}.gguf", file.data())
    with pytest.raises(error) as caught:
        rig.pull()
    weights = sum(len(entry.data) for entry in rig.hub.files.values())
    assert rig.hub.sent < 0.01 * weights
    rig.assert_absent()
    return str(caught.value)


def test_a_mismatched_pair_is_refused_by_its_headers(rig: Rig) -> None:
    """Less than 1 % of the weights is fetched, and the first difference is named."""
    draft = model(layers=1).put("tokenizer.ggml.add_bos_token", BOOL, True)
    message = pull_refused_by_headers(rig, NotMatched, draft=draft)
    assert message == (
        "target.gguf and draft.gguf: not a matched pair: add_bos_token is false in the target "
        "and true in the draft."
    )


def test_an_architecture_that_cannot_roll_back_is_refused(rig: Rig) -> None:
    target = model(architecture="jamba")
    message = pull_refused_by_headers(rig, CannotRollBack, target)
    assert "'jamba'" in message


def test_too_little_memory_is_refused(rig: Rig) -> None:
    rig.puller.memory = fit.FreeMemory(ram=10 << 20)
    message = pull_refused_by_headers(rig, DoesNotFit)
    assert "10 MiB are free" in message


def test_too_little_disk_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before the start, with the bytes needed and the bytes free."""
    real = os.statvfs

    def full(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 1000  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    message = pull_refused_by_headers(rig, DiskFull)
    assert re.search(r"[\d.]+ MiB more are needed \(and 64.0 MiB in reserve\)", message)
    assert "iB are free" in message


def test_a_hash_that_differs_from_the_catalogues_is_noted(rig: Rig) -> None:
    target = msgspec.structs.replace(rig.pair.target, sha256="0" * 64)
    record = rig.puller.pull("p", msgspec.structs.replace(rig.pair, target=target))
    assert "differs from the catalogue's" in record.notes[0]


# Without a network.


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every use of a socket an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_offline_pairs_work_and_a_pull_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nothing opens a socket."""
    from localspec.registry.header.fit import FreeMemory, LoadOptions
    from localspec.registry.store.local import describe_pair

    rig.pull()
    request_count = len(rig.hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    request.getfixturevalue("no_network")
    with pytest.raises(Offline, match="HF_HUB_OFFLINE is set"):
        rig.puller.pull("q", rig.pair)
    with pytest.raises(Offline):
        rig.puller.preflight("q", rig.pair)
    assert [record.name for record in rig.store.listing().records] == ["p"]
    assert (
        describe_pair(rig.store, rig.store.get("p"), FreeMemory(1 << 40), LoadOptions()).matched
        is not None
    )
    rig.assert_installed()
    assert not [report.problem for report in integrity.verify(rig.store, "p") if report.problem]
    assert len(rig.hub.requests) == request_count


# Concurrent pulls, cancelling, and files that are there already.


def test_two_pulls_of_one_file_are_one_transfer(rig: Rig) -> None:
    """Two pullers pull at once two pairs that share both files."""
    rig.hub.rate = 8e6
    pulls = [create_pulls(rig.puller), create_pulls(Puller(rig.store, rig.puller.hub, QUICK))]
    started = [
        queue.start(PullTarget(name=name, pair=rig.pair))
        for queue, name in zip(pulls, "pq", strict=True)
    ]
    assert all(pull.wait(PATIENCE) for pull in started)
    assert [pull.state.state for pull in started] == ["done", "done"]
    assert rig.hub.sent < 1.25 * SIZE
    rig.assert_installed("p")
    rig.assert_installed("q")


def test_a_second_request_joins_the_running_pull(rig: Rig) -> None:
    rig.hub.rate = 8e6
    pulls = create_pulls(rig.puller)
    pull = pulls.start(PullTarget(name="p", pair=rig.pair))
    assert pulls.start(PullTarget(name="p", pair=rig.pair)) is pull
    assert pull.wait(PATIENCE)
    assert [state.name for state in pulls.states()] == ["p"]
    assert pulls.start(PullTarget(name="p", pair=rig.pair)) is not pull
    pulls.close()


def test_the_daemon_does_not_import_what_speaks_to_the_network() -> None:
    program = """
import sys
import localspec.registry.pulls.running
print([name for name in sys.modules if name.startswith(("httpx2", "localspec.registry.hub"))])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = {name.rpartition(".")[2] for name in ast.literal_eval(run.stdout)}
    assert names == {"hub", "offline", "repository", "retry"}
    assert "'localspec.registry.hub.hub'" not in run.stdout


def test_progress_and_cancel(rig: Rig) -> None:
    rig.hub.rate = 1.5e6
    pulls = create_pulls(rig.puller)
    pull = pulls.start(PullTarget(name="p", pair=rig.pair))
    wait_for(lambda: pull.state.rate and pull.state.done > 400_000, "a rate and some bytes")
    state = pull.state
    assert state.state == "downloading"
    assert state.size == SIZE
    assert 0 < state.rate < 6e6
    assert state.seconds_left == pytest.approx((SIZE - state.done) / state.rate)
    assert sum(file.done for file in state.files) == state.done
    pulls.get("p").cancel()
    assert pull.wait(PATIENCE)
    assert pull.state.done < SIZE  # it stopped before everything was there
    assert pull.state.state == "cancelled"
    assert isinstance(pull.error, PullCancelled)
    rig.assert_absent()
    rig.hub.rate, sent_before = 0.0, rig.hub.sent
    retry = pulls.start(PullTarget(name="p", pair=rig.pair))
    assert retry.wait(PATIENCE)
    assert rig.hub.sent - sent_before < SIZE - 300_000, "what was fetched is reused"
    rig.assert_installed()


def test_a_pull_whose_process_is_killed_fails_and_keeps_its_bytes(rig: Rig) -> None:
    rig.hub.rate = 1.5e6
    pulls = create_pulls(rig.puller)
    pull = pulls.start(PullTarget(name="p", pair=rig.pair))
    wait_for(lambda: pull.state.done > 400_000, "some bytes")
    os.kill(pull._child.pid, signal.SIGKILL)
    assert pull.wait(PATIENCE)
    assert (pull.state.state, pull.state.code) == ("failed", "internal_error")
    assert "its process ended unexpectedly" in pull.state.message
    rig.hub.rate, sent_before = 0.0, rig.hub.sent
    assert pulls.start(PullTarget(name="p", pair=rig.pair)).wait(PATIENCE)
    assert rig.hub.sent - sent_before < SIZE - 300_000
    rig.assert_installed()


def test_a_failed_pull_has_a_code_and_a_message(
    puller: Puller, hub: TestHub, pair: CataloguePair
) -> None:
    pull = create_pulls(puller).start(PullTarget(name="p", pair=pair))
    assert pull.wait(PATIENCE)
    assert (pull.state.state, pull.state.code) == ("failed", "not_on_hub")
    assert pull.state.message.startswith("The hub has no")


def cache_target(rig: Rig) -> Path:
    """Put the target into the Hugging Face cache, and return its link there."""
    commit = rig.hub.files["own/target", "target.gguf"].commit
    cache = Path(os.environ["HF_HUB_CACHE"])
    return in_hub(cache, "own/target", "target.gguf", TARGET, commit)


def test_the_hugging_face_cache_is_used_in_place(rig: Rig) -> None:
    link = cache_target(rig)
    record = rig.pull()
    assert rig.hub.sent < 1.2 * len(DRAFT)
    assert record.target.parts[0].path == str(link)
    rig.assert_installed()
    integrity.remove_pair(rig.store, "p")
    assert link.exists(), "not ours to delete"


def test_progress_of_hashing_a_cached_file_is_reported(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_target(rig)
    monkeypatch.setattr(files_module, "CHUNK_BYTES", len(TARGET) // 4)
    updates: list[tuple[FileState, ...]] = []
    rig.puller.pull("p", rig.pair, updates.append)
    parts = [update[0] for update in updates]
    assert {update.file for update in parts} == {"target.gguf"}
    assert all(update.done == update.size == len(TARGET) for update in parts)
    assert len({update.hashed for update in parts}) >= 4
    assert [update.hashed for update in parts] == sorted(update.hashed for update in parts)
    assert all(update.hashed == update.size for update in updates[-1])


def test_a_damaged_cached_file_is_not_used(rig: Rig) -> None:
    flip_byte(cache_target(rig).resolve())
    record = rig.pull()
    assert not record.target.parts[0].path
    rig.assert_installed()


def test_a_sharded_model_is_pulled_and_named_for_llama_cpp(rig: Rig) -> None:
    complete = model(layers=4, filler=1 << 20)
    files = shards(complete, 3, "big")
    for name, data in files.items():
        rig.hub.add("own/target", f"q4/{name}", data)
    rig.hub.add("own/draft", "draft.gguf", DRAFT)
    first_file = "q4/big-00001-of-00003.gguf"
    target = msgspec.structs.replace(rig.pair.target, file=first_file)
    record = rig.puller.pull("p", msgspec.structs.replace(rig.pair, target=target))
    path = rig.store.model_path(integrity.ensure_ready(rig.store, "p").target)
    assert path.name == "big-00001-of-00003.gguf"
    assert {shard.name: shard.read_bytes() for shard in path.parent.iterdir()} == files
    assert len(record.target.parts) == 3
    integrity.remove_pair(rig.store, "p")
    assert not path.parent.exists()


def test_a_pair_of_files_that_the_store_has_keeps_them(rig: Rig) -> None:
    record = rig.pull()
    store = rig.puller.store
    target, draft = store.model_paths(record)
    add_own_pair(store, "mine", target, draft, hash_now=False)
    integrity.remove_pair(store, "p")
    assert integrity.collect_garbage(store).files == ()
    integrity.ensure_ready(store, "mine")
    assert not any(report.problem for report in integrity.verify(store, "mine"))
    assert integrity.remove_pair(store, "mine").freed > 0
