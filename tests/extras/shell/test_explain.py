"""Test `localspec explain` for the last failed command of a shell and for piped text."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.extras.shell import asking, failures
from tests.support.daemons import Home, scripted_home, temporary_home, wait_for
from tests.support.patience import PATIENCE
from tests.support.shells import shell, with_program
from tests.support.terminal import Terminal

HOOKED = ["bash", "zsh", "fish"]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Yield a home whose model repeats the prompt of the template."""
    with scripted_home() as home:
        with_program(home)
        yield home


def install_hook(session: Terminal, name: str) -> None:
    """Let the shell record its failures, as its start-up file would."""
    if name == "fish":
        session.send("localspec completion fish --hook | source; echo hooked | tr a-z A-Z\n")
    else:
        if name == "zsh":
            session.send("autoload -U compinit; compinit -u -D\n")
        session.send(f'eval "$(localspec completion {name} --hook)"; echo hooked | tr a-z A-Z\n')
    session.expect("HOOKED")
    session.expect("ready> ")


def find_records(home: Home) -> list[Path]:
    return sorted((home.root / "run").glob("failed-*"))


def read_records(home: Home) -> list[str]:
    return [path.read_text() for path in find_records(home)]


@pytest.mark.parametrize("name", HOOKED)
def test_the_last_failed_command_is_explained(home: Home, name: str) -> None:
    with shell(home, name) as session:
        install_hook(session, name)
        assert not find_records(home)
        session.send("localspec explain; true\n")
        session.expect("No failed command is recorded")
        session.expect("ready> ")
        session.send("sh -c 'echo out; exit 9' \"$HOME\"\n")
        session.expect("ready> ")
        session.send("true\n")
        session.expect("ready> ")
        session.send("localspec explain\n")
        session.expect("exit code 9:")
        session.expect("sh -c 'echo out; exit 9' \"$HOME\"")
        session.expect("ready> ")
        [record] = find_records(home)
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        assert record.read_text() == "9\nsh -c 'echo out; exit 9' \"$HOME\"\n"
        assert record.name == f"failed-{session.process.pid}"
    assert home.run("completion", name, "--hook").returncode == 0  # The shell has ended.
    assert not find_records(home)


@pytest.mark.parametrize("name", HOOKED)
def test_successes_and_hidden_commands_are_not_recorded(home: Home, name: str) -> None:
    with shell(home, name) as session:
        if name == "bash":
            session.send("HISTCONTROL=ignorespace\n")
        if name == "zsh":
            session.send("setopt histignorespace\n")
        install_hook(session, name)
        session.send("sh -c 'exit 4' first\n")
        session.expect("ready> ")
        wait_for(lambda: find_records(home), "the record")
        for command in (
            " sh -c 'exit 5' secret",
            "",
            "sh -c 'exit 130'",
            "localspec explain -m none",
        ):
            session.send(f"{command}\n")
            session.expect("ready> ")
        session.send("echo done | tr a-z A-Z\n")
        session.expect("DONE")
        [record] = read_records(home)
        assert "secret" not in record
        assert record.splitlines()[1] == "sh -c 'exit 4' first"
    home.run("completion", name, "--hook")


@pytest.mark.parametrize("name", HOOKED)
def test_the_hook_leaves_the_shell_as_it_was(home: Home, name: str) -> None:
    """The hook keeps exit codes, own hooks and the umask, and is installed once even if run twice."""
    own_hooks = {
        "bash": "PROMPT_COMMAND='echo own $? | tr a-z A-Z;'",
        "zsh": "precmd() { echo own $? | tr a-z A-Z; }",
        "fish": "function own --on-event fish_postexec; echo own $status | tr a-z A-Z; end",
    }
    code = "$status" if name == "fish" else "$?"
    with shell(home, name) as session:
        session.send(f"{own_hooks[name]}\n")
        install_hook(session, name)
        install_hook(session, name)
        session.send("sh -c 'exit 6'\n")
        session.expect("OWN 6")
        session.expect("ready> ")
        session.send(f"echo code {code}, mask x | tr a-z A-Z; umask | tr 0-9 a-j\n")
        session.expect("CODE 6, MASK X")
        session.expect("acc")  # The umask is still 022.
        session.expect("ready> ")
        session.send("cat ~/nothing\n")
        session.expect("ready> ")
        wait_for(lambda: any("nothing" in record for record in read_records(home)), "the record")
    home.run("completion", name, "--hook")


@pytest.mark.parametrize(
    ("options", "typed", "command"),
    [
        ("HISTTIMEFORMAT='%F %T '", "sh -c 'exit 3' 42 17", "sh -c 'exit 3' 42 17"),
        ("HISTCONTROL=ignoreboth", "sh -c 'exit 3'", "sh -c 'exit 3'"),
        ("set -u -o noclobber", "if true; then\n(exit 3)\nfi", "if true; then (exit 3); fi"),
        ("shopt -s lithist", "if true; then\n(exit 3)\nfi", "if true; then\n(exit 3)\nfi"),
        ("PROMPT_COMMAND=(true); set -o vi", "sh -c 'exit 3' *", "sh -c 'exit 3' *"),
    ],
)
def test_bash_with_common_settings(home: Home, options: str, typed: str, command: str) -> None:
    with shell(home, "bash") as session:
        session.send(f"{options}\n")
        install_hook(session, "bash")
        for _ in range(2):  # With ignoreboth, the second command adds no line to the history.
            session.send(f"{typed}\n")
            session.expect("ready> ")
        session.send("echo [$?]\n")
        session.expect("[3]")
        [record] = find_records(home)
        assert record.read_text() == f"3\n{command}\n"
    home.run("completion", "bash", "--hook")


