"""Pulls against a hub and a disk that misbehave on demand."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as replace_field

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
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.retry import Retry, RetryPolicy
from tests.registry.conftest import QUICK
from tests.registry.pulling import SIZE, TARGET, Rig
from tests.support.gguf_files import sha256

# Faults of the network.


def test_a_broken_connection_is_resumed_where_it_broke(rig: Rig) -> None:
    rig.faults.close_after = [70_000, 0, 100_000, 5]
    rig.pull()
    rig.assert_installed()
    assert rig.hub.sent < 1.2 * SIZE


@pytest.mark.parametrize("cuts", [(), (10_000,), (2_000_000,)])
def test_a_server_without_ranges_sends_each_file_once(rig: Rig, cuts: tuple[int, ...]) -> None:
    """The bytes of the header are reused, and a broken connection costs only what it had sent."""
    rig.hub.files["own/draft", "draft.gguf"].faults.ignore_range = True
    rig.faults.ignore_range, rig.faults.close_after = True, list(cuts)
    rig.pull()
    rig.assert_installed()
    assert len(rig.hub.gets()) == 2 + len(cuts)
    assert rig.hub.sent <= SIZE + sum(cuts)


def test_resuming_without_ranges_fetches_the_file_once(rig: Rig) -> None:
    """The part on the disk cannot be reused, but the file is fetched by one connection only."""
    rig.faults.close_after = [1 << 30, 300_000, 300_000, 300_000, *[0] * 40]
    with pytest.raises(Unreachable):
        rig.pull()
    rig.hub.sent, rig.faults.close_after, rig.faults.ignore_range = 0, [], True
    rig.pull()
    rig.assert_installed()
    assert rig.hub.sent <= 1.05 * len(TARGET)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_machines_of_a_server_may_differ_in_support_of_ranges(rig: Rig, after: int) -> None:
    """The content is right whichever machine answers when."""
    rig.puller = replace(rig.puller, tuning=replace_field(QUICK, segment=100_000))

    def sometimes() -> None:
        while not stop.wait(0.001):
            if len(rig.hub.gets()) % (2 * after) == after:
                rig.faults.unmarked = 1

    stop = threading.Event()
    thread = threading.Thread(target=sometimes)
    thread.start()
    try:
        rig.pull()
    finally:
        stop.set()
        thread.join()
    rig.assert_installed()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_file_is_decompressed(rig: Rig, encoding: str) -> None:
    rig.faults.packed, rig.faults.ignore_range = encoding, True
    rig.pull()
    rig.assert_installed()
    assert rig.hub.sent <= SIZE


@pytest.mark.parametrize(("encoding", "ranged"), [("gzip", True), ("br", True), ("br", False)])
def test_an_unsupported_compression_is_refused_at_once(
    rig: Rig, encoding: str, ranged: bool
) -> None:
    rig.faults.packed, rig.faults.ignore_range = encoding, not ranged
    with pytest.raises(HubError, match=rf"sends own/target/target\.gguf compressed \({encoding}\)"):
        rig.pull()
    rig.assert_absent()
    assert len([request for request in rig.hub.gets() if "target.gguf" in request.path]) == 1


def test_corruption_of_the_same_size_is_noticed(rig: Rig) -> None:
    """Nothing is installed, and the intact draft is reused by the next try."""
    rig.faults.corrupt = True
    with pytest.raises(HashMismatch, match=r"own/target/target\.gguf was damaged in transit"):
        rig.pull()
    rig.assert_absent()
    assert not rig.store.blob(sha256(TARGET)).exists()
    rig.faults.corrupt = False
    rig.pull()
    rig.assert_installed()


def test_a_failed_file_leaves_the_other_in_place(rig: Rig) -> None:
    rig.faults.statuses = [(404, "")] * 50
    with pytest.raises(HubError):
        rig.pull()
    rig.assert_absent()
    rig.faults.statuses = []
    sent_before = rig.hub.sent
    rig.pull()
    rig.assert_installed()
    assert rig.hub.sent - sent_before < 1.2 * SIZE


@pytest.mark.parametrize("gets", [2, 6])
def test_a_file_that_changes_is_started_again(rig: Rig, gets: int) -> None:
    """The result is never a mixture of two files."""
    rig.faults.change_after = gets
    record = rig.pull()
    current = rig.hub.files["own/target", "target.gguf"]
    assert record.target.parts[0].sha256 == current.sha256 != sha256(TARGET)
    assert record.target.revision == current.commit
    assert rig.store.model_path(record.target).read_bytes() == current.data


@pytest.mark.parametrize("where", ["portal", "portal_on_get"])
def test_a_captive_portal_is_named(rig: Rig, where: str) -> None:
    setattr(rig.faults, where, True)
    with pytest.raises(WebPage, match="open a browser, log in"):
        rig.pull()
    rig.assert_absent()


def test_a_busy_server_is_given_the_time_it_asks_for(rig: Rig) -> None:
    """This holds for metadata and for content."""
    rig.faults.head_statuses = [(503, ""), (429, "")]
    rig.faults.statuses = [(503, "1"), (429, "")]
    begin = time.monotonic()
    rig.pull()
    assert time.monotonic() - begin >= 1
    rig.assert_installed()


def test_retry_after_zero_still_backs_off(rig: Rig) -> None:
    """Otherwise every client that was sent away would return at once."""
    waits: list[Retry | None] = []
    tuning = replace_field(
        QUICK, retry_policy=RetryPolicy(tries=4, first_pause_s=0.05, longest_pause_s=0.2)
    )
    rig.faults.head_statuses = [(503, "0")] * 20
    with pytest.raises(Unreachable, match="503"):
        replace(rig.puller, tuning=tuning, on_wait=waits.append).pull("p", rig.pair)
    rig.assert_absent()
    retries = [retry for retry in waits if retry]
    assert [retry.attempt for retry in retries] == [2, 3, 4]
    for wait, least in zip(retries, (0.05, 0.1, 0.2), strict=True):
        assert least <= wait.seconds <= 1.3 * least
        assert (wait.cause, wait.tries) == ("the hub answered 503", 4)
    assert waits[1::2] == [None] * 3
    assert len([retry for retry in rig.hub.requests if "target.gguf" in retry.path]) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_a_refusing_storage_is_retried_with_a_fresh_address(rig: Rig, status: int) -> None:
    """A signed address expires in a long transfer: the hub is asked for another one."""
    rig.faults.close_after = [50_000]
    rig.puller = replace(rig.puller, tuning=replace_field(QUICK, connections=1))
    rig.faults.statuses = [(status, ""), (status, "")]
    rig.pull()
    rig.assert_installed()
    assert not rig.faults.statuses


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_a_storage_that_refuses_to_the_end_is_named(rig: Rig, status: int) -> None:
    rig.faults.statuses = [(status, "")] * 100
    with pytest.raises(Unreachable, match=f"storage refuses .* localhost answered {status}"):
        rig.pull()
    rig.assert_absent()
    assert len(rig.faults.statuses) <= 100 - QUICK.retry_policy.tries


def test_a_stalled_connection_is_closed_and_retried(rig: Rig) -> None:
    """The test uses a stall limit of one second instead of twenty."""
    rig.faults.stall_after = [50_000]
    begin = time.monotonic()
    rig.pull()
    assert 0.9 < time.monotonic() - begin < 10
    rig.assert_installed()


def test_a_server_without_redirects_works(rig: Rig) -> None:
    rig.faults.direct = True
    rig.pull()
    rig.assert_installed()


def test_a_missing_file_is_named(rig: Rig) -> None:
    missing = msgspec.structs.replace(rig.pair.target, file="other.gguf")
    with pytest.raises(NotOnHub, match=r"no file other\.gguf in own/target"):
        rig.puller.pull("p", msgspec.structs.replace(rig.pair, target=missing))
    missing = msgspec.structs.replace(rig.pair.target, repo="un/known")
    with pytest.raises(NotOnHub):
        rig.puller.pull("p", msgspec.structs.replace(rig.pair, target=missing))


def test_a_gated_model_is_named_and_the_token_does_not_leak(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The storage behind the hub never receives the token either."""
    caplog.set_level(logging.DEBUG)
    rig.faults.gated = True
    with pytest.raises(Gated, match=r"accept its terms at https://huggingface\.co/own/target"):
        rig.pull()
    with pytest.raises(Gated) as caught:
        replace(rig.puller, hub=Hub(rig.hub.endpoint, token=rig.hub.token + "wrong")).pull(
            "p", rig.pair
        )
    replace(rig.puller, hub=Hub(rig.hub.endpoint, token=rig.hub.token)).pull("p", rig.pair)
    rig.assert_installed()
    assert all(request.authorized != request.to_storage for request in rig.hub.requests[-6:])
    output = caplog.text + str(caught.value) + repr(caught.value.__cause__)
    output += "".join(path.read_text() for path in rig.store.pairs.iterdir())
    assert rig.hub.token not in output


