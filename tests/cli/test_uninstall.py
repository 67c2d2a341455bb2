"""Test `localspec uninstall`: what was installed is gone, and what was stored stays until it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.files import format_size
from tests.support.daemons import Home
from tests.support.extras import has_command

SECRET = "unforgettable"
SYSTEMCTL = "#!/bin/sh\necho systemctl >> $HOME/calls\n"


@pytest.fixture
def used(home: Home) -> Home:
    """Return a home with a running daemon, a conversation, a model, a service and two plug-ins."""
    user = home.root / "user"
    (home.root / "bin").mkdir()
    (user / ".config").mkdir(parents=True)
    systemctl = home.root / "bin" / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    home.environment |= {"HOME": str(user), "PATH": f"{home.root}/bin:/usr/bin:/bin"}
    home.environment.pop("XDG_CONFIG_HOME", None)
    home.environment.pop("XDG_DATA_HOME", None)
    home.use_fake()
    for line in ("service install", "editor install vim", "editor install emacs"):
        if has_command(line.split()[0]):
            home.must_run(*line.split())
    blob = home.root / "data" / "models" / "blobs" / "sha256-1"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(3 << 20))
    home.must_run("ask", f"say {SECRET}")
    return home


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def find_secret(home: Home) -> list[Path]:
    """Return the files that contain a word of the conversation."""
    files = [path for path in home.root.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_what_was_installed_is_removed_and_what_was_stored_is_listed(used: Home) -> None:
    stored = files_of(used.root / "data")
    printed = used.must_run("uninstall", "-y")
    assert "The daemon has stopped." in printed
    assert not used.socket.exists()
    assert files_of(used.root / "user") <= {"calls"}
    assert files_of(used.root / "data") == {
        name for name in stored if "-wal" not in name and "-shm" not in name
    }
    (models,) = [line for line in printed.splitlines() if line.startswith("models")]
    assert format_size(3 << 20) in models
    assert str(used.root / "data" / "models") in models
    (history,) = [line for line in printed.splitlines() if line.startswith("history")]
    assert str(used.root / "data" / "conversations.sqlite") in history
    assert used.must_run("uninstall", "-y").startswith("No service is installed.")


@pytest.mark.parametrize(
    ("option", "gone", "kept"),
    [
        ("models", "sha256-1", "conversations.sqlite"),
        ("history", "conversations.sqlite", "sha256-1"),
    ],
)
def test_an_option_deletes_what_it_names_and_nothing_else(
    used: Home, option: str, gone: str, kept: str
) -> None:
    printed = used.must_run("uninstall", f"--{option}", "-y")
    names = {path.name for path in (used.root / "data").rglob("*")}
    assert gone not in names
    assert kept in names
    assert f"\n{option} " not in printed
    assert bool(find_secret(used)) == (option == "models")


def test_a_file_of_someone_else_stops_nothing(used: Home) -> None:
    file = used.root / "user" / ".vim/pack/localspec/start/localspec/plugin/localspec.vim"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    run = used.run("uninstall", "-y")
    if has_command("editor"):
        assert (run.returncode, "was not written by localspec" in run.stderr) == (1, True)
    assert file.read_text() == "mine"
    assert not used.socket.exists()
    assert "models" in run.stdout


def test_a_pair_is_named_to_another_command(home: Home) -> None:
    """In ollama and lms the word removes a model."""
    assert "localspec rm mine" in home.refused("uninstall", "mine", code=2)
