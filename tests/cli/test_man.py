"""Test that man pages contain the text of --help and that viewers accept them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from localspec.cli import app
from localspec.cli.app import COMMANDS
from localspec.cli.commands.help import page, pages
from tests.support.daemons import Home

# Each viewer reads a page and reports problems on stderr or stdout.
VIEWERS = {
    "man": ["man", "--warnings", "-E", "UTF-8", "-l"],
    "groff": ["groff", "-man", "-ww", "-Tutf8", "-K", "utf8"],
    "mandoc": ["mandoc", "-Tlint", "-W", "error"],
}
INSTALLED_VIEWERS = {name: command for name, command in VIEWERS.items() if shutil.which(name)}


@pytest.fixture(scope="module")
def man_pages() -> dict[str, str]:
    return dict(pages(click.Context(app.app, info_name="localspec")))


def test_each_command_has_a_page(man_pages: dict[str, str]) -> None:
    assert {f"localspec-{name}.1" for name in COMMANDS} <= man_pages.keys()
    assert {"localspec.1", "localspec-history-rm.1", "localspec-config-set.1"} <= man_pages.keys()
    for text in man_pages.values():
        assert text.isascii()
        assert [line for line in text.splitlines() if not line.strip()] == []
        assert re.findall(r"^\.SH (.*)", text, re.MULTILINE)[:3] == [
            *("NAME", "SYNOPSIS", "DESCRIPTION")
        ]


def test_viewers_accept_every_page(man_pages: dict[str, str], tmp_path: Path) -> None:
    for name, text in man_pages.items():
        (tmp_path / name).write_text(text)
    for name in INSTALLED_VIEWERS.keys() & {"groff", "mandoc"}:
        files = [str(tmp_path / name_) for name_ in man_pages]
        run = subprocess.run([*INSTALLED_VIEWERS[name], *files], capture_output=True, text=True)
        assert run.returncode == 0
        assert run.stderr == ""


def test_a_page_shows_the_help(home: Home, tmp_path: Path) -> None:
    run = home.run("help", "--man", "ask")
    assert run.returncode == 0, run.stderr
    file = tmp_path / "localspec-ask.1"
    file.write_text(run.stdout)
    for name in INSTALLED_VIEWERS.keys() & {"man", "groff"}:
        environment = {**home.environment, "MANWIDTH": "200", "LC_ALL": "C.UTF-8"}
        result = subprocess.run(
            [*INSTALLED_VIEWERS[name], str(file)], env=environment, capture_output=True, text=True
        )
        text = " ".join(re.sub(r"\x1b\[[\d;]*m|.\x08", "", result.stdout).split())
        text = text.replace("‐ ", "")  # Rejoin words that groff has hyphenated.
        command = app.app.get_command(click.Context(app.app), "ask")
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option):
                assert ", ".join(option.opts) in text
                assert " ".join((option.help or "").split()) in text
        assert "git diff | localspec ask" in text


def test_roff_requests_in_texts_are_escaped(tmp_path: Path) -> None:
    odd = r".so /etc/passwd, 'quoted' \fBbold\n -1 … × \" $HOME"
    command = click.Command("odd", help=f"{odd}\n\n.TH x", epilog=f"Example: {odd}")
    file = tmp_path / "odd.1"
    file.write_text(page(click.Context(command, info_name="odd")))
    for name in INSTALLED_VIEWERS.keys() & {"groff"}:
        result = subprocess.run(
            [*INSTALLED_VIEWERS[name], str(file)], capture_output=True, text=True
        )
        assert result.stderr == ""
        assert re.sub(r"\x1b\[[\d;]*m", "", result.stdout).count(odd) == 3
