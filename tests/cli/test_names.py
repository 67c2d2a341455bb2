"""What people type from habit: other names of commands, slips, questions without `ask`, parts of pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec import cli
from localspec.cli import app
from localspec.cli.options import ALIASES, COMMANDS
from localspec.client.pairs import PairsClient
from tests.support.daemons import Home
from tests.support.terminal import terminal

WORDS = {word for words in app.SYNONYMS.values() for word in words}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert app.run(list(arguments)) == 2
    return capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------ other names


def test_other_names_do_the_same(warm: Home) -> None:
    warm.run("ask", "say hello")
    assert warm.run("models").stdout == warm.run("list").stdout
    assert json.loads(warm.run("ps", "--json").stdout)["pair"]["state"] == "ready"
    assert warm.run("run", "builtin", "say", "hello").stdout == "hello\n"
    assert warm.run("history", "ls").stdout == warm.run("history", "list").stdout
    for verb in ("delete", "remove", "rm"):
        warm.run("ask", "say bye")
        assert warm.run("history", verb, "last").returncode == 0
    assert warm.run("history", "search", "bye").returncode == 1


def test_help_is_what_the_option_shows(home: Home) -> None:
    for command in ([], ["ask"], ["history", "rm"], ["history", "delete"], ["models"]):
        asked = home.run("help", *command)
        assert asked.returncode == 0, asked.stderr
        own = [{"delete": "rm", "models": "list"}.get(word, word) for word in command]
        assert asked.stdout == home.run(*own, "--help").stdout
    assert home.run("help", "nope").returncode == 2


def test_no_habit_is_a_command_of_ours() -> None:
    names = {*COMMANDS, *ALIASES}
    assert not WORDS & names
    assert {*app.SYNONYMS} - {"--version"} <= names
    assert len(WORDS) == sum(map(len, app.SYNONYMS.values())), "each means one command"


# ------------------------------------------------------------------ the short name


SHORT = ("-c", "import sys; from localspec.cli import short; sys.exit(short())")


def short(home: Home, *arguments: str, stdin: str | None = None) -> str:
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [sys.executable, *SHORT, *arguments]
    run = subprocess.run(command, env=home.environment, capture_output=True, text=True, **given)
    return str(run.stdout + run.stderr)


def test_ask_asks_what_is_no_command(warm: Home) -> None:
    assert short(warm, "say hello") == short(warm, "say", "hello") == "hello\n"
    assert short(warm, "-n", "9", "say hello") == short(warm, stdin="say hello") == "hello\n"
    assert short(warm, "ask", "say hello") == "hello\n"
    assert short(warm, "list") == short(warm, "models") == warm.run("list").stdout
    assert short(warm, "--version") == warm.run("--version").stdout
    assert short(warm, "--help") == short(warm, "-h") == warm.run("--help").stdout
    assert "No question given" in short(warm)
    with terminal(warm.environment, program=SHORT) as shown:
        shown.wait()
        assert "Usage: localspec [OPTIONS] COMMAND" in shown.text


@pytest.mark.parametrize(
    ("typed", "shows"),
    [
        (["histroy"], "No such command 'histroy'; did you mean history?"),
        (["install"], "No such command 'install'; did you mean pull?"),
        (["list"], "builtin"),
        (["models"], "builtin"),
        (["raw"], "raw"),  # a word that is near to no command
        (["say", "histroy"], "histroy"),
        (["say histroy"], "histroy"),
    ],
)
def test_one_word_at_a_terminal_may_be_a_slip(warm: Home, typed: list[str], shows: str) -> None:
    with terminal(warm.environment, *typed, program=SHORT, columns=120) as shown:
        shown.wait()
        assert shows in shown.text
        assert ("did you mean" in shown.text) == ("did you mean" in shows)


@given(text=st.one_of(st.text(), st.sampled_from(sorted(WORDS))))
def test_ask_knows_commands_by_their_whole_names(text: str) -> None:
    assert cli._asks([text]) == (text not in {*COMMANDS, *ALIASES, "-h", "--help", "--version"})
    assert not any(cli._asks([name, text]) for name in (*COMMANDS, *ALIASES))


def test_both_names_are_installed() -> None:
    scripts = {each.name: each for each in entry_points(group="console_scripts")}
    assert (scripts["localspec"].load(), scripts["ask"].load()) == (cli.main, cli.short)


# ------------------------------------------------------------------ wrong names


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *((word, name) for name, words in app.SYNONYMS.items() for word in words),
        ("hist", "history"),
        ("histroy", "history"),
        ("stat", "stats" if "stats" in COMMANDS else "status"),
        ("log", "logs"),
        ("modles", "list"),
    ],
)
def test_a_habit_or_a_slip_is_told_the_command(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert refusal(capsys, typed, "-x").endswith(f"'{typed}'; did you mean {meant}?")


def test_groups_tell_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "history", "serach", "x").endswith("did you mean search?")
    assert refusal(capsys, "config", "shwo").endswith("did you mean show?")
    assert refusal(capsys, "service", "nothing").endswith("see: localspec service --help")


@given(data=st.data(), name=st.sampled_from([each for each in COMMANDS if len(each) > 3]))
def test_one_slip_is_never_left_without_a_suggestion(data: st.DataObject, name: str) -> None:
    place = data.draw(st.integers(1, len(name) - 2))
    letter = data.draw(st.sampled_from("aeiouxst"))
    slips = [name[:place] + name[place + 1 :], name[:place] + letter + name[place:]]
    slips.append(name[:place] + name[place + 1] + name[place] + name[place + 2 :])
    slip = data.draw(st.sampled_from(slips))
    context = click.Context(app.app, info_name="localspec")
    if app.app.get_command(context, slip) or slip in ALIASES:
        return
    with pytest.raises(click.UsageError, match="did you mean"):
        app.app.resolve_command(context, [slip])


@pytest.mark.parametrize(
    ("typed", "ask"),
    [
        (["What does os.walk return?"], "'What does os.walk return?'"),
        (["what", "does", "it", "do"], "'what does it do'"),
        (["Why?"], "'Why?'"),
        (["say it's so", "-m", "coder-7b"], """'say it'"'"'s so' -m coder-7b"""),
        (["tell", "me", "more"], "'tell me more'"),
    ],
)
def test_a_question_is_told_how_it_is_asked(
    capsys: pytest.CaptureFixture[str], typed: list[str], ask: str
) -> None:
    said = refusal(capsys, *typed)
    assert said.endswith(f"A question is not a command. To ask it: localspec ask {ask}")


# ------------------------------------------------------------------ options and keys


def test_messages_are_in_the_command_lines_own_words(home: Home) -> None:
    run = home.run("ask", "--draft", "10000", "hi")
    assert (run.returncode, "--draft" in run.stderr) == (2, True)
    assert "speculative" not in run.stderr
    run = home.run("config", "set", "contxt", "5")
    assert run.returncode == 2
    assert "context" in run.stderr
    assert "watchdog" not in run.stderr, "not all keys"
    assert "localspec config set:" not in run.stderr


# ------------------------------------------------------------------ parts of a pair's name


def test_a_pair_is_chosen_by_parts_of_its_name(warm: Home) -> None:
    assert warm.run("ask", "-q", "BUILT", "-q", "in", "say hello").stdout == "hello\n"
    assert warm.run("complete", "-q", "built", __file__ + ":1").returncode == 0
    run = warm.run("ask", "-q", "built", "-q", "x", "hi")
    assert run.returncode == 1
    assert "No installed pair has 'built' and 'x' in its name; installed: builtin" in run.stderr
    run = warm.run("ask", "-q", "coder", "-q", "7b", "hi")
    assert (run.returncode, "localspec pull coder-7b" in run.stderr) == (1, True)
    run = warm.run("ask", "-q", "built", "-m", "builtin", "hi")
    assert run.returncode == 2
    assert "-m and -q cannot be used together" in run.stderr


def test_of_several_the_shortest_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("coder-14b", "coder-7b", "b-coder-7b", "tiny")
    listed = {"pairs": [{"name": name, "here": True} for name in names]}
    monkeypatch.setattr(PairsClient, "pairs", lambda self, everything=False: listed)
    assert PairsClient().named_like(["CODER", "b"]) == "coder-7b"
    assert PairsClient().named_like(["14"]) == "coder-14b"
