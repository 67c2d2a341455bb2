"""Pulls: checks before any weight, two at once, cancelling, what is there already, offline."""

from __future__ import annotations

import os
import socket
import time
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
from localspec.registry.pulls.pull import FileState, Puller
from localspec.registry.pulls.resolve import PullTarget
from localspec.registry.store import files as files_module
from localspec.registry.store import integrity
from localspec.registry.store.local import add_own_pair
from localspec.registry.store.store import Store
from tests.registry.conftest import QUICK
from tests.registry.pulling import DRAFT, SIZE, TARGET, assert_absent, assert_whole, pulls_of
from tests.support.gguf_files import BOOL, Gguf, model, sha256, shards
from tests.support.hub import Faults, TestHub


@pytest.mark.usefixtures("faults")
def test_a_pair_is_pulled(puller: Puller, hub: TestHub, store: Store, pair: CataloguePair) -> None:
    heard: list[tuple[FileState, ...]] = []
    record = puller.pull("p", pair, heard.append)
    assert_whole(store)
    assert record.target.repo == "own/target"
    assert record.target.parts[0].sha256 == sha256(TARGET)
    assert sum(each.done for each in heard[-1]) == sum(each.size for each in heard[-1]) == SIZE
    assert [each.file for each in heard[-1]] == ["target.gguf", "draft.gguf"]
    assert hub.sent < 1.2 * SIZE  # small files: the headers weigh
    assert not [each for each in hub.requests if each.authorized]


