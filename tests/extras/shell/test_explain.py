"""explain: what failed last in this very shell, or what was piped in."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.extras.shell import asking, failures
from tests.support.daemons import Home, scripted_home, wait_for
from tests.support.shells import shell, with_program
from tests.support.terminal import Terminal

HOOKED = ["bash", "zsh", "fish"]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Its model answers with the prompt of the template."""
    with scripted_home() as home:
        with_program(home)
        yield home


def hooked(shown: Terminal, name: str) -> None:
    """Let the shell record its failures, as its start-up file would."""
    if name == "fish":
        shown.send("localspec completion fish --hook | source; echo hooked | tr a-z A-Z\n")
    else:
        if name == "zsh":
            shown.send("autoload -U compinit; compinit -u -D\n")
        shown.send(f'eval "$(localspec completion {name} --hook)"; echo hooked | tr a-z A-Z\n')
    shown.expect("HOOKED")
    shown.expect("ready> ")


def records(home: Home) -> list[Path]:
    return sorted((home.root / "run").glob("failed-*"))


def recorded(home: Home) -> list[str]:
    return [each.read_text() for each in records(home)]


# ------------------------------------------------------------------ the hook, in real shells


@pytest.mark.parametrize("name", HOOKED)
def test_the_last_failed_command_is_explained(home: Home, name: str) -> None:
    with shell(home, name) as shown:
        hooked(shown, name)
        assert not records(home)
        shown.send("localspec explain; true\n")
        shown.expect("No failed command is recorded")
        shown.expect("ready> ")
        shown.send("sh -c 'echo out; exit 9' \"$HOME\"\n")
        shown.expect("ready> ")
        shown.send("true\n")
        shown.expect("ready> ")
        shown.send("localspec explain\n")
        shown.expect("exit code 9:")
        shown.expect("sh -c 'echo out; exit 9' \"$HOME\"")
        shown.expect("ready> ")
        [record] = records(home)
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        assert record.read_text() == "9\nsh -c 'echo out; exit 9' \"$HOME\"\n"
        assert record.name == f"failed-{shown.process.pid}"
    assert home.run("completion", name, "--hook").returncode == 0  # the shell has ended
    assert not records(home)


@pytest.mark.parametrize("name", HOOKED)
def test_what_is_no_failure_or_kept_out_of_the_history_is_not_recorded(
    home: Home, name: str
) -> None:
    with shell(home, name) as shown:
        if name == "bash":
            shown.send("HISTCONTROL=ignorespace\n")
        if name == "zsh":
            shown.send("setopt histignorespace\n")
        hooked(shown, name)
        shown.send("sh -c 'exit 4' first\n")
        shown.expect("ready> ")
        wait_for(lambda: records(home), "the record")
        for quiet in (
            " sh -c 'exit 5' secret",
            "",
            "sh -c 'exit 130'",
            "localspec explain -m none",
        ):
            shown.send(f"{quiet}\n")
            shown.expect("ready> ")
        shown.send("echo done | tr a-z A-Z\n")
        shown.expect("DONE")
        [record] = recorded(home)
        assert "secret" not in record
        assert record.splitlines()[1] == "sh -c 'exit 4' first"
    home.run("completion", name, "--hook")


@pytest.mark.parametrize("name", HOOKED)
def test_the_hook_leaves_the_shell_as_it_was(home: Home, name: str) -> None:
    """Its exit codes, its own hooks, its umask; and evaluated twice it is there once."""
    own = {
        "bash": "PROMPT_COMMAND='echo own $? | tr a-z A-Z;'",
        "zsh": "precmd() { echo own $? | tr a-z A-Z; }",
        "fish": "function own --on-event fish_postexec; echo own $status | tr a-z A-Z; end",
    }
    code = "$status" if name == "fish" else "$?"
    with shell(home, name) as shown:
        shown.send(f"{own[name]}\n")
        hooked(shown, name)
        hooked(shown, name)
        shown.send("sh -c 'exit 6'\n")
        shown.expect("OWN 6")
        shown.expect("ready> ")
        shown.send(f"echo code {code}, mask x | tr a-z A-Z; umask | tr 0-9 a-j\n")
        shown.expect("CODE 6, MASK X")
        shown.expect("acc")  # 022, as it was
        shown.expect("ready> ")
        shown.send("cat ~/nothing\n")
        shown.expect("ready> ")
        wait_for(lambda: any("nothing" in each for each in recorded(home)), "the record")
    home.run("completion", name, "--hook")


