"""Test tab completion of commands, options and values in real shells."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from localspec.cli.app import COMMANDS
from tests.support.daemons import Home, scripted_home
from tests.support.shells import shell, with_program

SHELLS = ["bash", "zsh", "fish"]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with scripted_home() as home:
        with_program(home)
        assert home.run("ask", "say hello").returncode == 0
        assert home.run("ask", "--save", "excerpt", "Summarize $input").returncode == 0
        yield home


def completion_setup(name: str) -> str:
    if name == "fish":
        return "localspec completion fish | source"
    return f'eval "$(localspec completion {name})"'


@pytest.mark.parametrize("name", SHELLS)
def test_tab_completes_commands_options_and_values(home: Home, name: str) -> None:
    with shell(home, name) as session:
        # A start-up file may source it before compinit.
        session.send(f"{completion_setup(name)}; echo done | tr a-z A-Z\n")
        session.expect("DONE")
        session.expect("ready> ")
        for typed, completed in (
            ("hist", "history"),
            ("restar", "restart"),
            ("use bui", "use builtin"),
            ("ask --no-l", "ask --no-log"),
            ("config set fl", "config set flash_attention"),
            ("config set kv_type q8", "config set kv_type q8_0"),
            ("config set exact t", "config set exact true"),
            ("ask -m bui", "ask -m builtin"),
            ("run bui", "run builtin"),
            ("ask -t exc", "ask -t excerpt"),
            ("help templ", "help templates"),
        ):
            session.send(f"localspec {typed}\t")
            session.expect(f"localspec {completed}")
            session.send("\x15")  # Ctrl-U empties the line.
        assert "not found" not in session.text


@pytest.mark.parametrize("name", SHELLS)
def test_tab_completes_the_program_ask(home: Home, name: str) -> None:
    with shell(home, name) as session:
        session.send(f"{completion_setup(name)}; echo done | tr a-z A-Z\n")
        session.expect("DONE")
        session.expect("ready> ")
        for typed, completed in (
            ("--no-l", "--no-log"),
            ("-m bui", "-m builtin"),
            ("-t exc", "-t excerpt"),
            ("-u -t exc", "-u -t excerpt"),
            ("--no-log -c --temperat", "--no-log -c --temperature"),
        ):
            session.send(f"ask {typed}\t")
            session.expect(f"ask {completed}")
            session.send("\x15")  # Ctrl-U empties the line.
        session.send("localspec hist\t")  # The completion of `localspec` still works.
        session.expect("localspec history")
        assert "not found" not in session.text


def test_zsh_completes_when_compinit_comes_later(home: Home) -> None:
    with shell(home, "zsh") as session:
        later = "autoload -U compinit; compinit -u -D"
        session.send(f"{completion_setup('zsh')}; {later}; echo done | tr a-z A-Z\n")
        session.expect("DONE")
        session.expect("ready> ")
        session.send("localspec hist\t")
        session.expect("localspec history")
        session.send("\x15ask -m bui\t")
        session.expect("ask -m builtin")


def test_fish_shows_whole_descriptions(home: Home) -> None:
    if not shutil.which("fish"):
        pytest.skip("this machine has no fish among its shells")
    with_commas = {name: text for name, (_, text) in COMMANDS.items()}
    command = (
        f'{completion_setup("fish")}; complete -C "localspec "; complete -C "localspec ask --s"'
    )
    run = subprocess.run(
        ["fish", "--no-config", "-c", command], env=home.environment, capture_output=True, text=True
    )
    assert run.stderr == ""
    offered = dict(line.split("\t") for line in run.stdout.splitlines())
    assert {name: offered[name] for name in with_commas} == with_commas
    assert any("," in text for text in with_commas.values())
    assert offered["--seed"] == "Random seed, for repeatable answers."