def test_nothing_is_left_behind(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    faults.close_after = [1000]
    puller.pull("p", pair)
    left = [path.name for path in store.parts.iterdir() if path.suffix != ".lock"]
    assert not left


# before any weight is fetched


def refused_early(
    hub: TestHub,
    puller: Puller,
    pair: CataloguePair,
    target: Gguf,
    draft: Gguf,
    error: type[Exception],
) -> str:
    """Pull a pair of 2 × 20 MB that must be refused by its headers alone; the sentence."""
    for repo, file in (("target", target), ("draft", draft)):
        file.tensors.insert(0, ("filler.weight", (64, (20 << 20) // 64), 24))
        hub.add(f"own/{repo}", f"{repo}.gguf", file.data())
    with pytest.raises(error) as caught:
        puller.pull("p", pair)
    weights = sum(len(entry.data) for entry in hub.files.values())
    assert hub.sent < 0.01 * weights
    assert_absent(puller.store)
    return str(caught.value)


def test_a_mismatched_pair_is_refused_by_its_headers(
    hub: TestHub, puller: Puller, pair: CataloguePair
) -> None:
    """Less than 1 % of the weights, the first difference named."""
    draft = model(layers=1).put("tokenizer.ggml.add_bos_token", BOOL, True)
    message = refused_early(hub, puller, pair, model(layers=4), draft, NotMatched)
    assert message == (
        "target.gguf and draft.gguf: not a matched pair: add_bos_token is false in the target "
        "and true in the draft."
    )


def test_an_architecture_that_cannot_roll_back_is_refused(
    hub: TestHub, puller: Puller, pair: CataloguePair
) -> None:
    target = model(architecture="jamba")
    message = refused_early(hub, puller, pair, target, model(layers=1), CannotRollBack)
    assert "'jamba'" in message


def test_too_little_memory_is_refused(hub: TestHub, puller: Puller, pair: CataloguePair) -> None:
    puller.memory = lambda: fit.FreeMemory(ram=10 << 20)
    message = refused_early(hub, puller, pair, model(layers=4), model(layers=1), DoesNotFit)
    assert "10 MiB are free" in message


def test_too_little_disk_is_refused(
    hub: TestHub, puller: Puller, pair: CataloguePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the start, in numbers: bytes needed and bytes free."""
    real = os.statvfs

    def full(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 1000  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    message = refused_early(hub, puller, pair, model(layers=4), model(layers=1), DiskFull)
    assert "bytes are needed" in message
    assert "bytes are free" in message


@pytest.mark.usefixtures("faults")
def test_the_catalogues_hash_that_differs_is_said(puller: Puller, pair: CataloguePair) -> None:
    known = msgspec.structs.replace(pair.target, sha256="0" * 64)
    record = puller.pull("p", msgspec.structs.replace(pair, target=known))
    assert "differs from the catalogue's" in record.notes[0]


# offline


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network taken away: any socket is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_offline_pairs_work_and_pull_says_why_not(
    puller: Puller,
    faults: Faults,
    hub: TestHub,
    store: Store,
    pair: CataloguePair,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """No socket is opened."""
    from localspec.registry.header.fit import FreeMemory, LoadOptions
    from localspec.registry.store.local import describe_pair

    puller.pull("p", pair)
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    request.getfixturevalue("no_network")
    with pytest.raises(Offline, match="HF_HUB_OFFLINE is set"):
        puller.pull("q", pair)
    with pytest.raises(Offline):
        puller.preflight("q", pair)
    assert [record.name for record in store.listing().records] == ["p"]
    assert (
        describe_pair(store, store.get("p"), FreeMemory(1 << 40), LoadOptions()).matched is not None
    )
    assert_whole(store)
    assert not [report.problem for report in integrity.verify(store, "p") if report.problem]
    assert len(hub.requests) == asked


# two at once, cancelling, what is there already


def test_two_pulls_of_one_file_are_one_transfer(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    """Two pairs that share both files, pulled at once by two pullers."""
    hub.rate = 8e6
    pulls = [pulls_of(puller), pulls_of(Puller(store, puller.hub, QUICK))]
    started = [
        each.start(PullTarget(name=name, pair=pair)) for each, name in zip(pulls, "pq", strict=True)
    ]
    assert all(each.wait(30) for each in started)
    assert [each.state.state for each in started] == ["done", "done"]
    assert hub.sent < 1.25 * SIZE
    assert_whole(store, "p")
    assert_whole(store, "q")


def test_asking_again_joins_the_running_pull(
    puller: Puller, hub: TestHub, faults: Faults, pair: CataloguePair
) -> None:
    hub.rate = 8e6
    pulls = pulls_of(puller)
    pull = pulls.start(PullTarget(name="p", pair=pair))
    assert pulls.start(PullTarget(name="p", pair=pair)) is pull
    assert pull.wait(30)
    assert [state.name for state in pulls.states()] == ["p"]
    assert pulls.start(PullTarget(name="p", pair=pair)) is not pull
    pulls.close()


def test_progress_and_cancel(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    hub.rate = 1.5e6
    pulls = pulls_of(puller)
    pull = pulls.start(PullTarget(name="p", pair=pair))
    deadline = time.monotonic() + 20
    while not (pull.state.rate and pull.state.done > 400_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    state = pull.state
    assert state.state == "downloading"
    assert state.size == SIZE
    assert 0 < state.rate < 6e6
    assert state.seconds_left == pytest.approx((SIZE - state.done) / state.rate)
    assert sum(file.done for file in state.files) == state.done
    pulls.get("p").cancel()
    assert pull.wait(30)
    assert pull.state.done < SIZE  # it ended, and did not come to its end
    assert pull.state.state == "cancelled"
    assert isinstance(pull.error, PullCancelled)
    assert_absent(store)
    hub.rate, before = 0.0, hub.sent
    again = pulls.start(PullTarget(name="p", pair=pair))
    assert again.wait(30)
    assert hub.sent - before < SIZE - 300_000, "what was fetched was kept"
    assert_whole(store)


def test_a_failed_pull_tells_code_and_sentence(
    puller: Puller, hub: TestHub, pair: CataloguePair
) -> None:
    pull = pulls_of(puller).start(PullTarget(name="p", pair=pair))
    assert pull.wait(10)
    assert (pull.state.state, pull.state.code) == ("failed", "not_on_hub")
    assert pull.state.message.startswith("The hub has no")


def _in_cache(root: Path, repo: str, file: str, data: bytes, commit: str) -> Path:
    """A file as huggingface_hub keeps it."""
    folder = root / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / sha256(data)
    link = folder / "snapshots" / commit / file
    for each in (blob, link):
        each.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(Path("../../blobs") / blob.name)
    return link


def test_the_hugging_face_cache_is_used_in_place(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    commit = hub.files["own/target", "target.gguf"].commit
    cache = Path(os.environ["HF_HUB_CACHE"])
    _in_cache(cache, "own/target", "target.gguf", TARGET, commit)
    record = puller.pull("p", pair)
    assert hub.sent < 1.2 * len(DRAFT)
    assert record.target.parts[0].path.startswith(str(cache))
    assert_whole(store)
    integrity.remove_pair(store, "p")
    assert list(cache.rglob("target.gguf")), "not ours to delete"


@pytest.mark.usefixtures("faults")
def test_how_far_the_hashing_of_the_cache_is_can_be_seen(
    puller: Puller, hub: TestHub, pair: CataloguePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.files["own/target", "target.gguf"].commit
    _in_cache(Path(os.environ["HF_HUB_CACHE"]), "own/target", "target.gguf", TARGET, commit)
    monkeypatch.setattr(files_module, "CHUNK_BYTES", len(TARGET) // 4)
    seen: list[tuple[FileState, ...]] = []
    puller.pull("p", pair, seen.append)
    parts = [each[0] for each in seen]
    assert {each.file for each in parts} == {"target.gguf"}
    assert all(each.done == each.size == len(TARGET) for each in parts)
    assert len({each.hashed for each in parts}) >= 4
    assert [each.hashed for each in parts] == sorted(each.hashed for each in parts)
    assert all(each.hashed == each.size for each in seen[-1])


def test_a_damaged_cache_is_not_believed(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    commit = hub.files["own/target", "target.gguf"].commit
    link = _in_cache(Path(os.environ["HF_HUB_CACHE"]), "own/target", "target.gguf", TARGET, commit)
    damaged = bytearray(TARGET)
    damaged[-50] ^= 1
    link.resolve().write_bytes(damaged)
    record = puller.pull("p", pair)
    assert not record.target.parts[0].path
    assert_whole(store)


def test_a_sharded_model_is_pulled_and_named_for_llama_cpp(
    puller: Puller, hub: TestHub, store: Store, pair: CataloguePair
) -> None:
    whole = model(layers=4, filler=1 << 20)
    files = shards(whole, 3, "big")
    for name, data in files.items():
        hub.add("own/target", f"q4/{name}", data)
    hub.add("own/draft", "draft.gguf", DRAFT)
    first = "q4/big-00001-of-00003.gguf"
    target = msgspec.structs.replace(pair.target, file=first)
    record = puller.pull("p", msgspec.structs.replace(pair, target=target))
    path = store.model_path(integrity.ensure_ready(store, "p").target)
    assert path.name == "big-00001-of-00003.gguf"
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == files
    assert len(record.target.parts) == 3
    integrity.remove_pair(store, "p")
    assert not path.parent.exists()


@pytest.mark.usefixtures("faults")
def test_a_pair_of_files_that_the_store_has_keeps_them(puller: Puller, pair: CataloguePair) -> None:
    record = puller.pull("p", pair)
    store = puller.store
    target, draft = store.model_paths(record)
    add_own_pair(store, "mine", target, draft, hash_now=False)
    integrity.remove_pair(store, "p")
    assert integrity.collect_garbage(store).files == ()
    integrity.ensure_ready(store, "mine")
    assert not any(each.problem for each in integrity.verify(store, "mine"))
    assert integrity.remove_pair(store, "mine").freed > 0