@pytest.mark.parametrize(
    ("options", "typed", "recorded"),
    [
        ("HISTTIMEFORMAT='%F %T '", "sh -c 'exit 3' 42 17", "sh -c 'exit 3' 42 17"),
        ("HISTCONTROL=ignoreboth", "sh -c 'exit 3'", "sh -c 'exit 3'"),
        ("set -u -o noclobber", "if true; then\n(exit 3)\nfi", "if true; then (exit 3); fi"),
        ("shopt -s lithist", "if true; then\n(exit 3)\nfi", "if true; then\n(exit 3)\nfi"),
        ("PROMPT_COMMAND=(true); set -o vi", "sh -c 'exit 3' *", "sh -c 'exit 3' *"),
    ],
)
def test_bash_as_people_set_it(home: Home, options: str, typed: str, recorded: str) -> None:
    with shell(home, "bash") as shown:
        shown.send(f"{options}\n")
        hooked(shown, "bash")
        for _ in range(2):  # the second is no new line of the history to ignoreboth
            shown.send(f"{typed}\n")
            shown.expect("ready> ")
        shown.send("echo [$?]\n")
        shown.expect("[3]")
        [record] = records(home)
        assert record.read_text() == f"3\n{recorded}\n"
    home.run("completion", "bash", "--hook")


def test_two_shells_have_two_records(home: Home) -> None:
    with shell(home, "bash") as one, shell(home, "bash") as two:
        for shown, number in ((one, 3), (two, 4)):
            hooked(shown, "bash")
            shown.send(f"sh -c 'exit {number}'\n")
            shown.expect("ready> ")
        one.send("localspec explain\n")
        one.expect("exit code 3:")
        two.send("(localspec explain)\n")
        two.expect("exit code 4:")
    home.run("completion", "bash", "--hook")


def test_a_strange_folder_reaches_no_shell(tmp_path: Path) -> None:
    with scripted_home() as home:
        home.root.chmod(0o700)
        strange = home.root / "a '$(touch pwned)'`x` \\b;"
        strange.mkdir()
        with_program(home)
        home.environment["LOCALSPEC_HOME"] = str(strange)
        for name in filter(shutil.which, ("bash", "zsh", "fish")):
            with shell(home, name) as shown:
                hooked(shown, name)
                shown.send(f"cd {tmp_path}; sh -c 'exit 8'\n")
                shown.expect("ready> ")
                wait_for(lambda: list((strange / "run").glob("failed-*")), "the record")
            home.run("completion", name, "--hook")
        assert not list(home.root.rglob("pwned"))
        home.environment["LOCALSPEC_HOME"] = str(home.root)


def test_a_runtime_folder_that_is_gone_is_not_complained_about(home: Home, tmp_path: Path) -> None:
    hook = home.run("completion", "bash", "--hook").stdout
    (tmp_path / "rc").write_text(hook.replace(str(home.root), "/none"))
    ran = subprocess.run(
        ["bash", "--rcfile", str(tmp_path / "rc"), "-i"],
        input="true\nfalse\necho [$?]\n",
        env={**os.environ, "HOME": str(home.root)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "[1]" in ran.stdout
    assert "/none" not in ran.stderr


# ------------------------------------------------------------------ what is explained


def test_what_is_piped_said_or_in_a_file_is_explained(home: Home, tmp_path: Path) -> None:
    run = home.run("explain", stdin="ld: cannot find -lfoo\n")
    assert run.stdout.startswith("ld: cannot find -lfoo\n\nExplain ")
    assert run.stderr == ""
    run = home.run("explain", "E: Unable", "to locate package")
    assert run.stdout.startswith("E: Unable to locate package\n\nExplain ")
    (tmp_path / "err.txt").write_text("Traceback")
    assert "Traceback" in home.run("explain", "-f", str(tmp_path / "err.txt")).stdout
    assert "Traceback" in home.run("explain", str(tmp_path / "err.txt")).stdout
    assert home.run("explain").returncode == 2  # nothing at all, from no shell of ours


def test_a_program_that_pipes_nothing_is_not_waited_for(home: Home) -> None:
    run = home.run("explain", stdin="")
    assert (run.returncode, run.stdout) == (2, "")
    assert "make 2>&1 | localspec explain" in run.stderr


@pytest.mark.parametrize(
    ("code", "means"),
    [(1, ""), (126, " (found, but not executable)"), (127, " (command not found)"), (200, "")],
)
def test_what_exit_codes_mean(code: int, means: str) -> None:
    assert failures.meaning(code) == means
    assert failures.meaning(137) == " (ended by SIGKILL)"


def test_a_long_log_loses_its_middle() -> None:
    text = "\n".join(f"line {number}" for number in range(1000))
    cut = asking.middle_left_out(text)
    assert cut(len(text)) == asking.Cut(text)
    for room in (0, 100, 2000, len(text) - 1):
        short, said = cut(room)
        head, _, rest = short.partition("\n[… ")
        left, _, tail = rest.partition(" in the middle left out …]\n")
        assert text.startswith(head)
        assert text.endswith(tail)
        lines = [each for each in (*head.split("\n"), *tail.split("\n")) if each]
        assert int(left.split()[0]) == 1000 - len(lines)
        assert said == f"{left} in the middle."
        assert len(head) + len(tail) <= room
    line = "x" * 1000
    assert asking.middle_left_out(line)(100).text.replace("x", "") == (
        "\n[… 1 line in the middle left out …]\n"
    )
