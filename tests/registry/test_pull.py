"""Pulls against a hub on loopback that misbehaves on demand (N1–N11, D1, D3, D7)."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from localspec.errors import ModelNotFound, UnsafePath
from localspec.registry import fit
from localspec.registry.catalogue import Pair
from localspec.registry.errors import (
    CannotRollBack,
    DiskFull,
    DoesNotFit,
    Gated,
    HashMismatch,
    HubError,
    NotMatched,
    NotOnHub,
    Offline,
    PullCancelled,
    StoreReadOnly,
    Unreachable,
    WebPage,
)
from localspec.registry.hub import Hub
from localspec.registry.pull import Progress, Puller
from localspec.registry.pulls import Pulls
from localspec.registry.store import Store
from tests.registry.conftest import QUICK
from tests.support.gguf_files import Gguf, model, sha256, shards
from tests.support.hub import Faults, TestHub

TARGET = model(filler=3 << 20, seed=1).data()
DRAFT = model(layers=1, filler=1 << 20, seed=2).data()
SIZE = len(TARGET) + len(DRAFT)


@pytest.fixture
def faults(hub: TestHub) -> Faults:
    """A matched pair on the hub; the faults are the target's."""
    hub.add("own/draft", "draft.gguf", DRAFT)
    return hub.add("own/target", "target.gguf", TARGET)


def assert_whole(store: Store, name: str = "p") -> None:
    record = store.ready(name)
    assert record.draft is not None
    assert store.model_path(record.target).read_bytes() == TARGET
    assert store.model_path(record.draft).read_bytes() == DRAFT


def assert_absent(store: Store, name: str = "p") -> None:
    with pytest.raises(ModelNotFound):
        store.get(name)


@pytest.mark.usefixtures("faults")
def test_a_pair_is_pulled(puller: Puller, hub: TestHub, store: Store, pair: Pair) -> None:
    heard: list[Progress] = []
    record = puller.pull("p", pair, heard.append)
    assert_whole(store)
    assert record.target.repo == "own/target"
    assert record.target.parts[0].sha256 == sha256(TARGET)
    assert heard[-1].done == heard[-1].size == SIZE
    assert [file.file for file in heard[-1].files] == ["target.gguf", "draft.gguf"]
    assert hub.sent < 1.2 * SIZE  # small files: the headers weigh
    assert not [each for each in hub.requests if each.authorized]


def test_nothing_is_left_behind(puller: Puller, faults: Faults, store: Store, pair: Pair) -> None:
    faults.close_after = [1000]
    puller.pull("p", pair)
    left = [path.name for path in store.parts.iterdir() if path.suffix != ".lock"]
    assert not left


# before any weight is fetched


def refused_early(
    hub: TestHub, puller: Puller, pair: Pair, target: Gguf, draft: Gguf, error: type[Exception]
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
    hub: TestHub, puller: Puller, pair: Pair
) -> None:
    """Must show 2: less than 1 % of the weights, the first difference named."""
    draft = model(layers=1).token(17, "seventeen")
    message = refused_early(hub, puller, pair, model(layers=4), draft, NotMatched)
    assert message == (
        "target.gguf and draft.gguf: not a matched pair: token 17 is 't17' in the target and "
        "'seventeen' in the draft."
    )


def test_an_architecture_that_cannot_roll_back_is_refused(
    hub: TestHub, puller: Puller, pair: Pair
) -> None:
    target = model(architecture="jamba")
    message = refused_early(hub, puller, pair, target, model(layers=1), CannotRollBack)
    assert "'jamba'" in message


def test_too_little_memory_is_refused(hub: TestHub, puller: Puller, pair: Pair) -> None:
    puller.memory = lambda: fit.Memory(ram=10 << 20)
    message = refused_early(hub, puller, pair, model(layers=4), model(layers=1), DoesNotFit)
    assert "10 MiB are free" in message


