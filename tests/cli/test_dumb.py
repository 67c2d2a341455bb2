"""Test that no command sends escape codes to a dumb terminal or a pipe."""

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
    for name, variants in ARGUMENTS.items()
    for more in ["--help", *variants]
    if "❮" not in more and f"{name} {more}".strip() != "cmd hello"  # This command waits for a key.
]


def make_job(line: str) -> Job:
    return [*shlex.split(line), *(["say", "hi"] if line.startswith("ask") else [])], {}


@pytest.fixture(scope="module")
def home_with_history() -> Iterator[Home]:
    with scripted_home() as home:
        home.environment["EDITOR"] = "true"
        home.chat("raw # Title\n\n**bold**", localspec={"conversation": "new", "kind": "ask"})
        yield home


def test_a_dumb_terminal_gets_no_escape_codes_from_any_command(home_with_history: Home) -> None:
    environment = {**home_with_history.environment, "TERM_": "dumb"}
    outputs = in_a_terminal(environment, [make_job(line) for line in LINES], columns=80)
    for line, raw in zip(LINES, outputs, strict=True):
        assert "\x1b" not in raw, line


def test_a_pipe_gets_no_escape_codes_from_any_command(home_with_history: Home) -> None:
    results = in_pipes(home_with_history.environment, [make_job(line) for line in LINES])
    for line, result in zip(LINES, results, strict=True):
        assert "\x1b" not in result.out + result.err, line


def test_thoughts_and_watched_status_have_no_escape_codes(home_with_history: Home) -> None:
    environment = {**home_with_history.environment, "TERM_": "dumb"}
    with terminal(environment, "status", "--watch") as session:
        session.expect("daemon")
        session.expect("daemon")
        session.interrupt()
        session.wait()
        assert "\x1b" not in session.raw
    with terminal(environment, "ask", "raw <think>Hm.</think>Yes.") as session:
        session.expect("Yes.")
        assert session.wait() == 0
        assert "\x1b" not in session.raw


def test_the_hint_about_the_small_pair_is_daily(
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