# Faults of the disk.


def test_a_disk_that_fills_up_keeps_what_was_fetched(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has enough space when the pull begins."""
    real, room = os.pwrite, [2_000_000]

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(DiskFull, match=r"[\d.]+ \w+ more are needed and [\d.]+ \w+ are free"):
        rig.pull()
    rig.assert_absent()
    monkeypatch.setattr(os, "pwrite", real)
    sent_before = rig.hub.sent
    rig.pull()
    assert rig.hub.sent - sent_before < SIZE - 1_000_000
    rig.assert_installed()


@pytest.mark.parametrize("kind", ["blob", "part", "journal", "lock"])
def test_a_link_in_the_store_is_not_followed(rig: Rig, tmp_path: Path, kind: str) -> None:
    rig.store.prepare()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    digest = sha256(TARGET)
    place = rig.store.blob(digest) if kind == "blob" else rig.store.parts / f"{digest}.{kind}"
    place.symlink_to(victim)
    with pytest.raises(UnsafePath, match="symbolic link"):
        rig.pull()
    assert victim.read_bytes() == b"precious"
    rig.assert_absent()


def test_a_read_only_store_refuses_a_pull(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed pairs stay usable."""
    rig.pull()
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    request_count = len(rig.hub.requests)
    with pytest.raises(StoreReadOnly, match="read-only"):
        rig.puller.pull("q", rig.pair)
    assert len(rig.hub.requests) == request_count
    rig.assert_installed()
