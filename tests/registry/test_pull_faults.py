"""Pulls against a hub and a disk that misbehave on demand."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from localspec.errors import (
    DiskFull,
    Gated,
    HashMismatch,
    HubError,
    NotOnHub,
    StoreReadOnly,
    Unreachable,
    UnsafePath,
    WebPage,
)
from localspec.registry.catalogue import CataloguePair
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.retry import Retry, RetryPolicy
from localspec.registry.pulls.pull import Puller
from localspec.registry.store.store import Store
from tests.registry.conftest import QUICK
from tests.registry.pulling import SIZE, TARGET, assert_absent, assert_whole
from tests.support.gguf_files import sha256
from tests.support.hub import Faults, TestHub

# the network's faults


def test_a_broken_line_is_taken_up_where_it_broke(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    faults.close_after = [70_000, 0, 100_000, 5]
    puller.pull("p", pair)
    assert_whole(store)
    assert hub.sent < 1.2 * SIZE


def test_a_server_without_ranges_is_read_from_the_start(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    """The file is begun again, and nothing is appended to what was there."""
    faults.ignore_range = True
    faults.close_after = [10_000]
    puller.pull("p", pair)
    assert_whole(store)


@pytest.mark.parametrize("cuts", [(), (10_000,), (2_000_000,)])
def test_a_server_without_ranges_sends_each_file_once(
    puller: Puller,
    hub: TestHub,
    faults: Faults,
    store: Store,
    pair: CataloguePair,
    cuts: tuple[int, ...],
) -> None:
    """The header's bytes are the file's first, and a line that breaks costs what had come by it."""
    hub.files["own/draft", "draft.gguf"].faults.ignore_range = True
    faults.ignore_range, faults.close_after = True, list(cuts)
    puller.pull("p", pair)
    assert_whole(store)
    assert len(hub.gets()) == 2 + len(cuts)
    assert hub.sent <= SIZE + sum(cuts)


def test_a_pull_that_goes_on_without_ranges_costs_the_file(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    """What is there of it cannot be spared, but is not asked for by several connections."""
    faults.close_after = [1 << 30, 300_000, 300_000, 300_000, *[0] * 40]
    with pytest.raises(Unreachable):
        puller.pull("p", pair)
    hub.sent, faults.close_after, faults.ignore_range = 0, [], True
    puller.pull("p", pair)
    assert_whole(store)
    assert hub.sent <= 1.05 * len(TARGET)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_some_machines_of_a_server_know_ranges_and_others_do_not(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair, after: int
) -> None:
    """Nothing is mixed up, whichever answers when."""
    puller = replace(puller, tuning=replace(QUICK, segment=100_000))

    def sometimes() -> None:
        while not stop.wait(0.001):
            if len(hub.gets()) % (2 * after) == after:
                faults.unmarked = 1

    stop = threading.Event()
    thread = threading.Thread(target=sometimes)
    thread.start()
    try:
        puller.pull("p", pair)
    finally:
        stop.set()
        thread.join()
    assert_whole(store)


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_a_packed_file_is_unpacked(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair, how: str
) -> None:
    faults.packed, faults.ignore_range = how, True
    puller.pull("p", pair)
    assert_whole(store)
    assert hub.sent <= SIZE


@pytest.mark.parametrize(("how", "ranged"), [("gzip", True), ("br", True), ("br", False)])
def test_what_cannot_be_unpacked_is_refused_at_once(
    puller: Puller,
    hub: TestHub,
    faults: Faults,
    store: Store,
    pair: CataloguePair,
    how: str,
    ranged: bool,
) -> None:
    faults.packed, faults.ignore_range = how, not ranged
    with pytest.raises(HubError, match=rf"sends own/target/target\.gguf compressed \({how}\)"):
        puller.pull("p", pair)
    assert_absent(store)
    assert len([each for each in hub.gets() if "target.gguf" in each.path]) == 1


def test_corruption_of_the_same_size_is_noticed(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    """Nothing is installed; the whole draft is kept for the next try."""
    faults.corrupt = True
    with pytest.raises(HashMismatch, match=r"own/target/target\.gguf was damaged in transit"):
        puller.pull("p", pair)
    assert_absent(store)
    assert not store.blob(sha256(TARGET)).exists()
    faults.corrupt = False
    puller.pull("p", pair)
    assert_whole(store)


def test_one_file_fails_the_other_is_kept(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    faults.statuses = [(404, "")] * 50
    with pytest.raises(HubError):
        puller.pull("p", pair)
    assert_absent(store)
    faults.statuses = []
    before = hub.sent
    puller.pull("p", pair)
    assert_whole(store)
    assert hub.sent - before < 1.2 * SIZE


@pytest.mark.parametrize("gets", [2, 6])
def test_a_file_that_changes_is_started_again(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair, gets: int
) -> None:
    """Never a mixture of two files."""
    faults.change_after = gets
    record = puller.pull("p", pair)
    now = hub.files["own/target", "target.gguf"]
    assert record.target.parts[0].sha256 == now.sha256 != sha256(TARGET)
    assert record.target.revision == now.commit
    assert store.model_path(record.target).read_bytes() == now.data


@pytest.mark.parametrize("where", ["portal", "portal_on_get"])
def test_a_captive_portal_is_named(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair, where: str
) -> None:
    setattr(faults, where, True)
    with pytest.raises(WebPage, match="open a browser, log in"):
        puller.pull("p", pair)
    assert_absent(store)


def test_a_busy_server_is_given_the_time_it_asks_for(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    """On metadata and on content."""
    faults.head_statuses = [(503, ""), (429, "")]
    faults.statuses = [(503, "1"), (429, "")]
    begin = time.monotonic()
    puller.pull("p", pair)
    assert time.monotonic() - begin >= 1
    assert_whole(store)


def test_a_server_that_asks_for_no_time_gets_some(
    puller: Puller, hub: TestHub, faults: Faults, pair: CataloguePair
) -> None:
    """Else everybody whom it sent away would be back at once."""
    waits: list[Retry | None] = []
    retry_policy = RetryPolicy(
        tries=4, first_pause_s=0.05, longest_pause_s=0.2, on_wait=waits.append
    )
    faults.head_statuses = [(503, "0")] * 20
    with pytest.raises(Unreachable):
        replace(puller, tuning=replace(QUICK, retry_policy=retry_policy)).pull("p", pair)
    told = [each for each in waits if each]
    assert [each.attempt for each in told] == [2, 3, 4]
    for wait, least in zip(told, (0.05, 0.1, 0.2), strict=True):
        assert least <= wait.seconds <= 1.3 * least
        assert (wait.cause, wait.tries) == ("the hub answered 503", 4)
    assert waits[1::2] == [None] * 3
    assert len([each for each in hub.requests if "target.gguf" in each.path]) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_a_storage_that_refuses_is_asked_by_a_fresh_address(
    puller: Puller, hub: TestHub, faults: Faults, store: Store, pair: CataloguePair, status: int
) -> None:
    """A signed address expires in a long transfer: the hub is asked for another one."""
    faults.close_after = [50_000]
    puller = replace(puller, tuning=replace(QUICK, connections=1))
    faults.statuses = [(status, ""), (status, "")]
    puller.pull("p", pair)
    assert_whole(store)
    assert not faults.statuses


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_a_storage_that_refuses_to_the_end_is_named(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair, status: int
) -> None:
    faults.statuses = [(status, "")] * 100
    with pytest.raises(Unreachable, match=f"storage refuses .* localhost answered {status}"):
        puller.pull("p", pair)
    assert_absent(store)
    assert len(faults.statuses) <= 100 - QUICK.retry_policy.tries


def test_a_server_that_stays_busy_is_given_up(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    faults.head_statuses = [(503, "")] * 20
    with pytest.raises(Unreachable, match="503"):
        puller.pull("p", pair)
    assert_absent(store)


def test_a_stalled_line_is_given_up_and_tried_again(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    """With one second instead of twenty."""
    faults.stall_after = [50_000]
    begin = time.monotonic()
    puller.pull("p", pair)
    assert 0.9 < time.monotonic() - begin < 10
    assert_whole(store)


def test_nobody_listens(store: Store, pair: CataloguePair) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match="cannot be reached"):
            Puller(store, Hub(endpoint), QUICK).pull("p", pair)


def test_a_server_without_redirects(
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair
) -> None:
    faults.direct = True
    puller.pull("p", pair)
    assert_whole(store)


@pytest.mark.usefixtures("faults")
def test_a_file_that_is_not_there(puller: Puller, pair: CataloguePair) -> None:
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
    pair: CataloguePair,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the storage behind the hub never sees the token either."""
    caplog.set_level(logging.DEBUG)
    faults.gated = True
    with pytest.raises(Gated, match=r"accept its terms at https://huggingface\.co/own/target"):
        puller.pull("p", pair)
    with pytest.raises(Gated) as caught:
        replace(puller, hub=Hub(hub.endpoint, token=hub.token + "wrong")).pull("p", pair)
    replace(puller, hub=Hub(hub.endpoint, token=hub.token)).pull("p", pair)
    assert_whole(store)
    assert all(each.authorized != each.to_storage for each in hub.requests[-6:])
    seen = caplog.text + str(caught.value) + repr(caught.value.__cause__)
    seen += "".join(path.read_text() for path in store.pairs.iterdir())
    assert hub.token not in seen


# the disk's faults


def test_a_disk_that_fills_up_keeps_what_was_fetched(
    puller: Puller,
    hub: TestHub,
    faults: Faults,
    store: Store,
    pair: CataloguePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was empty enough when the pull began."""
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
    puller: Puller, faults: Faults, store: Store, pair: CataloguePair, tmp_path: Path, which: str
) -> None:
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
    pair: CataloguePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is there stays usable."""
    puller.pull("p", pair)
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    asked = len(hub.requests)
    with pytest.raises(StoreReadOnly, match="read-only"):
        puller.pull("q", pair)
    assert len(hub.requests) == asked
    assert_whole(store)
