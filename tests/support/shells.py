"""Real shells in a terminal of their own, with `localspec` in their PATH."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.support.daemons import Home
from tests.support.terminal import Terminal, terminal

# Shells without the user's configuration.
SHELLS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "-i"),
    "sh": ("sh", "-i"),
}
BECOME = ("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])")


def with_program(home: Home) -> None:
    """Let shells of this home find `localspec` and `ask`."""
    folder = home.root / "bin"
    folder.mkdir(exist_ok=True)
    short = "-c 'import sys; from localspec import cli; sys.exit(cli.short())'"
    for name, words in {"localspec": "-m localspec", "ask": short}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    home.environment["PATH"] = f"{folder}:{home.environment['PATH']}"


@contextlib.contextmanager
def shell(home: Home, name: str) -> Iterator[Terminal]:
    """Yield an interactive shell that waits for a command."""
    if not shutil.which(name):
        pytest.skip(f"this machine has no {name} among its shells")
    home_ = str(home.root)
    environment = {**home.environment, "PS1": "ready> ", "HOME": home_, "XDG_DATA_HOME": home_}
    with terminal(environment, *SHELLS[name], program=BECOME, columns=200) as opened:
        if name == "fish":
            opened.send("function fish_prompt; echo 'ready> '; end\n")
        opened.expect("ready> ")
        yield opened


def status(name: str) -> str:
    """Return a command that prints the exit code of the previous one, in brackets."""
    return "echo [$status]\n" if name == "fish" else "echo [$?]\n"
