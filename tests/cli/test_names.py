"""Test aliases, typos, questions without `ask`, and pairs chosen by a part of their name."""

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
from tests.support.daemons import Home, wait_for
from tests.support.extras import has_command, needs
from tests.support.terminal import terminal

# Without those that mean a command of an extra that this installation lacks.
SYNONYMS, HINTED_WORDS = (
    {word: command for word, command in words.items() if has_command(command[0])}
    for words in (command_names.SYNONYMS, command_names.HINTED_WORDS)
)
HABITS = {**SYNONYMS, **HINTED_WORDS}
CONTEXT = click.Context(app.app, info_name="localspec")


def run_refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert app.run(list(arguments)) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "command", ["ask -m zz hi", "show zz", "pull zz", "use zz", "load zz", "catalogue zz"]
)
def test_a_mistake_in_models_toml_is_told_where_a_name_is_missed(warm: Home, command: str) -> None:
    file = warm.root / "config" / "models.toml"
    assert "models.toml" not in warm.run(*command.split()).stderr
    file.parent.mkdir(exist_ok=True)
    file.write_text("[pairs.zz]\nkeeps = true\n")
    try:
        wait_for(lambda: warm.run("list", "--json").stdout.count("keeps"), "the edit to be seen")
        run = warm.run(*command.split())
        assert run.returncode
        assert f"{file}, line 2, pairs.zz.keeps: 'keeps' is not known" in run.stderr
    finally:
        file.unlink()
        wait_for(lambda: "keeps" not in warm.run("list", "--json").stdout, "the file's end")


def test_aliases_do_the_same(warm: Home) -> None:
    warm.run("ask", "say hello")
    assert warm.run("models").stdout == warm.run("list").stdout
    assert json.loads(warm.run("ps", "--json").stdout)["pair"]["state"] == "ready"
    assert warm.run("run", "builtin", "say", "hello").stdout == "hello\n"
    assert warm.run("history", "ls").stdout == warm.run("history", "list").stdout
    for verb in ("delete", "remove", "rm"):
        warm.run("ask", "say bye")
        assert warm.run("history", verb, "-y", "last").returncode == 0
    assert warm.run("history", "search", "bye").returncode == 1


def test_the_help_command_shows_the_same_as_the_option(home: Home) -> None:
    for command in ([], ["ask"], ["history", "rm"], ["history", "delete"], ["models"]):
        output = home.must_run("help", *command)
        canonical = [{"delete": "rm", "models": "list"}.get(word, word) for word in command]
        page, _, pages = output.partition("\nPages, shown by localspec help TOPIC:")
        assert page == home.run(*canonical, "--help").stdout
        assert bool(pages) == (command == [])
    assert home.run("help", "nope").returncode == 2


def test_habitual_words_are_no_commands() -> None:
    names = {*COMMANDS, *ALIASES}
    assert not HABITS.keys() & names
    assert not SYNONYMS.keys() & HINTED_WORDS.keys()
    assert not command_names.WITHOUT_COUNTERPART & (names | HABITS.keys())


def test_the_command_behind_a_habitual_word_exists(subtests: pytest.Subtests) -> None:
    for word in HABITS:
        with subtests.test(word=str(word)):
            resolve(app.app, list(HABITS[word]))


def resolve(group: click.Group, arguments: list[str]) -> None:
    """Fail unless the arguments name a command, down to one in a group, or an option."""
    name, *rest = arguments
    if name.startswith("-"):
        flags = {flag for param in group.params for flag in param.opts}
        assert name in flags
        return
    command = group.get_command(CONTEXT, name)
    assert command is not None, arguments
    if rest:
        if isinstance(command, click.Group):
            resolve(command, rest)
        else:
            assert rest[0] in {flag for param in command.params for flag in param.opts}


