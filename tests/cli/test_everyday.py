"""Test history, config, logs, status --watch, completion, complete, and the examples of every help."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from localspec.cli import settings, templates
from localspec.cli.app import app
from tests.support.commands import list_commands
from tests.support.daemons import Home
from tests.support.extras import needs
from tests.support.terminal import ESCAPES, terminal


def test_history_quotes_thoughts(warm: Home) -> None:
    assert warm.run("ask", "raw <think>Hm.\nSo.</think>Yes.").returncode == 0
    output = warm.run("history", "show").stdout
    assert output.endswith("## Answer\n\n> Hm.\n> So.\n\nYes.\n\n")
    warm.run("history", "rm", "-y", "last")


def test_history_list_show_search_export_and_rm(warm: Home) -> None:
    assert warm.run("history").stdout == ""
    warm.run("ask", "say one")
    warm.run("ask", "say two")
    assert [row.split()[-1] for row in warm.run("history").stdout.splitlines()[1:]] == [
        "two",
        "one",
    ]
    assert warm.run("history", "show").stdout == "## You\n\nsay two\n\n## Answer\n\ntwo\n\n"
    assert "say one" in warm.run("history", "search", "ONE").stdout
    assert json.loads(warm.run("history", "search", "zzz", "--json").stdout) == []
    exported = [json.loads(line) for line in warm.run("history", "export").stdout.splitlines()]
    assert [conversation["title"] for conversation in exported] == ["say one", "say two"]
    name = exported[0]["id"]
    assert warm.run("history", "rm", "-y", name[:7]).stdout == f"Removed {name}.\n"
    assert warm.run("history", "rm", "-y", name).returncode == 1
    assert warm.run("history", "rm").returncode == 2
    assert warm.run("history", "rm", "-y", "--all").stdout == "Removed 1 conversation.\n"


def test_an_interrupted_answer_is_marked(warm: Home) -> None:
    with terminal(warm.environment, "ask", "forever") as session:
        session.expect("1 2")
        session.interrupt()
        assert session.wait() == -signal.SIGINT
    assert warm.run("history", "show", "last").stdout.rstrip().endswith("*(interrupted)*")


def test_config_shows_every_value_and_its_origin(home: Home) -> None:
    home.run("config", "set", "parallel", "2")
    home.environment["LOCALSPEC_QUEUE"] = "7"
    file = home.run("config", "path").stdout.strip()
    values = json.loads(home.run("config", "show", "--json").stdout)
    assert values["parallel"] == {"value": 2, "origin": file}
    assert values["queue"] == {"value": 7, "origin": "LOCALSPEC_QUEUE"}
    assert values["threads"] == {"value": 0, "origin": "default"}
    assert re.search(rf"parallel +2 +{file}", home.run("config").stdout)


def test_the_pair_setting_is_checked_by_the_daemon(warm: Home, tmp_path: Path) -> None:
    for pair, message in (
        ("coder-7", "did you mean coder-7b?"),
        ("x.gguf", "x.gguf does not exist."),
    ):
        assert message in warm.refused("config", "set", "pair", pair, cwd=tmp_path, code=2)
    run = warm.run("config", "set", "pair", "coder-7b")
    assert (run.returncode, "not pulled yet; run: localspec pull coder-7b" in run.stderr) == (
        0,
        True,
    )
    (tmp_path / "a.gguf").touch()
    assert warm.run("config", "set", "pair", "a.gguf", cwd=tmp_path).returncode == 0
    config = tomllib.loads((warm.root / "config" / "config.toml").read_text())
    assert config["pair"] == str(tmp_path / "a.gguf")
    warm.run("config", "set", "pair")


def test_the_pair_setting_is_not_checked_without_a_daemon(home: Home) -> None:
    assert home.run("config", "set", "pair", "mine").returncode == 0
    assert not home.socket.exists()


def test_a_variable_that_overrides_a_setting_is_named(home: Home) -> None:
    home.environment["LOCALSPEC_QUEUE"] = "7"
    assert "LOCALSPEC_QUEUE is set" in home.run("config", "set", "queue", "9").stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", 'pair = "x"\n'),
        ("# mine\nqueue = 1", '# mine\nqueue = 1\npair = "x"\n'),
        ('pair = "a" # why\nqueue = 1\n', 'pair = "x" # why\nqueue = 1\n'),
        ("  pair='a'\n\n# end", '  pair="x"\n\n# end'),
        ("queue = 1\r\npair = 'a'\r\n", 'queue = 1\r\npair = "x"\r\n'),
        ('pair = [\n  "a", # one\n] # why\nqueue = 1\n', 'pair = "x" # why\nqueue = 1\n'),
        ('pair = """\nqueue = 3\n"""\n', 'pair = "x"\n'),
        ("queue = 1\n[table]\npair = 2\n", 'queue = 1\npair = "x"\n\n[table]\npair = 2\n'),
    ],
)
def test_a_change_keeps_comments_and_other_settings(old: str, new: str) -> None:
    changed = settings.changed(old, "pair", "x")
    assert changed.endswith(new)
    assert tomllib.loads(changed)["pair"] == "x"
    assert "pair" not in tomllib.loads(settings.changed(changed, "pair", None))


STATEMENTS = [
    "queue = 1 # one",
    "  'queue'\t=  2",
    'queue = """\npair = 1\n"""',
    "queue.inner = 3",
    "queue = {a = 1}",
    'pair = [\n  "a", # two\n  "[b]",\n]',
    "depth = 1979-05-27",
    "# three",
    "",
    "[table]\nqueue = 4",
    "[queue.inner]\na = 5",
    "[[tables]]\nb = 6 # four",
]


@given(
    statements=st.lists(st.sampled_from(STATEMENTS), max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    value=st.sampled_from([None, 7, "text"]),
)
def test_a_change_of_any_file_keeps_the_rest(
    statements: list[str], end: str, value: int | str | None
) -> None:
    old = "".join(f"{statement}\n" for statement in statements).replace("\n", end)
    try:
        expected = tomllib.loads(old)
    except tomllib.TOMLDecodeError:
        assume(False)
    expected.pop("queue", None)
    if value is not None:
        expected["queue"] = value
    new = settings.changed(old, "queue", value)
    assert tomllib.loads(new) == expected
    top = f"\n{old}".partition("\n[")[0]  # A comment below [queue.inner] is removed with it.
    comments = [line for line in top.splitlines() if "#" in line and "queue" not in line]
    assert [line for line in comments if line not in new.splitlines()] == []


def test_a_file_that_cannot_be_changed_is_left_alone(home: Home) -> None:
    file = home.root / "config" / "config.toml"
    file.parent.mkdir()
    file.write_text("hello\n[table]\n[queue]\n")
    assert "edit it by hand" in home.refused("config", "set", "queue", "5", code=2)
    assert file.read_text() == "hello\n[table]\n[queue]\n"


def test_edit_refuses_wrong_values(home: Home) -> None:
    editor = home.root / "editor"
    editor.write_text('#!/bin/sh\necho "parallel = $N" > "$1"; touch -d "+2 seconds" "$1"\n')
    editor.chmod(0o755)
    home.environment |= {"EDITOR": str(editor), "VISUAL": "", "N": "0"}
    run = home.run("config", "edit", stdin="n\n")
    assert run.returncode == 2
    assert "'parallel' must be between 1 and 64" in run.stderr
    assert not (home.root / "config" / "config.toml").exists()
    home.environment["N"] = "3"
    assert home.run("config", "edit").returncode == 0
    assert (home.root / "config" / "config.toml").read_text() == "parallel = 3\n"


def test_logs(warm: Home) -> None:
    assert warm.run("logs", "--path").stdout == f"{warm.log}\n"
    assert "listens on" in warm.run("logs", "-n", "1000").stdout
    with terminal(warm.environment, "logs", "-f", "-n", "1000") as session:
        session.expect("listens on")
        with warm.log.open("a") as log:
            log.write("a new line\n")
        session.expect("a new line")
        session.interrupt()
        assert session.wait() == -signal.SIGINT


def test_there_is_no_log_before_the_first_start(home: Home) -> None:
    assert "the daemon has never been started" in home.run("logs").stderr


def test_status_watch_runs_until_ctrl_c(warm: Home) -> None:
    with terminal(warm.environment, "status", "--watch") as session:
        session.expect("requests")
        session.resize(40, 12)
        session.expect("requests")
        offset = len(session.raw)
        session.expect("requests")
        lines = re.split(r"[\r\n]", session.raw[offset:])
        assert max(len(ESCAPES.sub("", line)) for line in lines) <= 40
        session.interrupt()
        assert session.wait() == -signal.SIGINT


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_valid(home: Home, shell: str) -> None:
    source = home.run("completion", shell).stdout
    assert "_LOCALSPEC_COMPLETE" in source
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=source, text=True).returncode == 0
    assert list_completions(home, "hist") == ["plain,history"]


def list_completions(home: Home, *words: str) -> list[str]:
    """Return the completions that bash receives for the last of `words`."""
    variables = {"COMP_WORDS": " ".join(("localspec", *words)), "COMP_CWORD": str(len(words))}
    environment = {**home.environment, "_LOCALSPEC_COMPLETE": "bash_complete", **variables}
    return subprocess.run(
        [sys.executable, "-m", "localspec"], env=environment, capture_output=True, text=True
    ).stdout.split()


def test_pairs_templates_and_conversations_are_completed(warm: Home) -> None:
    name = json.loads(warm.run("ask", "--json", "say hi").stdout)["localspec"]["conversation"]
    warm.run("ask", "--save", "excerpt", "Summarize $input")
    assert list_completions(warm, "ask", "-m", "bui") == ["plain,builtin"]
    assert list_completions(warm, "chat", "-m", "bui") == ["plain,builtin"]
    assert "plain,coder-7b" in list_completions(warm, "pull", "coder-7")
    assert list_completions(warm, "ask", "-t", "ex") == ["plain,excerpt", "plain,explain"]
    assert f"plain,{name}" in list_completions(warm, "history", "show", name[:6])
    assert list_completions(warm, "ask", "--cid", "las") == ["plain,last"]
    assert list_completions(warm, "config", "set", "wat") == ["plain,watchdog"]
    assert list_completions(warm, "ask", "-f", "READ") == ["file,READ"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "fix"], "There is nothing to save; for example: localspec ask --save fix"),
        (["-t", "none", "hi"], "There is no template 'none'; there are broken, cmd, cmd-explain, "),
        (["-t", "../short", "hi"], "There is no template '../short'"),
        (["-t", "short"], "No question given; for example: localspec ask -t short WORDS"),
        (["-t", "broken", "hi"], "broken.toml, line 1: "),
    ],
)
def test_a_template_that_cannot_be_used_is_named(
    home: Home, words: list[str], message: str
) -> None:
    assert home.run("ask", "--save", "short", "--system", "Be short.").returncode == 0
    [template] = home.root.rglob("short.toml")
    template.with_name("broken.toml").write_bytes(b'system = "\xff"')
    run = home.run("ask", *words)
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr
    assert not home.socket.exists()


@pytest.mark.parametrize("name", templates.BUILTIN)
def test_a_builtin_template_works_and_a_file_overrides_it(warm: Home, name: str) -> None:
    keys = templates.parse(templates.BUILTIN[name].encode(), name)
    assert keys["tokens"] == templates.SHELL_TOKENS
    parameters = templates.parameters(keys)
    values = [word for parameter in parameters for word in ("-p", f"{parameter}=Linux")]
    assert "$(x)" in warm.run("ask", "-t", name, *values, "$(x)").stdout.splitlines()
    file = warm.root / "config" / "templates" / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('prompt = "say mine $input"')
    assert warm.run("ask", "-t", name, "$(x)").stdout == "mine $(x)\n"
    file.unlink()


def test_completing_starts_no_daemon_and_never_fails(home: Home) -> None:
    assert list_completions(home, "ask", "-m", "bui") == []
    assert not home.socket.exists()


@needs("editors")
@pytest.mark.parametrize(
    ("column", "line", "suffix"), [(":7", "!echo ", "b\nend\n"), ("", "!echo b", "\nend\n")]
)
def test_complete_sends_the_request_of_an_editor(
    warm: Home, tmp_path: Path, column: str, line: str, suffix: str
) -> None:
    (tmp_path / "a.py").write_text("one\n!echo b\nend\n")
    request = json.loads(warm.run("complete", f"a.py:2{column}", "-n", "9", cwd=tmp_path).stdout)
    prompt = request["prompt"]
    assert (prompt["prefix"], prompt["prompt"], prompt["suffix"]) == ("one\n", line, suffix)
    assert (request["priority"], request["max_tokens"]) == ("editor", 9)
    assert request["sampling"]["temperature"] == 0


@needs("editors")
def test_complete_with_an_unknown_pair_is_refused(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\n")
    run = warm.run("complete", "a.py:1", "-m", "nope", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    assert "There is no pair 'nope'" in run.stderr
    result = warm.run("complete", "a.py:1", "-u", cwd=tmp_path)
    assert (result.stdout, "token" in result.stderr) == ("|\n", True)


@needs("editors")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("a.py", "'a.py' is not FILE:LINE[:COL]"),
        ("a.py:9", "a.py has no line 9; it has 1 lines."),
        ("a.py:1:9", "its columns are 1 to 4."),
        ("b.py:1", "b.py cannot be read"),
    ],
)
def test_complete_refuses_a_wrong_position(
    warm: Home, tmp_path: Path, place: str, message: str
) -> None:
    (tmp_path / "a.py").write_text("one\n")
    assert message in warm.refused("complete", place, cwd=tmp_path, code=2)


@pytest.mark.parametrize("name", [line for line, _ in list_commands()])
def test_every_help_has_an_example_that_parses(name: str) -> None:
    path = name.split()
    page = render_help(path)
    assert "Example" in page, f"localspec {name} --help has no example"
    examples = page.split("Example")[-1].split(":", 1)[1]
    lines = [line for line in examples.splitlines() if "localspec " in line]
    assert any(f"localspec {name}".strip() in line for line in lines)
    for line in lines:
        assert is_valid_command_line(line), line


def render_help(path: list[str]) -> str:
    context = click.Context(app, info_name="localspec")
    command: click.Command = app
    for name in path:
        assert isinstance(command, click.Group)
        subcommand = command.get_command(context, name)
        assert subcommand is not None
        command, context = subcommand, click.Context(subcommand, parent=context, info_name=name)
    return command.get_help(context)


def split_invocations(line: str) -> Iterator[list[str]]:
    """Yield the arguments of every `localspec` in a line of shell."""
    inner = re.findall(r"\$\((localspec [^)]*)\)", line)
    plain = re.sub(r"\$\(localspec [^)]*\)", "X", line)
    for part in [*inner, *re.split(r"\||&&|;", plain)]:
        words = shlex.split(part, comments=True)
        if "localspec" in words:
            arguments = words[words.index("localspec") + 1 :]
            yield arguments[: arguments.index(">")] if ">" in arguments else arguments


def is_valid_command_line(line: str) -> bool:
    """Return whether click accepts every `localspec` command in a line, without running it."""
    for arguments in split_invocations(line):
        context = click.Context(app, info_name="localspec")
        command: click.Command = app
        while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
            subcommand = command.get_command(context, arguments[0])
            if subcommand is None:
                return False
            command, arguments = subcommand, arguments[1:]
        if arguments in (["--help"], ["--version"]):
            continue
        try:
            command.make_context("localspec", list(arguments), resilient_parsing=False)
        except click.exceptions.NoArgsIsHelpError:
            return True
        except click.ClickException:
            return False
    return True


def test_an_internal_error_is_one_line_without_debug(home: Home) -> None:
    code = (
        "import sys\nfrom localspec import cli\nfrom localspec.cli import app\n"
        "app.run = lambda arguments: 1 // 0\nsys.exit(cli.main(sys.argv[1:]))"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=home.environment, capture_output=True, text=True)

    quiet = run("status")
    assert (quiet.returncode, quiet.stderr.count("\n")) == (1, 1)
    assert "ZeroDivisionError" in quiet.stderr
    assert "Traceback" in run("--debug", "status").stderr
