"""A terminal that knows no escape codes gets none, and no pipe does, by whatever command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.cli.terminal import hints
from tests.cli.test_harmless import ARGUMENTS
from tests.support.daemons import Home, scripted_home
from tests.support.many import Job, in_a_terminal, in_pipes
from tests.support.terminal import terminal

LINES = [
    f"{name} {more}".strip()
    for name, each in ARGUMENTS.items()
    for more in ["--help", *each]
    if "❮" not in more and f"{name} {more}".strip() != "cmd hello"  # which waits for a key
]


def job(line: str) -> Job:
    return [*shlex.split(line), *(["say", "hi"] if line.startswith("ask") else [])], {}


@pytest.fixture(scope="module")
def lived_in() -> Iterator[Home]:
    with scripted_home() as home:
        home.environment["EDITOR"] = "true"
        home.chat("raw # Title\n\n**bold**", localspec={"conversation": "new", "kind": "ask"})
        yield home


def test_a_dumb_terminal_gets_no_escape_codes_from_any_command(lived_in: Home) -> None:
    environment = {**lived_in.environment, "TERM_": "dumb"}
    shown = in_a_terminal(environment, [job(line) for line in LINES], columns=80)
    for line, raw in zip(LINES, shown, strict=True):
        assert "\x1b" not in raw, line


def test_a_pipe_gets_no_escape_codes_from_any_command(lived_in: Home) -> None:
    shown = in_pipes(lived_in.environment, [job(line) for line in LINES])
    for line, done in zip(LINES, shown, strict=True):
        assert "\x1b" not in done.out + done.err, line


def test_thoughts_and_a_watched_status_have_none_either(lived_in: Home) -> None:
    environment = {**lived_in.environment, "TERM_": "dumb"}
    with terminal(environment, "status", "--watch") as shown:
        shown.expect("daemon")
        shown.expect("daemon")
        shown.interrupt()
        shown.wait()
        assert "\x1b" not in shown.raw
    with terminal(environment, "ask", "raw <think>Hm.</think>Yes.") as shown:
        shown.expect("Yes.")
        assert shown.wait() == 0
        assert "\x1b" not in shown.raw


def test_the_line_about_the_small_pair_comes_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state" / "hint"
    today, tomorrow = "2026-11-22", "2026-11-23"
    monkeypatch.setattr("time.strftime", lambda _: today)
    assert [hints._was_shown_today(file) for _ in range(3)] == [False, True, True]
    monkeypatch.setattr("time.strftime", lambda _: tomorrow)
    assert [hints._was_shown_today(file) for _ in range(2)] == [False, True]
    file.write_bytes(b"\xff")
    assert hints._was_shown_today(file)
    assert hints._was_shown_today(tmp_path / "state" / "hint" / "below")