@pytest.mark.parametrize("word", sorted(SYNONYMS))
def test_a_synonym_runs(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = SYNONYMS[word]
    outputs = []
    for arguments in ([name, *rest], [word]):
        assert cli.main([*arguments, *(["--help"] if word != "version" else [])]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    if word != "version":
        resolved, _, remaining = app.app.resolve_command(CONTEXT, [word, "-x"])
        assert (resolved, remaining) == (name, [*rest, "-x"]), "after --debug too"


def test_synonyms_do_the_same(warm: Home) -> None:
    warm.run("ask", "say hello")
    assert warm.run("ls").stdout == warm.run("list").stdout
    assert warm.run("--debug", "ls").stdout == warm.run("list").stdout
    assert warm.run("prompt", "say hello").stdout == "hello\n"
    assert warm.run("version").stdout == warm.run("--version").stdout
    # The table cannot be compared, because it shows the free memory.
    listings = [
        json.loads(warm.run(word, "coder", "--json").stdout) for word in ("search", "catalogue")
    ]
    assert [pair["name"] for pair in listings[0]["pairs"]] == [
        pair["name"] for pair in listings[1]["pairs"]
    ]
    assert "coder-7b" in {pair["name"] for pair in listings[0]["pairs"]}
    assert warm.run("history", "last").stdout == warm.run("history", "show", "last").stdout
    assert warm.run("config", "ls").stdout == warm.run("config").stdout
    assert warm.run("set", "depth", "3").returncode == 0
    assert warm.run("config", "get", "depth").stdout == "3\n"
    assert warm.run("config", "reset", "depth").returncode == 0


@pytest.mark.parametrize("group", ["server", "daemon"])
def test_server_and_daemon_stand_for_groups_of_commands(warm: Home, group: str) -> None:
    warm.run("ask", "say hello")
    assert json.loads(warm.run(group, "status", "--json").stdout)["pair"]["state"] == "ready"
    assert warm.run(group, "--help").returncode == 2
    assert "did you mean" in warm.run(group, "anything").stderr


SHORT = ("-c", "import sys; from localspec.cli import short; sys.exit(short())")


def run_short(home: Home, *arguments: str, stdin: str | None = None) -> str:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [sys.executable, *SHORT, *arguments]
    run = subprocess.run(command, env=home.environment, capture_output=True, text=True, **options)
    return str(run.stdout + run.stderr)


def test_ask_sends_a_question_whatever_its_first_word_is(warm: Home) -> None:
    assert run_short(warm, "say hello") == run_short(warm, "say", "hello") == "hello\n"
    assert (
        run_short(warm, "-n", "9", "say hello") == run_short(warm, stdin="say hello") == "hello\n"
    )
    for command in ("stop", "list", "ask", "--version", "complete"):
        assert run_short(warm, command, "-n", "x") == warm.run("ask", command, "-n", "x").stderr
    assert run_short(warm, "stop", "say", "hello") == warm.run("ask", "stop", "say", "hello").stdout
    assert warm.run("status").returncode == 0, "it was not stopped"
    assert run_short(warm, "--help") == run_short(warm, "-h") == warm.run("ask", "--help").stdout


@pytest.mark.parametrize(
    "typed", [["hi"], ["hello"], ["cats"], ["list", "all", "files"], ["stop"], ["histroy"]]
)
def test_a_single_word_at_a_terminal_is_a_question(warm: Home, typed: list[str]) -> None:
    with terminal(warm.environment, *typed, program=SHORT, columns=120) as session:
        session.wait()
        assert "No such command" not in session.text
        assert (
            " ".join(typed)
            in json.loads(warm.run("history", "show", "last", "--json").stdout)["title"]
        )


def test_ask_alone_at_a_terminal_shows_how_to_ask(warm: Home) -> None:
    with terminal(warm.environment, program=SHORT) as session:
        session.wait()
        assert "No question given" in session.text
        assert 'localspec ask "What does shutil.copytree do?"' in session.text
        assert "localspec ask --help" in session.text
        assert "COMMAND" not in session.text


@given(words=st.lists(st.one_of(st.text(), st.sampled_from(sorted({*COMMANDS, *HABITS})))))
def test_ask_is_localspec_ask(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls: list[list[str]] = []
        patch.setattr(sys, "argv", ["ask", *words])
        patch.setattr(cli, "main", lambda: calls.append(sys.argv[1:]))
        cli.short()
    assert calls == [["ask", *words]]


def test_both_names_are_installed() -> None:
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    assert (scripts["localspec"].load(), scripts["ask"].load()) == (cli.main, cli.short)


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        *((word, " ".join(suggestion)) for word, suggestion in HINTED_WORDS.items()),
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
def test_a_habitual_or_misspelled_word_suggests_the_command(
    capsys: pytest.CaptureFixture[str], typed: str, suggestion: str
) -> None:
    assert run_refused(capsys, typed, "-x").endswith(f"'{typed}'; did you mean {suggestion}?")


@needs("service")
def test_groups_suggest_their_own_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_refused(capsys, "history", "serach", "x").endswith("did you mean search?")
    assert run_refused(capsys, "config", "shwo").endswith("did you mean show?")
    assert run_refused(capsys, "service", "nothing").endswith("see: localspec service --help")


@pytest.mark.parametrize("word", ["push", "cp", "keys", "upload", "uload", "nload", "zzz"])
def test_an_ambiguous_word_has_no_suggestion(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert run_refused(capsys, word).endswith(f"No such command '{word}'; see: localspec --help")


def find_suggestion(group: click.Group, word: str) -> str:
    """Return what a group suggests for a word; empty if it suggests nothing, or knows the word."""
    try:
        group.resolve_command(CONTEXT, [word])
    except click.UsageError as error:
        match = re.search(r"did you mean (.*)\?$", error.message)
        return match[1] if match else ""
    return ""


@st.composite
def slips(draw: st.DrawFn, names: list[str], max_edits: int) -> tuple[str, str]:
    """Draw a name and the same name with up to `max_edits` edits of a letter."""
    name = word = draw(st.sampled_from(names))
    for _ in range(draw(st.integers(1, max_edits))):
        position = draw(st.integers(0, len(word)))
        letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz-_1"))
        head, tail = word[:position], word[position:]
        swapped = head + tail[1:2] + tail[:1] + tail[2:]
        word = draw(
            st.sampled_from(
                [head + tail[1:], head + letter + tail, head + letter + tail[1:], swapped]
            )
        )
    return name, word


def list_groups() -> list[click.Group]:
    commands = [app.app.get_command(CONTEXT, name) for name in COMMANDS]
    return [app.app, *(command for command in commands if isinstance(command, click.Group))]


@given(data=st.data())
@settings(max_examples=200)
def test_a_suggestion_is_an_existing_command_and_not_the_opposite(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(list_groups()))
    names = group.list_commands(CONTEXT)
    name, word = data.draw(slips(names, 1))
    opposites = [pair[1 - pair.index(name)] for pair in command_names.OPPOSITES if name in pair]
    if not (suggestion := find_suggestion(group, word)):
        return
    assert suggestion not in opposites
    resolve(group, suggestion.split())


@given(slip=slips([name for pair in command_names.OPPOSITES for name in pair], 2))
@settings(max_examples=200)
def test_a_misspelled_long_name_is_not_taken_for_its_opposite(slip: tuple[str, str]) -> None:
    name, word = slip
    for name_a, name_b in command_names.OPPOSITES:
        short, long = sorted((name_a, name_b), key=len)
        if name == long and short in long and word != short:
            assert command_names.closest(word, [short, long]) != short


@given(word=st.one_of(st.text(max_size=12), st.from_regex(r"[a-z]{1,10}", fullmatch=True)))
def test_every_suggestion_exists(word: str) -> None:
    for group in list_groups():
        if suggestion := find_suggestion(group, word):
            resolve(group, suggestion.split())


@given(data=st.data(), name=st.sampled_from([name for name in COMMANDS if len(name) > 3]))
def test_a_single_typo_always_has_a_suggestion(data: st.DataObject, name: str) -> None:
    position = data.draw(st.integers(1, len(name) - 2))
    letter = data.draw(st.sampled_from("aeiouxst"))
    slips = [name[:position] + name[position + 1 :], name[:position] + letter + name[position:]]
    slips.append(name[:position] + name[position + 1] + name[position] + name[position + 2 :])
    slip = data.draw(st.sampled_from(slips))
    context = click.Context(app.app, info_name="localspec")
    known_words = {*COMMANDS, *ALIASES, *HABITS, *command_names.WITHOUT_COUNTERPART}
    # These may be "load" and "install" with an extra letter.
    if slip in known_words | {"uload", "uinstall"}:
        return
    with pytest.raises(click.UsageError, match="did you mean"):
        app.app.resolve_command(context, [slip])


@pytest.mark.parametrize(
    ("typed", "opposite"),
    [("--stream", "--no-stream"), ("--log", "--no-log"), ("--daemon-start", "--no-daemon-start")],
)
def test_an_option_does_not_suggest_its_opposite(
    capsys: pytest.CaptureFixture[str], typed: str, opposite: str
) -> None:
    assert opposite not in run_refused(capsys, "ask", typed, "hi")


def test_temp_is_an_alias_of_temperature(warm: Home) -> None:
    assert warm.run("ask", "--temp", "0", "say hello").stdout == "hello\n"


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        (["What does os.walk return?"], "'What does os.walk return?'"),
        (["what", "does", "it", "do"], "'what does it do'"),
        (["Why?"], "'Why?'"),
        (["say it's so", "-m", "coder-7b"], """'say it'"'"'s so' -m coder-7b"""),
        (["tell", "me", "more"], "'tell me more'"),
    ],
)
def test_a_question_without_ask_shows_how_to_ask(
    capsys: pytest.CaptureFixture[str], typed: list[str], arguments: str
) -> None:
    message = run_refused(capsys, *typed)
    assert message.endswith(f"A question is not a command. To ask it: localspec ask {arguments}")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("stop real", "localspec unload real"),
        ("unload --all", "localspec unload"),
        ("chat real", "localspec chat -m real"),
        ("logs stream", "localspec logs -f"),
        ("models default x", "localspec use x"),
        ("list default x", "localspec use x"),
        ("ask -o temperature 0 hi", "An option of sampling has its own name: --temperature"),
        ("ask hi -a a.png", "To attach a file: -f a.png"),
        ("ask -v hi", "For statistics: -u"),
        ("ask --context 9 hi", "localspec config set context 9"),
        ("rename real x", "A pair cannot be renamed or copied."),
        ("cp real x", "A pair cannot be renamed or copied."),
        ("hi", "To ask it: localspec ask hi"),
        ("hello there", "To ask it: localspec ask 'hello there'"),
    ],
)
def test_a_habit_of_another_program_gets_a_hint(
    capsys: pytest.CaptureFixture[str], line: str, hint: str
) -> None:
    message = run_refused(capsys, *line.split())
    assert hint in message
    assert "did you mean" not in message.lower()


