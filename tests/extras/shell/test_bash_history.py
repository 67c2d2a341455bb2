"""The hook in a real bash, however its history is set: it records the last failed command, or nothing."""

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
    """Types commands at an interactive shell, and keeps the last one that failed and the record."""

    shown: Terminal
    folder: Path
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(100))
    failed: tuple[str, int] | None = None

    def type(self, command: str, code: int = 0) -> None:
        number = next(self.numbers)
        self.shown.send(f"{command}\n")
        # A prompt of its own, which no echo of a command can be taken for.
        self.shown.send(f"PS1='ready-'{number}'> '\n")
        self.shown.expect(f"ready-{number}> ")
        if code:
            self.failed = command, code

    @property
    def record(self) -> tuple[str, int] | None:
        files = list(self.folder.glob("failed-*"))
        if not files:
            return None
        code, _, command = files[0].read_text().rstrip("\n").partition("\n")
        return command, int(code)


def commands(draw: random.Random) -> Iterator[tuple[str, int]]:
    """Commands and their exit codes; some often repeat."""
    while True:
        code = draw.choice([1, 2, 9, 127])
        word = draw.choice(["quiet", "'a  b'", '"$HOME"', "é", "\\*", "7 5", "x"])
        yield draw.choice(
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
                (draw.choice(BETWEEN), 0),
            ]
        )


def words(command: str) -> list[str]:
    """A command's words, however bash joins the lines of one that has several."""
    return shlex.split(command.replace(";", " ").replace("\n", " "))


@pytest.fixture
def home() -> Iterator[Home]:
    with temporary_home() as home:
        yield home


def hooked(shown: Terminal, monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(home.root))
    (home.root / "hook").write_text(failures.hook("bash"))
    shown.send(f"source {home.root}/hook; echo hooked | tr a-z A-Z\n")
    shown.expect("HOOKED")


@pytest.mark.parametrize("seed", range(18))
def test_the_record_is_the_last_failed_command_or_there_is_none(
    home: Home, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A line that the history keeps out because it is the record's own again, or begins with a blank, may
    leave that record: a command that failed, with its own exit code.
    """
    draw = random.Random(seed)
    control = CONTROLS[seed % len(CONTROLS)]
    chosen = draw.sample(SETTINGS, draw.randint(0, 2))
    with shell(home, "bash") as shown:
        typist = Typist(shown, home.root / "run")
        for setting in [f"HISTCONTROL={control}", f"HISTFILE={home.root}/history", *chosen]:
            typist.type(setting)
        hooked(shown, monkeypatch, home)
        failed: list[tuple[list[str], int]] = []
        recorded = 0
        for command, code in itertools.islice(commands(draw), 25):
            typist.type(command, code)
            if code:
                failed.append((words(command), code))
            if typist.record is None:
                continue
            text, number = typist.record
            recorded += 1
            assert failed, (control, chosen, command)
            last = failed[-1]
            if (words(text), number) != last:
                # Kept out of the history, and the line before it is the record.
                kept_out = command[:1].isspace() or not code
                repeated = words(text) == failed[-1][0]
                assert kept_out or repeated, (control, chosen, text, command, code)
                assert (words(text), number) in failed, (control, chosen, text, number)
        if not chosen and "dups" not in control and "both" not in control:
            assert recorded > 5


@pytest.mark.parametrize("control", CONTROLS)
def test_a_command_before_it_is_not_taken_for_one_that_is_kept_out(
    home: Home, monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    blank = "space" in control or "both" in control
    with shell(home, "bash") as shown:
        typist = Typist(shown, home.root / "run")
        typist.type(f"HISTCONTROL={control}")
        hooked(shown, monkeypatch, home)
        typist.type("echo harmless >/dev/null")
        for command, code in ((" (exit 3)", 3), (" mysql -psecret --bad", 127)):
            typist.type(command, code)
            assert typist.record == (None if blank else (command, code))
        typist.type("sh -c 'exit 4'", 4)
        assert typist.record == ("sh -c 'exit 4'", 4)
        typist.type("echo harmless >/dev/null")
        assert typist.record == ("sh -c 'exit 4'", 4)  # what did not fail changes nothing
        typist.type(" (exit 7)", 7)
        assert typist.record == (None if blank else (" (exit 7)", 7))


def test_an_empty_line_changes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with shell(home, "bash") as shown:
        typist = Typist(shown, home.root / "run")
        hooked(shown, monkeypatch, home)
        typist.type("(exit 3)", 3)
        for _ in range(3):
            shown.send("\n")
        typist.type("")
        assert typist.record == ("(exit 3)", 3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("PROMPT_COMMAND='history -a; history -n'", "true"),
        ("true", "PROMPT_COMMAND=\"history -n; $PROMPT_COMMAND\""),
        ("true", "PROMPT_COMMAND=\"$PROMPT_COMMAND; history -n\""),
        ("true", "PROMPT_COMMAND+=('history -n')"),
        ("PROMPT_COMMAND=(true 'history -n')", "true"),
    ],
)  # fmt: skip
def test_a_line_of_another_shell_is_not_taken_for_one_of_this(
    home: Home, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    history = home.root / "history"
    with shell(home, "bash") as shown:
        typist = Typist(shown, home.root / "run")
        for setting in (f"HISTFILE={history}", "HISTCONTROL=ignorespace", "history -a", before):
            typist.type(setting)
        hooked(shown, monkeypatch, home)
        typist.type(after)
        for at in range(3):
            command = f" echo 'zqtheirs {at}' >> {history}; (exit 3)"
            typist.type(command, 3)
            assert typist.record is None
            typist.type("true")
            with history.open("a") as file:
                file.write(f"zqothers {at}\n")
            typist.type(" (exit 4)", 4)
            assert typist.record is None
