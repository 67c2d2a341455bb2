"""Test `localspec history` and what `ask` and `chat` store in it."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.cli.terminal.layout import cells
from tests.support.daemons import Home
from tests.support.extras import needs
from tests.support.terminal import terminal


@pytest.fixture(autouse=True)
def empty_history(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "warm" in request.fixturenames:
        request.getfixturevalue("warm").run("history", "rm", "-y", "--all")


def list_titles(home: Home) -> list[str]:
    return [
        conversation["title"] for conversation in json.loads(home.run("history", "--json").stdout)
    ]


@needs("shell")
def test_titles_come_from_the_words(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n")
    diff = "diff --git a/x b/x\n"
    warm.run("ask", "review this", stdin=diff)
    warm.run("ask", "-f", "a.py", "what", "is it?", cwd=tmp_path)
    warm.run("ask", "-f", "a.py", cwd=tmp_path)
    warm.run("ask", stdin=diff)
    assert list_titles(warm) == ["Piped text", "a.py", "what is it?", "review this"]
    for line, name in (("ask < a.py", "a.py"), ("cmd 'say ls'", "cmd: say ls")):
        shell = f"{sys.executable} -m localspec {line}"
        subprocess.run(["sh", "-c", shell], env=warm.environment, cwd=tmp_path)
        assert list_titles(warm)[0] == name
    warm.run("ask", "--save", "brief", "Briefly: $input")
    warm.run("ask", "-t", "brief", stdin=diff)
    warm.run("ask", "-t", "brief", "say it")
    assert list_titles(warm)[:2] == ["say it", "brief: Piped text"]


def test_the_title_of_a_chat_is_what_was_typed(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n")
    with terminal(warm.environment, "chat") as session:
        session.expect("›")
        session.send(f"/file {tmp_path / 'a.py'}\r")
        session.expect("be included in your next question")
        session.send("say what it is\r")
        session.expect("say what it is\n\n›")
        session.send("/exit\r")
        assert session.wait() == 0
    assert list_titles(warm) == ["say what it is"]


def test_search_shows_the_line_and_fails_when_there_is_none(warm: Home) -> None:
    warm.run("ask", "say one\nthe second LINE of it")
    run = warm.run("history", "search", "second", "line")
    head, match = run.stdout.splitlines()
    assert (run.returncode, head.split()[-2:], match) == (
        0,
        ["say", "one"],
        "  You: the second LINE of it",
    )
    for json_ in ([], ["--json"]):
        run = warm.run("history", "search", "nowhere", *json_)
        assert (run.returncode, run.stdout) == (1, "[]\n" if json_ else "")
        assert run.stderr == "localspec: No conversation contains 'nowhere'.\n"


@pytest.mark.parametrize("text", [[""], ["", ""], ["  "], ["\n"], ["", "--json"], ["--json", "\t"]])
def test_a_search_for_nothing_is_refused(warm: Home, text: list[str]) -> None:
    warm.run("ask", "say one")
    run = warm.run("history", "search", *text)
    assert (run.returncode, run.stdout) == (2, "")
    assert "There is no text to search for" in run.stderr


@pytest.mark.parametrize("columns", [44, 80, 200])
def test_matches_are_highlighted_on_a_terminal(warm: Home, columns: int) -> None:
    warm.run("ask", f"say {'before 前 ' * 30}needle{' after 後' * 30}")
    with terminal(warm.environment, "history", "search", "NEEDLE", columns=columns) as session:
        assert session.wait() == 0
    assert "\x1b[1;31mneedle\x1b[0m" in session.raw
    assert max(map(cells, session.text.split("\n"))) <= columns


def test_all_lines_of_a_conversation_have_one_time(warm: Home) -> None:
    """That of its last answer, also when it began on another day."""
    warm.run("ask", "say one")
    database = warm.root / "data" / "conversations.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE conversations SET created = created - 86400")
    _, listed = warm.must_run("history").splitlines()
    day, minute = listed.split()[1:3]
    found, _ = warm.must_run("history", "search", "one").splitlines()
    assert found.split()[1:3] == [day, minute]
    with terminal(warm.environment, "history", "show") as session:
        assert session.wait() == 0
    assert f", {day} {minute}, " in session.text


def test_the_number_of_listed_conversations_is_limited(warm: Home) -> None:
    for word in ("one", "two", "three"):
        warm.run("ask", f"say {word}")
    assert len(warm.run("history", "-n", "2").stdout.splitlines()) == 3
    assert len(json.loads(warm.run("history", "-n", "1", "--json").stdout)) == 1
    assert warm.run("history", "-n", "0").returncode == 2


def test_removing_everything_asks_on_a_terminal(warm: Home) -> None:
    for line, reply, remaining in (([], "n", 1), ([], "y", 0), (["-y"], "", 0)):
        warm.run("ask", "say one")
        with terminal(warm.environment, "history", "rm", "--all", *line) as session:
            if reply:
                session.expect("[y/N]")
                session.send(f"{reply}\r")
            assert session.wait() == remaining
        assert len(list_titles(warm)) == remaining


def test_existing_conversations_are_removed_despite_unknown_ones(warm: Home) -> None:
    for item in ("one", "two", "three"):
        warm.run("ask", f"say {item}")
    ids = [item["id"] for item in json.loads(warm.run("history", "--json").stdout)]
    run = warm.run("history", "rm", "-y", ids[0], "zzz", ids[1])
    assert (run.returncode, run.stdout) == (1, f"Removed {ids[0]}.\nRemoved {ids[1]}.\n")
    assert "no conversation 'zzz'" in run.stderr
    assert list_titles(warm) == ["say one"]


def test_show_prints_the_last_answer_or_its_code(warm: Home) -> None:
    warm.run("ask", "raw text\n```py\n1\n```\nand\n```\n2\n```\n")
    outputs = {line: warm.run("history", "show", line).stdout for line in ("--last", "-x", "--xl")}
    assert outputs["--last"].startswith("text\n```py\n1\n```\n")
    assert (outputs["-x"], outputs["--xl"]) == ("1\n", "2\n")
    assert json.loads(warm.run("history", "show", "--json").stdout)["messages"]
    assert warm.run("history", "show", "-x", "--last").returncode == 2
    warm.run("ask", "say no code")
    assert "has no code block" in warm.refused("history", "show", "-x")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux sets another's limits")
def test_an_unsaved_answer_is_reported_at_once(home: Home) -> None:
    daemon = home.start()
    home.run("ask", "say older")
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    run = home.run("ask", "say lost")
    assert (run.returncode, run.stdout) == (0, "lost\n")
    assert run.stderr.startswith("localspec: The answer was not saved in the history. ")
    for line in (["--json"], ["--no-stream"], ["-x"]):
        run = home.run("ask", *line, "raw ```\n1\n```\n")
        assert "The answer was not saved" in run.stderr
    with terminal(home.environment, "chat") as session:
        for word in ("one", "two"):  # The second question continues the conversation all the same.
            session.expect("›")
            session.send(f"say {word}\r")
            session.expect(f"\n{word}\n")
        session.expect("›")
        assert session.text.count("was not saved") == 1
        session.send("/exit\r")
        session.wait()
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, limits)
    run = home.run("ask", "-c", "say no")
    assert (run.returncode, run.stdout) == (1, "")
    assert "The last answer was not saved" in run.stderr
