"""The quick and the thorough way to find the socket's path agree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec import paths
from localspec.client import transport
from localspec.errors import UnsafePath


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCALSPEC_HOME": "/tmp/h"},
        {"LOCALSPEC_HOME": "relative/h"},
        {"LOCALSPEC_HOME": "/tmp/h/"},
        {"LOCALSPEC_HOME": ""},
        {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"},
        {"XDG_RUNTIME_DIR": "/run/user/99999"},
        {"XDG_RUNTIME_DIR": "/nonexistent"},
        {"XDG_RUNTIME_DIR": "relative"},
        {},
    ],
)
def test_both_ways_lead_to_the_same_socket(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCALSPEC_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert transport.socket_path() == str(paths.default_paths().socket)


def test_a_usable_runtime_directory_is_used_by_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.delenv("LOCALSPEC_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(paths, "MAX_SOCKET_PATH_BYTES", 1000)
    monkeypatch.setattr(transport, "_MAX_PATH_BYTES", 1000)
    assert transport.socket_path() == str(paths.default_paths().socket)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_a_missing_runtime_directory_is_the_same_once_created(
    umask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LOCALSPEC_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing" / "too"))
    old_umask = os.umask(umask)
    try:
        runtime = paths.default_paths().runtime
        paths.make_private_directory(runtime)
    finally:
        os.umask(old_umask)
    assert paths.default_paths().runtime == runtime == tmp_path / "missing" / "too" / "localspec"


def test_a_path_that_is_too_long_is_refused_with_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", "/tmp/" + "x" * 100)
    with pytest.raises(UnsafePath, match="124 bytes long and the limit is 103"):
        transport.socket_path()


def test_the_limits_are_the_same() -> None:
    assert transport._MAX_PATH_BYTES == paths.MAX_SOCKET_PATH_BYTES
