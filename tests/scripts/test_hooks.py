"""Tests of scripts/hooks/commit-msg, which checks commit messages, and of its activation by scripts/setup."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import setup_venv

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "scripts" / "hooks" / "commit-msg"


def run_hook(folder: Path, message: str) -> subprocess.CompletedProcess[str]:
    file = folder / "message"
    file.write_text(message, encoding="utf-8")
    return subprocess.run([HOOK, file], capture_output=True, text=True)


@pytest.mark.parametrize(
    "message",
    [
        "controller: skip the cost lookup when there is only one candidate\n",
        "docs: split the README\n\nEach page is found by a task; semicolons may stand here.\n",
        "# a comment of git's\n\nserver/http, cli: accept a byte order mark\n",
        f"docs: {'ü' * 66}\n",
        "Merge branch 'main' into a-branch-with-a-name; as long as it is, it is git's own, and not ours\n",
        'Revert "docs: split the README"\n',
        "fixup! docs: split the README\n",
        "",  # git itself aborts
        "# only comments\n",
    ],
)
def test_a_good_message_passes(tmp_path: Path, message: str) -> None:
    run = run_hook(tmp_path, message)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (f"docs: {'x' * 67}\n", "has 73 characters"),
        ("Split the README\n", "names no area"),
        ("docs:split the README\n", "names no area"),
        ("docs: split the README; count answers\n", "semicolon"),
        ("docs: split the README.\n", "full stop"),
        ("docs: split the README\nEach page is found by a task.\n", "no empty line"),
    ],
)
def test_a_wrong_message_is_refused_with_the_rule(
    tmp_path: Path, message: str, problem: str
) -> None:
    run = run_hook(tmp_path, message)
    assert run.returncode == 1
    assert problem in run.stderr
    assert "CONTRIBUTING.md" in run.stderr


# The activation by scripts/setup.


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    root = tmp_path / "checkout"
    subprocess.run(["git", "init", "-q", root], check=True)
    shutil.copytree(HOOK.parent, root / "scripts" / "hooks")
    return root


def hooks_path(root: Path) -> str:
    command = ["git", "-C", str(root), "config", "--get", "core.hooksPath"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def test_setup_activates_the_hook(checkout: Path) -> None:
    setup_venv.use_hooks(checkout)
    assert hooks_path(checkout) == "scripts/hooks"
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for message, code in (("no area", 1), ("docs: add a page", 0)):
        commit = ["git", *author, "commit", "-q", "--allow-empty", "-m", message]
        assert subprocess.run(commit, cwd=checkout, capture_output=True).returncode == code


def test_setup_leaves_other_hooks_alone(checkout: Path) -> None:
    subprocess.run(["git", "-C", checkout, "config", "core.hooksPath", "mine"], check=True)
    setup_venv.use_hooks(checkout)
    assert hooks_path(checkout) == "mine"
    subprocess.run(["git", "-C", checkout, "config", "--unset", "core.hooksPath"], check=True)
    (checkout / ".git" / "hooks").mkdir(exist_ok=True)
    (checkout / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\n")
    setup_venv.use_hooks(checkout)
    assert hooks_path(checkout) == ""


def test_a_copy_within_another_repository_changes_nothing(checkout: Path) -> None:
    copy = checkout / "vendored"
    copy.mkdir()
    setup_venv.use_hooks(copy)
    assert hooks_path(checkout) == ""
