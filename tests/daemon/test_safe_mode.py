"""The memory of safe mode for machines whose fast kernels crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localspec.daemon.worker.death import SafeMode, _build, _cpu


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "safe-mode.json"


def needed(mode: SafeMode, reason: str) -> None:
    """Record that safe mode was tried in a run and helped."""
    mode.recall()
    mode.begin(reason)
    assert mode.on
    mode.keep()


def test_it_is_remembered_for_this_machine_and_build_alone(file: Path) -> None:
    mode = SafeMode(file, "this", "cpu")
    assert mode.recall() is None
    assert not mode.on
    needed(mode, "SIGSEGV")
    needed(SafeMode(file, "other", "cpu"), "SIGILL")
    later = SafeMode(file, "this", "cpu")
    assert later.recall() == "SIGSEGV"
    assert later.on
    assert SafeMode(file, "a rebuilt one", "cpu").recall() is None
    later.forget()
    assert not later.on
    assert SafeMode(file, "this", "cpu").recall() is None
    assert SafeMode(file, "other", "cpu").recall() == "SIGILL"


def test_what_does_not_help_is_not_remembered_nor_recalled_again_in_this_run(file: Path) -> None:
    mode = SafeMode(file, "this", "cpu")
    mode.recall()
    mode.begin("SIGSEGV")
    mode.end()
    mode.keep()
    assert not file.exists()
    needed(SafeMode(file, "this", "cpu"), "SIGSEGV")
    mode = SafeMode(file, "this", "cpu")
    assert mode.recall() == "SIGSEGV"
    mode.end()
    assert mode.recall() is None


def test_what_a_gpus_driver_may_have_done_is_tried_and_not_remembered(file: Path) -> None:
    """This holds for its own build, and where an earlier release has remembered it."""
    mode = SafeMode(file, "this", "vulkan")
    needed(mode, "SIGSEGV")
    assert "driver" in (mode.note() or "")
    assert not file.exists()
    needed(SafeMode(file, "this", "cpu"), "SIGSEGV")
    assert SafeMode(file, "this", "cuda").recall() is None
    assert "driver" not in (SafeMode(file, "this", "cpu").recall() or "")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": "x"}', b"\xff", b'{"\xf0air": 1}']
)
def test_a_broken_file_counts_as_none_and_is_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    mode = SafeMode(file, "this", "cpu")
    assert mode.recall() is None
    needed(mode, "SIGSEGV")
    assert SafeMode(file, "this", "cpu").recall() == "SIGSEGV"


def test_a_file_of_a_newer_release_is_left_untouched(file: Path) -> None:
    file.parent.mkdir()
    content = json.dumps({"version": 2, "reasons": {"this": "x"}})
    file.write_text(content)
    mode = SafeMode(file, "this", "cpu")
    assert mode.recall() is None
    needed(mode, "SIGSEGV")
    mode.forget()
    assert file.read_text() == content


def test_a_disk_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    needed(SafeMode(tmp_path / "state" / "safe-mode.json", "this", "cpu"), "SIGSEGV")


def test_nothing_is_left_beside_the_file(file: Path) -> None:
    needed(SafeMode(file, "this", "cpu"), "SIGSEGV")
    assert list(file.parent.iterdir()) == [file]


def test_machine_and_build_have_names() -> None:
    assert _cpu()
    assert _build() == _build()
