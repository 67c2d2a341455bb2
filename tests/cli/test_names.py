"""What people type from habit: other names of commands, slips, questions without `ask`, parts of pairs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec import cli
from localspec.cli import app, command_names
from localspec.cli.app import COMMANDS
from localspec.cli.options import ALIASES
from localspec.client.pairs import PairsClient
from tests.support.daemons import Home
from tests.support.terminal import terminal

HABITS = {**command_names.SYNONYMS, **command_names.HINTED_WORDS}
CONTEXT = click.Context(app.app, info_name="localspec")


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
        shown, _, pages = asked.stdout.partition("\nPages, shown by localspec help TOPIC:")
        assert shown == home.run(*own, "--help").stdout
        assert bool(pages) == (command == [])
    assert home.run("help", "nope").returncode == 2


def test_no_habit_is_a_command_of_ours() -> None:
    names = {*COMMANDS, *ALIASES}
    assert not HABITS.keys() & names
    assert not command_names.SYNONYMS.keys() & command_names.HINTED_WORDS.keys()
    assert not command_names.WITHOUT_COUNTERPART & (names | HABITS.keys())


def test_what_a_habit_stands_for_exists(
    subtests: pytest.Subtests,
) -> None:
    for word in HABITS:
        with subtests.test(word=str(word)):
            resolve(app.app, list(HABITS[word]))


def resolve(group: click.Group, arguments: list[str]) -> None:
    """Fail unless the arguments name a command, down to one in a group, or an option."""
    name, *rest = arguments
    if name.startswith("-"):
        known = {flag for param in group.params for flag in param.opts}
        assert name in known
        return
    command = group.get_command(CONTEXT, name)
    assert command is not None, arguments
    if rest:
        if isinstance(command, click.Group):
            resolve(command, rest)
        else:
            assert rest[0] in {flag for param in command.params for flag in param.opts}


@pytest.mark.parametrize("word", sorted(command_names.SYNONYMS))
def test_a_synonym_runs(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = command_names.SYNONYMS[word]
    shown = []
    for arguments in ([name, *rest], [word]):
        assert cli.main([*arguments, *(["--help"] if word != "version" else [])]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    if word != "version":
        resolved, _, more = app.app.resolve_command(CONTEXT, [word, "-x"])
        assert (resolved, more) == (name, [*rest, "-x"]), "after --debug too"


def test_synonyms_do_the_same(warm: Home) -> None:
    warm.run("ask", "say hello")
    assert warm.run("ls").stdout == warm.run("list").stdout
    assert warm.run("--debug", "ls").stdout == warm.run("list").stdout
    assert warm.run("prompt", "say hello").stdout == "hello\n"
    assert warm.run("version").stdout == warm.run("--version").stdout
    # Not as a table: how much memory is free is in it.
    found = [
        json.loads(warm.run(word, "coder", "--json").stdout) for word in ("search", "catalogue")
    ]
    assert [each["name"] for each in found[0]["pairs"]] == [
        each["name"] for each in found[1]["pairs"]
    ]
    assert "coder-7b" in {each["name"] for each in found[0]["pairs"]}
    assert warm.run("history", "last").stdout == warm.run("history", "show", "last").stdout
    assert warm.run("config", "ls").stdout == warm.run("config").stdout
    assert warm.run("set", "depth", "3").returncode == 0
    assert warm.run("config", "get", "depth").stdout == "3\n"
    assert warm.run("config", "reset", "depth").returncode == 0


@pytest.mark.parametrize("group", ["server", "daemon"])
def test_the_server_as_a_group_of_commands(warm: Home, group: str) -> None:
    warm.run("ask", "say hello")
    assert json.loads(warm.run(group, "status", "--json").stdout)["pair"]["state"] == "ready"
    assert warm.run(group, "--help").returncode == 2
    assert "did you mean" in warm.run(group, "anything").stderr


# ------------------------------------------------------------------ the short name


SHORT = ("-c", "import sys; from localspec.cli import short; sys.exit(short())")


def short(home: Home, *arguments: str, stdin: str | None = None) -> str:
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [sys.executable, *SHORT, *arguments]
    run = subprocess.run(command, env=home.environment, capture_output=True, text=True, **given)
    return str(run.stdout + run.stderr)


def test_ask_asks_whatever_its_first_word_is(warm: Home) -> None:
    assert short(warm, "say hello") == short(warm, "say", "hello") == "hello\n"
    assert short(warm, "-n", "9", "say hello") == short(warm, stdin="say hello") == "hello\n"
    for command in ("stop", "list", "ask", "--version", "complete"):
        assert short(warm, command, "-n", "x") == warm.run("ask", command, "-n", "x").stderr
    assert short(warm, "stop", "say", "hello") == warm.run("ask", "stop", "say", "hello").stdout
    assert warm.run("status").returncode == 0, "it was not stopped"
    assert short(warm, "--help") == short(warm, "-h") == warm.run("ask", "--help").stdout


@pytest.mark.parametrize(
    "typed", [["hi"], ["hello"], ["cats"], ["list", "all", "files"], ["stop"], ["histroy"]]
)
def test_a_word_at_a_terminal_is_asked_too(warm: Home, typed: list[str]) -> None:
    with terminal(warm.environment, *typed, program=SHORT, columns=120) as shown:
        shown.wait()
        assert "No such command" not in shown.text
        assert (
            " ".join(typed)
            in json.loads(warm.run("history", "show", "last", "--json").stdout)["title"]
        )


def test_ask_alone_at_a_terminal_shows_how_to_ask(warm: Home) -> None:
    with terminal(warm.environment, program=SHORT) as shown:
        shown.wait()
        assert "No question given" in shown.text
        assert 'localspec ask "What does shutil.copytree do?"' in shown.text
        assert "localspec ask --help" in shown.text
        assert "COMMAND" not in shown.text


@given(words=st.lists(st.one_of(st.text(), st.sampled_from(sorted({*COMMANDS, *HABITS})))))
def test_ask_is_localspec_ask(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        given: list[list[str]] = []
        patch.setattr(sys, "argv", ["ask", *words])
        patch.setattr(cli, "main", given.append)
        cli.short()
    assert given == [["ask", *words]]


def test_both_names_are_installed() -> None:
    scripts = {each.name: each for each in entry_points(group="console_scripts")}
    assert (scripts["localspec"].load(), scripts["ask"].load()) == (cli.main, cli.short)


# ------------------------------------------------------------------ wrong names


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *((word, " ".join(meant)) for word, meant in command_names.HINTED_WORDS.items()),
        ("hist", "history"),
        ("histroy", "history"),
        ("stat", "stats" if "stats" in COMMANDS else "status"),
        ("restrat", "restart"),
        ("unlaod", "unload"),
        ("laod", "load"),
        ("strat", "start"),
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


@pytest.mark.parametrize("word", ["push", "cp", "keys", "upload", "uload", "nload", "zzz"])
def test_nothing_is_suggested_where_something_else_may_be_meant(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert refusal(capsys, word).endswith(f"No such command '{word}'; see: localspec --help")


def suggested(group: click.Group, word: str) -> str:
    """Return what a group suggests for a word; empty if it suggests nothing, or knows the word."""
    try:
        group.resolve_command(CONTEXT, [word])
    except click.UsageError as error:
        found = re.search(r"did you mean (.*)\?$", error.message)
        return found[1] if found else ""
    return ""


@st.composite
def slips(draw: st.DrawFn, names: list[str], most: int) -> tuple[str, str]:
    """A name, and the same with up to `most` letters left out, added, changed or swapped."""
    name = word = draw(st.sampled_from(names))
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(word)))
        letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz-_1"))
        before, after = word[:at], word[at:]
        swapped = before + after[1:2] + after[:1] + after[2:]
        word = draw(
            st.sampled_from(
                [before + after[1:], before + letter + after, before + letter + after[1:], swapped]
            )
        )
    return name, word


def groups() -> list[click.Group]:
    commands = [app.app.get_command(CONTEXT, name) for name in COMMANDS]
    return [app.app, *(each for each in commands if isinstance(each, click.Group))]


@given(data=st.data())
@settings(max_examples=1000)
def test_no_slip_is_told_the_opposite_or_a_command_that_is_not_there(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(groups()))
    names = group.list_commands(CONTEXT)
    name, word = data.draw(slips(names, 1))
    opposites = [pair[1 - pair.index(name)] for pair in command_names.OPPOSITES if name in pair]
    if not (meant := suggested(group, word)):
        return
    assert meant not in opposites
    resolve(group, meant.split())


@given(slip=slips([name for pair in command_names.OPPOSITES for name in pair], 2))
@settings(max_examples=1000)
def test_affixes_do_not_make_the_opposite_of_a_name(slip: tuple[str, str]) -> None:
    name, word = slip
    for first, second in command_names.OPPOSITES:
        short, long = sorted((first, second), key=len)
        if name == long and short in long and word != short:
            assert command_names.closest(word, [short, long]) != short


@given(word=st.one_of(st.text(max_size=12), st.from_regex(r"[a-z]{1,10}", fullmatch=True)))
def test_what_is_suggested_for_any_word_is_there(word: str) -> None:
    for group in groups():
        if meant := suggested(group, word):
            resolve(group, meant.split())


@given(data=st.data(), name=st.sampled_from([each for each in COMMANDS if len(each) > 3]))
def test_one_slip_is_never_left_without_a_suggestion(data: st.DataObject, name: str) -> None:
    place = data.draw(st.integers(1, len(name) - 2))
    letter = data.draw(st.sampled_from("aeiouxst"))
    slips = [name[:place] + name[place + 1 :], name[:place] + letter + name[place:]]
    slips.append(name[:place] + name[place + 1] + name[place] + name[place + 2 :])
    slip = data.draw(st.sampled_from(slips))
    context = click.Context(app.app, info_name="localspec")
    known = {*COMMANDS, *ALIASES, *HABITS, *command_names.WITHOUT_COUNTERPART}
    if slip in known or slip == "uload":  # which may be "load" with a letter too many
        return
    with pytest.raises(click.UsageError, match="did you mean"):
        app.app.resolve_command(context, [slip])


@pytest.mark.parametrize(
    ("typed", "not_meant"),
    [("--stream", "--no-stream"), ("--log", "--no-log"), ("--daemon-start", "--no-daemon-start")],
)
def test_no_option_is_told_its_opposite(
    capsys: pytest.CaptureFixture[str], typed: str, not_meant: str
) -> None:
    assert not_meant not in refusal(capsys, "ask", typed, "hi")


def test_llama_cpps_name_of_the_temperature_is_known(warm: Home) -> None:
    assert warm.run("ask", "--temp", "0", "say hello").stdout == "hello\n"


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
