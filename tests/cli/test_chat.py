"""A chat, in a terminal as a person has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localspec.cli.chat.chat import complete, unquoted
from tests.support.daemons import Home, wait_for
from tests.support.terminal import Terminal, terminal


def said(home: Home) -> list[str]:
    found = home.request("GET", "/localspec/conversations/last").json
    return [each["content"] for each in found.get("messages", [])]  # none: nothing is kept yet


def line(shown: Terminal, text: str) -> None:
    """Type a line when the prompt is there."""
    shown.expect("›")
    shown.send(f"{text}\r")


def test_a_talk_is_kept_and_ends_with_ctrl_d(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "say one")
        line(shown, "say two")
        shown.expect("accepted")  # the line at the bottom: the prompt is there
        shown.send("\x04")
        assert shown.wait() == 0
    assert said(warm) == ["say one", "one", "say two", "two"]


def test_it_goes_on_with_the_last_conversation(warm: Home) -> None:
    warm.run("ask", "say before")
    with terminal(warm.environment, "chat", "-c") as shown:
        shown.expect("Going on after 1 question.")
        line(shown, "say after")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["say before", "before", "say after", "after"]


def test_a_window_that_becomes_narrow_in_a_talk(warm: Home) -> None:
    with terminal(warm.environment, "chat", columns=100) as shown:
        line(shown, "slow 40")
        shown.expect("10 11")
        shown.resize(24, 8)
        shown.expect("›")
        shown.send("say after it\r")
        shown.expect("after it")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm)[1].rstrip().endswith("38 39")


def test_ctrl_c_stops_the_answer_and_not_the_chat(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "forever")
        shown.expect("2 3")
        shown.interrupt()
        shown.expect("Stopped; what came is part of the conversation.")
        # The daemon keeps it when it sees that the client left, which a program may outrun.
        wait_for(lambda: len(said(warm)) == 2, "the turn that was stopped")
        line(shown, "say still here")
        # Not by the screen alone: what is typed looks like the answer, which Ctrl-C would stop.
        wait_for(lambda: len(said(warm)) == 4, "both turns")
        shown.expect("accepted")  # the line at the bottom: the prompt is there
        shown.send("half a question\x03")  # empties the line
        line(shown, "/exit")
        assert shown.wait() == 0
    assert "half" not in " ".join(said(warm))


def test_several_lines_by_quotes_and_by_alt_enter(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, '"""say one')
        shown.send('two"""\r')
        shown.expect("one two")
        shown.expect("›")
        shown.send("say three\x1b\rfour\r")
        shown.expect("three four")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm)[0] == "say one\ntwo"
    assert said(warm)[2] == "say three\nfour"


def test_undo_regen_and_system(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/undo")
        shown.expect("There is nothing to take back.")
        line(shown, "say one")
        line(shown, "say two")
        line(shown, "/undo")
        shown.expect("Taken back: say two")
        line(shown, "/system Be brief.")
        line(shown, "/system")
        shown.expect("Be brief.")
        line(shown, "/regen")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["Be brief.", "say one", "one"]


def test_files_go_with_the_next_question(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("echo\n")
    with terminal(warm.environment, "chat") as shown:
        line(shown, f"/file {tmp_path}/a b.txt")
        shown.expect("will go with your next question.")
        line(shown, "say what?")
        line(shown, f"/file {tmp_path}/missing")
        shown.expect("cannot be read")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm)[0] == f"{tmp_path}/a b.txt:\n```\necho\n```\n\nsay what?"


def test_save_stats_and_what_is_no_command(warm: Home, tmp_path: Path) -> None:
    target = tmp_path / "talk.md"
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/stats")
        shown.expect("No answer is complete yet.")
        line(shown, "say hello")
        line(shown, "/stats")
        shown.expect("accepted 3 (75 %)")
        line(shown, f"/save {target}")
        shown.expect("Saved in")
        line(shown, f"/save {target}")
        shown.expect("exists; choose another name.")
        line(shown, "/regn")
        shown.expect("did you mean /regen?")
        line(shown, "/help")
        shown.expect("write the question in $EDITOR")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert target.read_text() == "## You\n\nsay hello\n\n## Answer\n\nhello\n"


def test_edit_asks_what_was_written(warm: Home, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\nsleep 0.01; echo "say edited" > "$1"; touch -d "+2 seconds" "$1"\n'
    )
    editor.chmod(0o755)
    environment = {**warm.environment, "EDITOR": str(editor), "VISUAL": ""}
    with terminal(environment, "chat") as shown:
        line(shown, "/edit")
        shown.expect("edited")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_pairs_are_listed_and_changed(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/pair")
        shown.expect("builtin")
        line(shown, "/pair nope")
        shown.expect("There is no pair 'nope' here")
        line(shown, f"/pair {warm.model}")
        line(shown, "say hello")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_the_line_at_the_bottom_tells_the_numbers(warm: Home) -> None:
    with terminal(warm.environment, "chat", columns=120) as shown:
        line(shown, "say hello")
        shown.expect("/4096 tokens")
        shown.expect("75 % accepted · 1.80×")
        shown.send("/exit\r")
        assert shown.wait() == 0


def test_tab_completes_commands(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        shown.expect("›")
        shown.send("/ex\t")
        shown.expect("/ex")
        shown.expect("it")  # in one drawing or the next
        shown.send("\r")
        assert shown.wait() == 0


def test_an_error_does_not_end_the_chat(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "refuse context_length_exceeded")
        shown.expect("Refused as told.")
        line(shown, "die SIGKILL")
        shown.expect("The engine died")
        line(shown, "say alive")
        shown.expect("alive")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_nothing_is_kept_with_no_log_and_yet_the_model_knows(warm: Home) -> None:
    warm.run("ask", "say kept")
    with terminal(warm.environment, "chat", "--no-log", columns=400) as shown:
        line(shown, "say secret")
        line(shown, "echo")
        shown.expect('{"role":"assistant","content":"secret"}')
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["say kept", "kept"]
    history = warm.root / "state" / "chat_history"
    assert not history.exists() or "secret" not in history.read_text()


def test_something_else_in_the_place_of_the_typed_lines_is_told_and_not_waited_for(
    warm: Home,
) -> None:
    history = warm.root / "state" / "chat_history"
    history.unlink(missing_ok=True)
    os.mkfifo(history)
    try:
        with terminal(warm.environment, "chat", columns=400) as shown:
            shown.expect("What you type is not kept")
            line(shown, "say hello")
            line(shown, "/exit")
            assert shown.wait() == 0
    finally:
        history.unlink()


@pytest.mark.parametrize("columns", [20, 200])
def test_narrow_and_wide(warm: Home, columns: int) -> None:
    with terminal(warm.environment, "chat", columns=columns) as shown:
        line(shown, "say hello world")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_a_pipe_is_no_place_for_a_chat(warm: Home) -> None:
    run = warm.run("chat", stdin="hi")
    assert run.returncode == 2
    assert "in a pipe: localspec ask" in run.stderr


@pytest.mark.parametrize(
    ("text", "whole", "meant"),
    [
        ("one", True, "one"),
        ('"""one', False, "one"),
        ('"""one\ntwo"""', True, "one\ntwo"),
        ('"""', False, ""),
        ('"""a"""', True, "a"),
    ],
)
def test_quotes(text: str, whole: bool, meant: str) -> None:
    assert complete(text) is whole
    assert unquoted(text) == meant
