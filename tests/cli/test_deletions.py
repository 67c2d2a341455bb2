"""Test that no command deletes anything without a yes: `--yes`, or somebody at a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from localspec.cli.command_names import SYNONYMS
from tests.support.commands import list_commands
from tests.support.daemons import Home
from tests.support.extras import has_command
from tests.support.many import in_pipes
from tests.support.terminal import terminal

# Each command that deletes, by its other names too, and what it asks at a terminal.
DELETIONS = {
    "rm mine": "",
    "uninstall": "",
    "uninstall --models": "Delete all models permanently?",
    "uninstall --history": "Delete all history permanently?",
    "uninstall --history --models": "Delete all models and history permanently?",
    "gc": "Delete all files",
    "gc --json": "Delete all files",
    "prune": "Delete all files",
    "history rm 1f3a": "",
    "history delete last": "",
    "history rm --all": "Remove all conversations",
    "chats rm --all": "Remove all conversations",
    "templates rm brief": "",
    "prompts delete brief": "",
    "tune --check": "",
    "tune --revert": "Delete the tuned draft",
    "tune mine --revert": "Delete the tuned draft",
    "tune --forget": "Delete the tuned drafts of all",
    "service uninstall": "",
    "editor uninstall vim": "",
    "editor uninstall emacs": "",
}
# What is described as deleting, and is not: it keeps the user's things, or asks by a rule of its own.
NOT_DELETING = {
    "history": "a group",
    "templates": "a group",
    "config unset": "a setting is set again as easily, and doctor gives this command to scripts",
    "config set": "as config unset",
    "pulls cancel": "an ended pull leaves a list, and what it downloaded stays",
    "gc --dry-run": "only shows what would be deleted",
    "bench --keep-learning": "says what happens to the measurement's own leavings",
}
_ABOUT_DELETING = re.compile(r"remov|delet|uninstall|forget|discard|erase|without a value", re.I)


def list_texts() -> Iterator[tuple[str, str]]:
    """Yield the line of each command, and of each of its options, with its help."""
    for line, command in list_commands():
        yield line, f"{line} {command.help}"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield f"{line} {parameter.opts[-1]}", f"{parameter.name} {parameter.help}"


def test_every_command_that_deletes_is_in_the_table() -> None:
    described = {line for line, text in list_texts() if _ABOUT_DELETING.search(text)}
    listed = {
        line for line in described if any(f"{row} ".startswith(f"{line} ") for row in DELETIONS)
    }
    assert described - listed - NOT_DELETING.keys() == set()
    asking = {
        line
        for line, command in list_commands()
        if any("--yes" in param.opts for param in command.params)
    }
    assert {
        line for line in asking if not any(f"{row} ".startswith(line) for row in DELETIONS)
    } == set()


@pytest.fixture
def furnished(home: Home) -> Home:
    """Return a home without a daemon, with something of each kind that can be deleted."""
    home.environment["HOME"] = str(home.root)
    for name in (
        "data/store/pairs/mine.json", "data/history.db", "data/tuned/a/record.json", "state/chat_history",
        "config/templates/brief.toml", ".vim/pack/localspec/start/localspec/plugin/localspec.vim",
        ".emacs.d/init.el", ".config/systemd/user/localspec.service",
    ):  # fmt: skip
        (home.root / name).parent.mkdir(parents=True, exist_ok=True)
        (home.root / name).write_text("{}")
    (home.root / "config" / "config.toml").write_text("queue = 9\n")
    return home


def snapshot(home: Home) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.root.rglob("*") if path.is_file()}


LINES = [line for line in DELETIONS if has_command(line.split()[0]) or line.split()[0] in SYNONYMS]


@pytest.mark.parametrize("stdin", ["", "n\n", "y\n"])
def test_without_a_terminal_nothing_is_deleted(furnished: Home, stdin: str) -> None:
    before = snapshot(furnished)
    runs = in_pipes(furnished.environment, [(line.split(), {}) for line in LINES], stdin)
    for line, run in zip(LINES, runs, strict=True):
        assert (run.code, run.out) == (2, ""), (line, run.err)
        assert "add --yes" in run.err, line
    assert snapshot(furnished) == before
    assert not furnished.socket.exists()


@pytest.mark.parametrize("line", [line for line in LINES if DELETIONS[line]])
def test_at_a_terminal_a_question_is_asked_first(furnished: Home, line: str) -> None:
    before = snapshot(furnished)
    for reply in ("n\r", "\r"):
        with terminal(furnished.environment, *line.split()) as session:
            session.expect(DELETIONS[line])
            session.expect("[y/N]")
            session.send(reply)
            assert session.wait() == 1
    assert snapshot(furnished) == before


def test_what_was_named_is_deleted_at_a_terminal_and_with_yes(home: Home) -> None:
    for prefix in ("", "--yes", "-y"):
        file = home.root / "config" / "templates" / "brief.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('prompt = "x"\n')
        words = ["templates", "rm", *prefix.split(), "brief"]
        if prefix:
            assert home.run(*words).returncode == 0
        else:
            with terminal(home.environment, *words) as session:
                assert session.wait() == 0
        assert not file.exists()
