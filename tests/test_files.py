"""A file is replaced completely, or stays unchanged."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.files import (
    UNFINISHED_PATTERN,
    delete_unfinished,
    replace_atomically,
    write_atomically,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kept.json"
    file.write_bytes(b"old")
    return file


@pytest.mark.parametrize("sync", [True, False])
def test_a_new_file_replaces_the_old_one_for_its_owner_alone(file: Path, sync: bool) -> None:
    write_atomically(file, b"new", sync=sync)
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), ValueError()])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(
    file: Path, error: BaseException
) -> None:
    def write_half() -> None:
        with replace_atomically(file) as new:
            new.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]


def test_a_disk_that_is_full_at_the_end_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]


def test_a_file_system_that_cannot_sync_folders_works(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"


def test_an_error_names_the_file_and_not_an_unfinished_one(file: Path) -> None:
    missing = file.parent / "missing" / "kept.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(missing, b"new")
    assert caught.value.filename == str(missing)


def test_a_link_is_replaced_and_not_followed(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    write_atomically(link, b"new")
    assert (file.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"old", b"new", False)


def test_leftovers_of_a_killed_process_are_deleted(file: Path) -> None:
    with replace_atomically(file):
        (leftover,) = file.parent.glob(UNFINISHED_PATTERN)
    leftover.write_bytes(b"half")
    delete_unfinished(file.parent)
    assert list(file.parent.iterdir()) == [file]
    delete_unfinished(file.parent / "nowhere")


@given(st.text(st.sampled_from("0129²٣-x."), max_size=6))
def test_any_name_of_an_unfinished_file_is_accepted(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unfinished = Path(folder) / f".state.{name}.1.tmp"
        unfinished.write_bytes(b"half")
        delete_unfinished(Path(folder))


def test_files_of_a_running_process_are_not_deleted(file: Path) -> None:
    """Workers of several pairs write states into the same folders."""
    unfinished = file.with_name(f".state.{os.getppid()}.1.tmp")
    unfinished.write_bytes(b"half")
    delete_unfinished(file.parent)
    assert unfinished.exists()