def test_too_little_disk_is_refused(
    hub: TestHub, puller: Puller, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1 before the start: bytes needed and bytes free."""
    real = os.statvfs

    def full(path: object) -> os.statvfs_result:
        values = list(real(path))  # type: ignore[call-overload]
        values[4] = 1000  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    message = refused_early(hub, puller, pair, model(layers=4), model(layers=1), DiskFull)
    assert "bytes are needed" in message
    assert "bytes are free" in message


@pytest.mark.usefixtures("faults")
def test_the_catalogues_hash_that_differs_is_said(puller: Puller, pair: Pair) -> None:
    known = msgspec.structs.replace(pair.target, sha256="0" * 64)
    record = puller.pull("p", msgspec.structs.replace(pair, target=known))
    assert "is not the file the catalogue knows" in record.notes[0]


# the network's faults


def test_a_broken_line_is_taken_up_where_it_broke(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair
) -> None:
    faults.close_after = [70_000, 0, 100_000, 5]
    puller.pull("p", pair)
    assert_whole(store)
    assert hub.sent < 1.2 * SIZE


def test_a_server_without_ranges_is_read_from_the_start(
    puller: Puller, faults: Faults, store: Store, pair: Pair
) -> None:
    """N2: restart, no append."""
    faults.ignore_range = True
    faults.close_after = [10_000]
    puller.pull("p", pair)
    assert_whole(store)


def test_corruption_of_the_same_size_is_noticed(
    puller: Puller, faults: Faults, store: Store, pair: Pair
) -> None:
    """N3, N9: nothing installed; the whole draft is kept for the next try."""
    faults.corrupt = True
    with pytest.raises(HashMismatch, match=r"own/target/target\.gguf came damaged"):
        puller.pull("p", pair)
    assert_absent(store)
    assert not store.blob(sha256(TARGET)).exists()
    faults.corrupt = False
    puller.pull("p", pair)
    assert_whole(store)


def test_one_file_fails_the_other_is_kept(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair
) -> None:
    """N9."""
    faults.statuses = [(404, "")] * 50
    draft_first = threading.Event()
    with pytest.raises(HubError):
        puller.pull("p", pair, lambda _: draft_first.set())
    assert_absent(store)
    faults.statuses = []
    before = hub.sent
    puller.pull("p", pair)
    assert_whole(store)
    assert hub.sent - before < 1.2 * SIZE


@pytest.mark.parametrize("gets", [2, 6])
def test_a_file_that_changes_is_started_again(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair, gets: int
) -> None:
    """N4: never a mixture of two files."""
    faults.change_after = gets
    record = puller.pull("p", pair)
    now = hub.files["own/target", "target.gguf"]
    assert record.target.parts[0].sha256 == now.sha256 != sha256(TARGET)
    assert record.target.revision == now.commit
    assert store.model_path(record.target).read_bytes() == now.data


@pytest.mark.parametrize("where", ["portal", "portal_on_get"])
def test_a_captive_portal_is_named(
    puller: Puller, faults: Faults, store: Store, pair: Pair, where: str
) -> None:
    """N5."""
    setattr(faults, where, True)
    with pytest.raises(WebPage, match="open a browser, log in"):
        puller.pull("p", pair)
    assert_absent(store)


def test_a_busy_server_is_given_the_time_it_asks_for(
    puller: Puller, faults: Faults, store: Store, pair: Pair
) -> None:
    """N6, on metadata and on content."""
    faults.head_statuses = [(503, ""), (429, "")]
    faults.statuses = [(503, "1"), (429, "")]
    begin = time.monotonic()
    puller.pull("p", pair)
    assert time.monotonic() - begin >= 1
    assert_whole(store)


def test_a_server_that_stays_busy_is_given_up(
    puller: Puller, faults: Faults, store: Store, pair: Pair
) -> None:
    faults.head_statuses = [(503, "")] * 20
    with pytest.raises(Unreachable, match="503"):
        puller.pull("p", pair)
    assert_absent(store)


def test_a_stalled_line_is_given_up_and_tried_again(
    puller: Puller, faults: Faults, store: Store, pair: Pair
) -> None:
    """N7, with one second instead of twenty."""
    faults.stall_after = [50_000]
    begin = time.monotonic()
    puller.pull("p", pair)
    assert 0.9 < time.monotonic() - begin < 10
    assert_whole(store)


def test_nobody_listens(store: Store, pair: Pair) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match="cannot be reached"):
            Puller(store, Hub(endpoint), QUICK).pull("p", pair)


def test_a_server_without_redirects(
    puller: Puller, faults: Faults, store: Store, pair: Pair
) -> None:
    faults.direct = True
    puller.pull("p", pair)
    assert_whole(store)


@pytest.mark.usefixtures("faults")
def test_a_file_that_is_not_there(puller: Puller, pair: Pair) -> None:
    other = msgspec.structs.replace(pair.target, file="other.gguf")
    with pytest.raises(NotOnHub, match=r"no file other\.gguf in own/target"):
        puller.pull("p", msgspec.structs.replace(pair, target=other))
    other = msgspec.structs.replace(pair.target, repo="un/known")
    with pytest.raises(NotOnHub):
        puller.pull("p", msgspec.structs.replace(pair, target=other))


def test_a_gated_model_says_so_and_the_token_stays_ours(
    puller: Puller,
    hub: TestHub,
    faults: Faults,
    store: Store,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """N10: and the storage behind the hub never sees the token either."""
    caplog.set_level(logging.DEBUG)
    faults.gated = True
    with pytest.raises(Gated, match=r"accept its terms at https://huggingface\.co/own/target"):
        puller.pull("p", pair)
    monkeypatch.setenv("HF_TOKEN", hub.token + "wrong")
    with pytest.raises(Gated) as caught:
        puller.pull("p", pair)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    puller.pull("p", pair)
    assert_whole(store)
    assert all(each.authorized != each.to_storage for each in hub.requests[-6:])
    seen = caplog.text + str(caught.value) + repr(caught.value.__cause__)
    seen += "".join(path.read_text() for path in store.pairs.iterdir())
    assert hub.token not in seen


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
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Must show 4, N11: no socket is opened."""
    from localspec.registry.details import show

    puller.pull("p", pair)
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    request.getfixturevalue("no_network")
    with pytest.raises(Offline, match="HF_HUB_OFFLINE is set"):
        puller.pull("q", pair)
    with pytest.raises(Offline):
        puller.preflight("q", pair)
    assert [record.name for record in store.listing().records] == ["p"]
    assert show(store, "p").verdict is not None
    assert_whole(store)
    assert not [report.problem for report in store.verify("p") if report.problem]
    assert len(hub.requests) == asked


# two at once, cancelling, what is there already


def test_two_pulls_of_one_file_are_one_transfer(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair
) -> None:
    """N8: two pairs that share both files, pulled at once by two pullers."""
    hub.rate = 8e6
    pulls = [Pulls(puller), Pulls(Puller(store, puller.hub, QUICK))]
    started = [each.start(name, pair) for each, name in zip(pulls, "pq", strict=True)]
    assert all(each.wait(30) for each in started)
    assert [each.state.state for each in started] == ["done", "done"]
    assert hub.sent < 1.25 * SIZE
    assert_whole(store, "p")
    assert_whole(store, "q")


def test_asking_again_joins_the_running_pull(
    puller: Puller, hub: TestHub, faults: Faults, pair: Pair
) -> None:
    hub.rate = 8e6
    pulls = Pulls(puller)
    pull = pulls.start("p", pair)
    assert pulls.start("p", pair) is pull
    assert pull.wait(30)
    assert [state.name for state in pulls.states()] == ["p"]
    assert pulls.start("p", pair) is not pull
    pulls.close()


def test_progress_and_cancel(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair
) -> None:
    hub.rate = 1.5e6
    pulls = Pulls(puller)
    pull = pulls.start("p", pair)
    deadline = time.monotonic() + 20
    while not (pull.state.rate and pull.state.done > 400_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    state = pull.state
    assert state.state == "downloading"
    assert state.size == SIZE
    assert 0.2e6 < state.rate < 6e6
    assert state.seconds_left is not None
    assert 0 < state.seconds_left < 60
    assert sum(file.done for file in state.files) == state.done
    begin = time.monotonic()
    pulls.cancel("p")
    assert pull.wait(5)
    assert time.monotonic() - begin < 2
    assert pull.state.state == "cancelled"
    assert isinstance(pull.error, PullCancelled)
    assert_absent(store)
    hub.rate, before = 0.0, hub.sent
    again = pulls.start("p", pair)
    assert again.wait(30)
    assert hub.sent - before < SIZE - 300_000, "what was fetched was kept"
    assert_whole(store)


def test_a_failed_pull_tells_code_and_sentence(puller: Puller, hub: TestHub, pair: Pair) -> None:
    pull = Pulls(puller).start("p", pair)
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
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair
) -> None:
    commit = hub.files["own/target", "target.gguf"].commit
    cache = Path(os.environ["HF_HUB_CACHE"])
    _in_cache(cache, "own/target", "target.gguf", TARGET, commit)
    record = puller.pull("p", pair)
    assert hub.sent < 1.2 * len(DRAFT)
    assert record.target.parts[0].path.startswith(str(cache))
    assert_whole(store)
    store.remove("p")
    assert list(cache.rglob("target.gguf")), "not ours to delete"


def test_a_damaged_cache_is_not_believed(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: Pair
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
    puller: Puller, hub: TestHub, store: Store, pair: Pair
) -> None:
    whole = model(layers=4, filler=1 << 20)
    files = shards(whole, 3, "big")
    for name, data in files.items():
        hub.add("own/target", f"q4/{name}", data)
    hub.add("own/draft", "draft.gguf", DRAFT)
    first = "q4/big-00001-of-00003.gguf"
    target = msgspec.structs.replace(pair.target, file=first)
    record = puller.pull("p", msgspec.structs.replace(pair, target=target))
    path = store.model_path(store.ready("p").target)
    assert path.name == "big-00001-of-00003.gguf"
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == files
    assert len(record.target.parts) == 3
    store.remove("p")
    assert not path.parent.exists()


# the disk's faults


def test_a_disk_that_fills_up_keeps_what_was_fetched(
    puller: Puller,
    hub: TestHub,
    faults: Faults,
    store: Store,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D1 on the way."""
    real, room = os.pwrite, [2_000_000]

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(DiskFull, match=r"\d+ more bytes are needed and \d+ bytes are free"):
        puller.pull("p", pair)
    assert_absent(store)
    monkeypatch.setattr(os, "pwrite", real)
    before = hub.sent
    puller.pull("p", pair)
    assert hub.sent - before < SIZE - 1_000_000
    assert_whole(store)


@pytest.mark.parametrize("which", ["blob", "part", "journal", "lock"])
def test_a_link_in_the_store_is_not_followed(
    puller: Puller, faults: Faults, store: Store, pair: Pair, tmp_path: Path, which: str
) -> None:
    """D7."""
    store.prepare()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    digest = sha256(TARGET)
    place = store.blob(digest) if which == "blob" else store.parts / f"{digest}.{which}"
    place.symlink_to(victim)
    with pytest.raises(UnsafePath, match="symbolic link"):
        puller.pull("p", pair)
    assert victim.read_bytes() == b"precious"
    assert_absent(store)


def test_a_read_only_store_refuses_a_pull(
    puller: Puller,
    hub: TestHub,
    faults: Faults,
    store: Store,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D6: and what is there stays usable."""
    puller.pull("p", pair)
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    asked = len(hub.requests)
    with pytest.raises(StoreReadOnly, match="read-only"):
        puller.pull("q", pair)
    assert len(hub.requests) == asked
    assert_whole(store)
