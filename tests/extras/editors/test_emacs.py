"""Test the settings in the init file of Emacs."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import LocalspecError
from localspec.extras.editors import emacs
from tests.support.daemons import Home
from tests.support.editors import program
from tests.support.patience import PATIENCE

# The init files in the order in which Emacs looks for them.
INIT = [".emacs.el", ".emacs", ".emacs.d/init.el", ".config/emacs/init.el"]


def test_the_init_file_is_the_one_that_emacs_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in reversed(INIT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert emacs.file() == path


@pytest.mark.parametrize("name", [".emacs", ""])
def test_settings_are_written_into_the_init_file_and_taken_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "ls"))
    path = tmp_path / (name or ".emacs.d/init.el")
    mine = b'(setq a 1)\n(setq b "caf\xe9")\n' if name else b""
    dotfiles = tmp_path / "dotfiles.el"
    if name:
        dotfiles.write_bytes(mine)
        dotfiles.chmod(0o640)
        path.symlink_to(dotfiles)
    for _ in range(2):  # The second installation replaces the first.
        assert emacs.install() == path
        block = emacs.text(note="" if name else ";; There was no such file before.\n")
        assert path.read_bytes() == mine + block.encode()
    assert str(tmp_path / "ls" / "run" / "localspec.sock") in path.read_text(errors="replace")
    with path.open("ab") as file:
        file.write(b"(setq c 1)\n")
    assert emacs.uninstall() == path
    assert path.read_bytes() == mine + b"(setq c 1)\n"
    assert not name or (path.is_symlink() and dotfiles.stat().st_mode & 0o777 == 0o640)
    assert emacs.uninstall() is None


def test_an_editor_that_is_not_on_the_path_is_noted(home: Home, tmp_path: Path) -> None:
    home.environment["HOME"] = str(tmp_path)
    path = home.environment["PATH"]
    (tmp_path / "bin").mkdir()
    for editor in ("emacs", "vim", "nvim"):
        home.environment["PATH"] = str(tmp_path / "bin")
        run = home.run("editor", "install", editor)
        assert (run.returncode, f"{editor} is not on the PATH" in run.stderr) == (0, True)
        (tmp_path / "bin" / editor).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / editor).chmod(0o755)
        assert home.run("editor", "install", editor).stderr == ""
        home.environment["PATH"] = path
        assert home.run("editor", "uninstall", "-y", editor).returncode == 0


@given(
    st.none() | st.lists(st.sampled_from([b"(a)", b"\n", b"\r\n", b"\xe9", b";; x"])),
    st.integers(1, 3),
)
def test_uninstalling_leaves_the_file_as_it_was(chunks: list[bytes] | None, times: int) -> None:
    """The file may lack a final line end, or not exist at all."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.setenv("LOCALSPEC_HOME", f"{folder}/ls")
        path = Path(folder, ".emacs" if chunks is not None else ".emacs.d/init.el")
        if chunks is not None:
            path.write_bytes(b"".join(chunks))
        for _ in range(times):
            assert emacs.install() == path
        assert emacs.uninstall() == path
        if chunks is None:
            assert not path.parent.exists()
        else:
            assert path.read_bytes() == b"".join(chunks)
        assert emacs.uninstall() is None


def test_a_file_that_is_read_only_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".emacs"
    path.write_text("(setq a 1)\n")
    path.chmod(0o444)
    with pytest.raises(LocalspecError, match="it is read-only"):
        emacs.install()
    assert path.read_text() == "(setq a 1)\n"


def test_emacs_reads_the_settings(home: Home) -> None:
    """Stand-ins for gptel and minuet show which settings they receive."""
    (home.root / "gptel.el").write_text("(provide 'gptel)")
    (home.root / "gptel-openai.el").write_text(
        "(defun gptel-make-openai (&rest given) given) (provide 'gptel-openai)"
    )
    (home.root / "minuet.el").write_text(
        """
        (defvar plz-curl-default-args '("--silent"))
        (defvar minuet-openai-fim-compatible-options '(:model "other" :optional nil))
        (defun minuet--openai-fim-compatible-complete (&rest given)
          (princ (format "%S %S\n" plz-curl-default-args given)))
        (provide 'minuet)"""
    )
    init = home.root / "init.el"
    init.write_text(home.run("editor", "config", "emacs").stdout)
    expression = """(progn (require 'gptel) (require 'minuet)
      (princ (format "%S\\n" (plist-get (cdr gptel-backend) :curl-args)))
      (princ (plist-get minuet-openai-fim-compatible-options :model))
      (minuet--openai-fim-compatible-complete 1 2))"""
    result = subprocess.run(
        [
            program("emacs"),
            "-Q",
            "--batch",
            "-L",
            str(home.root),
            "-l",
            str(init),
            "--eval",
            expression,
        ],
        env={**os.environ, "HOME": str(home.root)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    socket = str(home.socket)
    assert result.stdout == (
        f'("--unix-socket" "{socket}")\nbuiltin("--unix-socket" "{socket}" "--silent") (1 2)\n'
    )
