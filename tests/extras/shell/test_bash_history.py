"""Test the hook in a real bash with many history settings: it records the last failed command, or none."""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from localspec.extras.shell import failures
from tests.support.daemons import Home, temporary_home
from tests.support.shells import shell
from tests.support.terminal import Terminal

CONTROLS = ["", "ignorespace", "ignoredups", "ignoreboth", "erasedups", "ignoreboth:erasedups"]
SETTINGS = [
    "HISTTIMEFORMAT='%F %T '",
    "HISTTIMEFORMAT='%s 7 '",
    "HISTSIZE=3",
    "HISTIGNORE='*quiet*:ls'",
    "HISTIGNORE='&'",
    "shopt -s lithist",
    "shopt -u cmdhist",
    "shopt -s histverify",
    "set -u",
    "set -o noclobber",
    "PROMPT_COMMAND='history -a'",
    "PROMPT_COMMAND='history -a; history -n'",
    "PROMPT_COMMAND=('true' 'history -a')",
    "PS0='$(true)'",
    "set -o posix",
]
BETWEEN = ["set +o history", "set -o history", "history -d -1", "history -c", "", "true", " true"]


@dataclass
class Typist:
    """Types commands into an interactive shell and reads the record of the last failed command."""

    session: Terminal
    folder: Path
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(100))
    failed: tuple[str, int] | None = None

    def type(self, command: str, code: int = 0) -> None:
        number = next(self.numbers)
        self.session.send(f"{command}\n")
        # A numbered prompt cannot be confused with the echo of a command.
        self.session.send(f"PS1='ready-'{number}'> '\n")
        self.session.expect(f"ready-{number}> ")
        if code:
            self.failed = command, code

    @property
    def record(self) -> tuple[str, int] | None:
        files = list(self.folder.glob("failed-*"))
        if not files:
            return None
        code, _, command = files[0].read_text().rstrip("\n").partition("\n")
        return command, int(code)


def draw_commands(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yield random commands with their exit codes; some of them repeat often."""
    while True:
        code = rng.choice([1, 2, 9, 127])
        word = rng.choice(["quiet", "'a  b'", '"$HOME"', "é", "\\*", "7 5", "x"])
        yield rng.choice(
            [
                (f"sh -c 'exit {code}' {word}", code),
                (f" sh -c 'exit {code}' {word}", code),
                (f"(exit {code})", code),
                (f" (exit {code})", code),
                ("\t(exit 5)", 5),
                ("(exit 3)", 3),
                ("(exit 3)", 3),
                (f"if true; then\n(exit {code})\nfi", code),
                (f"true {word}; (exit {code})", code),
                (f"cat <<E >/dev/null; (exit {code})\n{word}\nE", code),
                (f"! true {word}", 1),
                (f"true | (exit {code})", code),
                ("echo harmless >/dev/null", 0),
                (rng.choice(BETWEEN), 0),
            ]
        )


def split_words(command: str) -> list[str]:
    """Split a command into words, regardless of how bash joins its lines."""
    return shlex.split(command.replace(";", " ").replace("\n", " "))


@pytest.fixture
def home() -> Iterator[Home]:
    with temporary_home() as home:
        yield home


def install_hook(session: Terminal, monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(home.root))
    (home.root / "hook").write_text(failures.hook("bash"))
    session.send(f"source {home.root}/hook; echo hooked | tr a-z A-Z\n")
    session.expect("HOOKED")


@pytest.mark.parametrize("seed", range(18))
def test_the_record_is_a_failed_command_or_absent(
    home: Home, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Check the record after each of 25 random commands.

    A line that the history omits, as a repetition or because of a leading blank, may leave the previous
    record in place. That record is still a failed command with its own exit code.
    """
    rng = random.Random(seed)
    control = CONTROLS[seed % len(CONTROLS)]
    settings = rng.sample(SETTINGS, rng.randint(0, 2))
    with shell(home, "bash") as session:
        typist = Typist(session, home.root / "run")
        for setting in [f"HISTCONTROL={control}", f"HISTFILE={home.root}/history", *settings]:
            typist.type(setting)
        install_hook(session, monkeypatch, home)
        failed: list[tuple[list[str], int]] = []
        recorded = 0
        for command, code in itertools.islice(draw_commands(rng), 25):
            typist.type(command, code)
            if code:
                failed.append((split_words(command), code))
            if typist.record is None:
                continue
            text, number = typist.record
            recorded += 1
            assert failed, (control, settings, command)
            last_failed = failed[-1]
            if (split_words(text), number) != last_failed:
                # The command is not in the history, so the line before it is the record.
                kept_out = command[:1].isspace() or not code
                repeated = split_words(text) == failed[-1][0]
                assert kept_out or repeated, (control, settings, text, command, code)
                assert (split_words(text), number) in failed, (control, settings, text, number)
        if not settings and "dups" not in control and "both" not in control:
            assert recorded > 5


@pytest.mark.parametrize("control", CONTROLS)
def test_a_hidden_command_does_not_record_the_one_before(
    home: Home, monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    blank = "space" in control or "both" in control
    with shell(home, "bash") as session:
        typist = Typist(session, home.root / "run")
        typist.type(f"HISTCONTROL={control}")
        install_hook(session, monkeypatch, home)
        typist.type("echo harmless >/dev/null")
        for command, code in ((" (exit 3)", 3), (" mysql -psecret --bad", 127)):
            typist.type(command, code)
            assert typist.record == (None if blank else (command, code))
        typist.type("sh -c 'exit 4'", 4)
        assert typist.record == ("sh -c 'exit 4'", 4)
        typist.type("echo harmless >/dev/null")
        assert typist.record == ("sh -c 'exit 4'", 4)  # A successful command changes nothing.
        typist.type(" (exit 7)", 7)
        assert typist.record == (None if blank else (" (exit 7)", 7))


def test_an_empty_line_changes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with shell(home, "bash") as session:
        typist = Typist(session, home.root / "run")
        install_hook(session, monkeypatch, home)
        typist.type("(exit 3)", 3)
        for _ in range(3):
            session.send("\n")
        typist.type("")
        assert typist.record == ("(exit 3)", 3)


@pytest.mark.parametrize(
    ("setting_before", "setting_after"),
    [
        ("PROMPT_COMMAND='history -a; history -n'", "true"),
        ("true", "PROMPT_COMMAND=\"history -n; $PROMPT_COMMAND\""),
        ("true", "PROMPT_COMMAND=\"$PROMPT_COMMAND; history -n\""),
        ("true", "PROMPT_COMMAND+=('history -n')"),
        ("PROMPT_COMMAND=(true 'history -n')", "true"),
    ],
)  # fmt: skip
def test_lines_of_another_shell_are_not_recorded(
    home: Home, monkeypatch: pytest.MonkeyPatch, setting_before: str, setting_after: str
) -> None:
    history = home.root / "history"
    with shell(home, "bash") as session:
        typist = Typist(session, home.root / "run")
        for setting in (
            f"HISTFILE={history}",
            "HISTCONTROL=ignorespace",
            "history -a",
            setting_before,
        ):
            typist.type(setting)
        install_hook(session, monkeypatch, home)
        typist.type(setting_after)
        for number in range(3):
            command = f" echo 'zqtheirs {number}' >> {history}; (exit 3)"
            typist.type(command, 3)
            assert typist.record is None
            typist.type("true")
            with history.open("a") as file:
                file.write(f"zqothers {number}\n")
            typist.type(" (exit 4)", 4)
            assert typist.record is None