def test_messages_use_the_names_of_the_command_line(home: Home) -> None:
    run = home.run("ask", "--draft", "10000", "hi")
    assert (run.returncode, "--draft" in run.stderr) == (2, True)
    assert "speculative" not in run.stderr
    message = home.refused("config", "set", "contxt", "5", code=2)
    assert "context" in message
    assert "watchdog" not in message, "not all keys"
    assert "localspec config set:" not in message


@needs("editors")
def test_a_pair_is_chosen_by_parts_of_its_name(warm: Home) -> None:
    assert warm.run("ask", "-q", "BUILT", "-q", "in", "say hello").stdout == "hello\n"
    assert warm.run("complete", "-q", "built", __file__ + ":1").returncode == 0
    assert "No installed pair has 'built' and 'x' in its name; installed: builtin" in warm.refused(
        "ask", "-q", "built", "-q", "x", "hi"
    )
    assert "localspec pull coder-7b" in warm.refused("ask", "-q", "coder", "-q", "7b", "hi")
    assert "-m and -q cannot be used together" in warm.refused(
        "ask", "-q", "built", "-m", "builtin", "hi", code=2
    )


def test_the_shortest_of_several_matching_names_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("coder-14b", "coder-7b", "b-coder-7b", "tiny")
    listed = {"pairs": [{"name": name, "here": True} for name in names]}
    monkeypatch.setattr(PairsClient, "pairs", lambda self, everything=False: listed)
    assert PairsClient().named_like(["CODER", "b"]) == "coder-7b"
    assert PairsClient().named_like(["14"]) == "coder-14b"