def test_two_shells_have_two_records(home: Home) -> None:
    with shell(home, "bash") as first_shell, shell(home, "bash") as second_shell:
        for session, exit_code in ((first_shell, 3), (second_shell, 4)):
            install_hook(session, "bash")
            session.send(f"sh -c 'exit {exit_code}'\n")
            session.expect("ready> ")
        first_shell.send("localspec explain\n")
        first_shell.expect("exit code 3:")
        second_shell.send("(localspec explain)\n")
        second_shell.expect("exit code 4:")
    home.run("completion", "bash", "--hook")


def test_a_folder_name_is_not_run_by_a_shell(tmp_path: Path) -> None:
    with scripted_home() as home:
        home.root.chmod(0o700)
        strange = home.root / "a '$(touch pwned)'`x` \\b;"
        strange.mkdir()
        with_program(home)
        home.environment["LOCALSPEC_HOME"] = str(strange)
        for name in filter(shutil.which, ("bash", "zsh", "fish")):
            with shell(home, name) as session:
                install_hook(session, name)
                session.send(f"cd {tmp_path}; sh -c 'exit 8'\n")
                session.expect("ready> ")
                wait_for(lambda: list((strange / "run").glob("failed-*")), "the record")
            home.run("completion", name, "--hook")
        assert not list(home.root.rglob("pwned"))
        home.environment["LOCALSPEC_HOME"] = str(home.root)


def test_a_missing_runtime_folder_causes_no_message(home: Home, tmp_path: Path) -> None:
    hook = home.run("completion", "bash", "--hook").stdout
    (tmp_path / "rc").write_text(hook.replace(str(home.root), "/none"))
    result = subprocess.run(
        ["bash", "--rcfile", str(tmp_path / "rc"), "-i"],
        input="true\nfalse\necho [$?]\n",
        env={**os.environ, "HOME": str(home.root)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "[1]" in result.stdout
    assert "/none" not in result.stderr


def test_piped_text_words_and_files_are_explained(home: Home, tmp_path: Path) -> None:
    run = home.run("explain", stdin="ld: cannot find -lfoo\n")
    assert run.stdout.startswith("ld: cannot find -lfoo\n\nExplain ")
    assert run.stderr == ""
    run = home.run("explain", "E: Unable", "to locate package")
    assert run.stdout.startswith("E: Unable to locate package\n\nExplain ")
    (tmp_path / "err.txt").write_text("Traceback")
    assert "Traceback" in home.run("explain", "-f", str(tmp_path / "err.txt")).stdout
    assert "Traceback" in home.run("explain", str(tmp_path / "err.txt")).stdout
    assert home.run("explain").returncode == 2  # There are no words, and no shell with the hook.


@pytest.mark.parametrize("command", ["cmd", "explain"])
def test_an_answer_without_end_is_ended(home: Home, command: str) -> None:
    run = home.run(command, "forever")
    if command == "explain":
        assert run.returncode == 0
        assert 2900 < len(run.stdout) < 3200
        assert "The answer was ended because it is long. -n sets another limit." in run.stderr
    else:
        assert (run.returncode, run.stdout) == (1, "")
        assert "The answer was cut off" in run.stderr
    run = home.run("explain", "-n", "1200", "forever")
    assert len(run.stdout.split()) == 1200
    assert "The answer was cut off at its limit of 1200 tokens" in " ".join(run.stderr.split())


def test_repeated_text_is_watched(home: Home) -> None:
    assert '"loop_guard":"all"' in home.run("explain", "-n", "100000", "echo").stdout


def test_thoughts_do_not_count_as_text(home: Home) -> None:
    run = home.run("explain", f"raw <think>{'x' * 6000}</think>yes")
    assert run.stdout.startswith("yes")
    assert "ended" not in run.stderr


@pytest.mark.parametrize("command", ["cmd", "explain"])
def test_the_built_in_pair_is_refused(command: str) -> None:
    with temporary_home() as home:
        run = home.run(command, "ls: cannot access 'x'")
        assert (run.returncode, run.stdout) == (1, "")
        assert "The built-in demo pair knows only Python's standard library." in run.stderr


def test_an_empty_pipe_is_refused(home: Home) -> None:
    run = home.run("explain", stdin="")
    assert (run.returncode, run.stdout) == (2, "")
    assert "make 2>&1 | localspec explain" in run.stderr


@pytest.mark.parametrize(
    ("code", "meaning"),
    [(1, ""), (126, " (found, but not executable)"), (127, " (command not found)"), (200, "")],
)
def test_what_exit_codes_mean(code: int, meaning: str) -> None:
    assert failures.meaning(code) == meaning
    assert failures.meaning(137) == " (ended by SIGKILL)"


def test_a_long_log_loses_its_middle() -> None:
    text = "\n".join(f"line {number}" for number in range(1000))
    cut = asking.middle_left_out(text)
    assert cut(len(text)) == asking.Cut(text)
    for max_chars in (0, 100, 2000, len(text) - 1):
        short, notice = cut(max_chars)
        head, _, remainder = short.partition("\n[… ")
        omitted, _, tail = remainder.partition(" in the middle left out …]\n")
        assert text.startswith(head)
        assert text.endswith(tail)
        lines = [kept_line for kept_line in (*head.split("\n"), *tail.split("\n")) if kept_line]
        assert int(omitted.split()[0]) == 1000 - len(lines)
        assert notice == f"{omitted} in the middle."
        assert len(head) + len(tail) <= max_chars
    line = "x" * 1000
    assert asking.middle_left_out(line)(100).text.replace("x", "") == (
        "\n[… 1 line in the middle left out …]\n"
    )
