"""The folders and files of localspec, and what is refused there."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

import localspec
from localspec import paths
from localspec.errors import UnsafePath


def test_one_variable_moves_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    default = paths.default_paths()
    assert all(folder.parent == tmp_path for folder in default)
    assert default.socket == tmp_path / "run" / "localspec.sock"
    assert list(tmp_path.iterdir()) == []  # nothing is created by looking


def test_a_container_without_a_runtime_directory_gets_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCALSPEC_HOME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paths.default_paths().runtime.name == "localspec"


def test_a_private_directory_is_created_with_its_parents_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    assert paths.make_private_directory(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert paths.make_private_directory(folder) == folder


def test_a_directory_open_to_others_is_refused_with_a_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(UnsafePath, match=f"chmod 700 {tmp_path}"):
        paths.make_private_directory(tmp_path)


def test_a_link_or_a_file_instead_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UnsafePath, match="not a directory"):
            paths.make_private_directory(tmp_path / name)


def test_only_a_regular_file_is_opened_and_without_blocking(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(OSError, match=r"no file|directory"):
            paths.read_file(path)
    handle = paths.open_file(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.close(handle)
    assert paths.read_file(tmp_path / "file") == b""
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_tree_is_removed_whatever_it_is(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    os.mkfifo(tree / "inner" / "pipe")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("tree", "pipe", "link", "nowhere"):
        paths.remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UnsafePath, match="belongs to another user"):
        paths.make_private_directory(tmp_path)


def test_a_socket_path_is_measured_in_bytes() -> None:
    assert paths.check_socket_path(Path("/" + "x" * 102))
    for path in ("/" + "x" * 103, "/" + "é" * 52):
        with pytest.raises(UnsafePath, match="limit is 103"):
            paths.check_socket_path(Path(path))


def test_an_unknown_user_is_part_of_the_name() -> None:
    assert paths.expand_user("~nobody-here/x") == Path("~nobody-here/x")
    assert paths.expand_user("~/x") == Path.home() / "x"


def test_no_unknown_user_can_raise() -> None:
    """`Path.expanduser` raises RuntimeError for one, which nobody catches."""
    package = Path(localspec.__file__).parent
    users = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if re.search(r"[^h]\.expanduser\(", file.read_text("utf-8"))
    ]
    assert users == []
