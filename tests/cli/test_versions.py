"""A daemon that goes on answering after localspec was upgraded: every command says so in one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import localspec
from tests.cli.test_harmless import ARGUMENTS
from tests.support.daemons import Home, RunningDaemon, temporary_home
from tests.support.many import in_pipes
from tests.support.patience import PATIENCE

OLD_DAEMON = """
import runpy
import localspec
localspec.__version__ = "0.1.0"
runpy.run_module("localspec.daemon", run_name="__main__")
"""
NOTE = f"The daemon is localspec 0.1.0, and this is {localspec.__version__}: localspec restart\n"
# A daemon that is older than the header sends none.
SILENT_DAEMON = f"""
from localspec.daemon.http import requests
requests.VERSION_HEADER = "x-something-else"
{OLD_DAEMON}
"""
# Commands that ask no daemon, and `doctor`, which has a line about versions of its own.
WITHOUT = (
    "help",
    "service",
    "editor",
    "templates",
    "config",
    "logs",
    "completion",
    "commit",
    "doctor",
)
UNTRIED = ("rpc-worker", "templates edit", "config edit")  # they start other programs
USAGE_ERROR = 2  # exit code of a command that is refused before it asks


@pytest.fixture
def home() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake()
        yield home


def test_every_command_that_asks_the_daemon_says_it(home: Home) -> None:
    RunningDaemon(home, OLD_DAEMON)
    home.chat("say hello", localspec={"conversation": "new"})
    lines = [
        [*name.split(), *(arguments or "hello" * (name == "ask")).replace("❮\x1b❯", "none").split()]
        for name, variants in ARGUMENTS.items()
        for arguments in variants
        if name not in UNTRIED
    ]
    results = in_pipes(home.environment, [(words, {}) for words in lines])
    told = set()
    for words, result in zip(lines, results, strict=True):
        asks = words[0] not in WITHOUT or words[1:2] == ["set"]
        if not asks or words in (["use"], ["launch"]):
            assert "0.1.0" not in result.err, words
        elif result.code != USAGE_ERROR or "0.1.0" in result.err:
            assert result.err.endswith(NOTE), words
            assert result.err.count("0.1.0") == 1
            told.add(words[0])
    assert told > {"ask", "list", "pull", "show", "status", "history", "explain", "stats", "start"}


def test_an_answer_costs_no_second_request(home: Home) -> None:
    RunningDaemon(home, OLD_DAEMON)
    asked = home.run("ask", "say hello")
    assert (asked.stdout, asked.stderr) == ("hello\n", NOTE)
    assert home.run("ask", "--json", "say hello").stderr == NOTE
    assert home.status()["counts"]["requests"] == 2


def test_a_restart_ends_it(home: Home) -> None:
    daemon = RunningDaemon(home, OLD_DAEMON)
    assert home.run("list").stderr == NOTE
    for _ in range(2):
        assert home.run("restart").stderr == ""
        daemon.process.communicate(timeout=PATIENCE)
        assert home.run("list").stderr == ""
    assert home.run("stop").stderr == ""


def test_a_stopped_daemon_is_not_named(home: Home) -> None:
    daemon = RunningDaemon(home, OLD_DAEMON)
    assert home.run("stop").stderr == ""
    daemon.process.communicate(timeout=PATIENCE)


def test_a_daemon_that_does_not_say_its_version_is_older(home: Home) -> None:
    RunningDaemon(home, SILENT_DAEMON)
    note = "The daemon is an older localspec than this one"
    assert home.run("list").stderr.startswith(note)
    refused = home.run("ask", "-m", "nope", "hello")
    assert refused.returncode == 1
    assert note in refused.stderr.splitlines()[-1]


def test_other_clients_are_not_told_the_version(home: Home) -> None:
    RunningDaemon(home)
    assert "x-localspec-version" not in home.request("GET", "/health").headers
    assert home.run("list").stderr == ""
