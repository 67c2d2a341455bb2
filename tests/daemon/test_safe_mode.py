"""What is remembered about machines whose fast kernels crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localspec.daemon.worker.safe_mode import Memory, _build, _cpu


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "safe-mode.json"


def test_it_is_remembered_for_this_machine_and_build_alone(file: Path) -> None:
    memory = Memory(file, "this")
    assert memory.recall() is None
    memory.remember("SIGSEGV")
    Memory(file, "other").remember("SIGILL")
    assert Memory(file, "this").recall() == "SIGSEGV"
    assert Memory(file, "a rebuilt one").recall() is None
    memory.forget()
    assert memory.recall() is None
    assert Memory(file, "other").recall() == "SIGILL"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "x"}', b"\xff"])
def test_a_broken_file_counts_as_none_and_is_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    memory = Memory(file, "this")
    assert memory.recall() is None
    memory.remember("SIGSEGV")
    assert memory.recall() == "SIGSEGV"


def test_a_file_of_a_newer_release_is_left_untouched(file: Path) -> None:
    file.parent.mkdir()
    content = json.dumps({"version": 2, "reasons": {"this": "x"}})
    file.write_text(content)
    memory = Memory(file, "this")
    assert memory.recall() is None
    memory.remember("SIGSEGV")
    memory.forget()
    assert file.read_text() == content


def test_a_disk_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    Memory(tmp_path / "state" / "safe-mode.json", "this").remember("SIGSEGV")


def test_nothing_is_left_beside_the_file(file: Path) -> None:
    Memory(file, "this").remember("SIGSEGV")
    assert list(file.parent.iterdir()) == [file]


def test_machine_and_build_have_names() -> None:
    assert _cpu()
    assert _build() == _build()
