"""A chat, in a terminal as a person has it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli import inputs
from localspec.cli.chat import slash
from localspec.cli.chat.slash import is_complete, parse_line, quote_message
from localspec.client.api import Client
from localspec.errors import ContextExceeded
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
        shown.expect("Continuing after 1 question.")
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
        shown.expect("Stopped; the partial answer is part of the conversation.")
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
        wait_for(lambda: len(said(warm)) == 2, "the turn")  # what is typed looks like the answer
        shown.expect("accepted")  # the line at the bottom: the prompt is there
        shown.send("say three\x1b\rfour\r")
        shown.expect("three four")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm)[0] == "say one\ntwo"
    assert said(warm)[2] == "say three\nfour"


def test_undo_regen_and_system(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/undo")
        shown.expect("There is no question to remove.")
        line(shown, "say one")
        line(shown, "say two")
        line(shown, "/undo")
        shown.expect("Removed: say two")
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
        shown.expect("will be included in your next question.")
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
        shown.expect("There is no complete answer yet.")
        line(shown, "say hello")
        line(shown, "/stats")
        shown.expect("accepted 3 (75%)")
        line(shown, f"/save {target}")
        shown.expect("Saved to")
        line(shown, f"/save {target}")
        shown.expect("exists; choose another name.")
        line(shown, "/regn")
        shown.expect("did you mean /regen?")
        line(shown, "/help")
        for name in slash.COMMANDS:
            shown.expect(f"  {name} ")
        shown.expect("a space first")
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
        shown.expect("say edited")  # in the prompt: it is seen before it is sent
        shown.expect("› say edited")
        assert said(warm)[:1] != ["say edited"]
        shown.send(" twice\r")
        shown.expect("edited twice")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["say edited twice", "edited twice"]


@pytest.mark.parametrize("editor", ["false", "/nowhere/vi"])
def test_an_editor_that_fails_does_not_end_the_chat(warm: Home, editor: str) -> None:
    environment = {**warm.environment, "EDITOR": editor, "VISUAL": ""}
    with terminal(environment, "chat") as shown:
        line(shown, "/edit")
        shown.expect("$EDITOR names the editor to use")
        line(shown, "say alive")
        wait_for(lambda: said(warm) == ["say alive", "alive"], "the turn")
        line(shown, "exit")
        assert shown.wait() == 0


def test_pairs_are_listed_and_changed(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/pair")
        shown.expect("builtin")
        line(shown, "/pair nope")
        shown.expect("No pair 'nope' is installed")
        line(shown, f"/pair {warm.model}")
        line(shown, "say hello")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_the_line_at_the_bottom_tells_the_numbers(warm: Home) -> None:
    with terminal(warm.environment, "chat", columns=120) as shown:
        line(shown, "say hello")
        shown.expect("/4096 tokens")
        shown.expect("75% accepted")
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
        shown.expect("The engine crashed")
        line(shown, "say alive")
        shown.expect("alive")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_a_turn_whose_daemon_was_killed_is_part_of_the_conversation(home: Home) -> None:
    home.use_fake()
    assert home.run("start").returncode == 0
    with terminal(home.environment, "chat") as shown:
        line(shown, "say one")
        wait_for(lambda: len(said(home)) == 2, "the first turn")
        line(shown, "forever")
        shown.expect("2 3 4")
        os.kill(home.status()["pid"], signal.SIGKILL)
        shown.expect("localspec:")
        assert home.run("start").returncode == 0
        line(shown, "say two")
        wait_for(lambda: len(said(home)) == 6, "all turns")
        line(shown, "/exit")
        assert shown.wait() == 0
    kept = said(home)
    assert kept[:3] == ["say one", "one", "forever"]
    assert kept[3].startswith("0 1 2 3")
    assert kept[4:] == ["say two", "two"]


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
            shown.expect("Input history is not saved")
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


def test_the_end_has_many_names(warm: Home) -> None:
    for typed in ("exit", "quit", "/bye", "/quit", "/q", "/exit"):
        with terminal(warm.environment, "chat") as shown:
            line(shown, typed)
            assert shown.wait() == 0, typed


def test_what_looks_like_a_command_can_be_sent(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/nothing")
        shown.expect("Unknown command /nothing; /help lists the commands.")
        shown.expect("begin with a space.")
        line(shown, "/hist")
        shown.expect("did you mean /history?")
        line(shown, " /undo that?")
        wait_for(lambda: len(said(warm)) == 2, "the turn")
        line(shown, "/etc/hosts: what is it?")
        wait_for(lambda: len(said(warm)) == 4, "the turn")
        line(shown, '"""quit"""')
        wait_for(lambda: len(said(warm)) == 6, "the turn")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm)[::2] == ["/undo that?", "/etc/hosts: what is it?", "quit"]


def test_new_conversations(warm: Home) -> None:
    before = len(listed(warm))
    with terminal(warm.environment, "chat", "-s", "Be brief.") as shown:
        line(shown, "say one")
        wait_for(lambda: "one" in said(warm), "the turn")
        line(shown, "/new")
        shown.expect("Started a new conversation.")
        line(shown, "say two")
        wait_for(lambda: "two" in said(warm), "the turn")
        line(shown, "/clear")
        shown.expect("Started a new conversation.")
        assert "\x1b[2J" in shown.raw
        line(shown, "say three")
        line(shown, "/history")
        shown.expect("You\n")
        shown.expect("say three")
        line(shown, "/bye")
        assert shown.wait() == 0
    assert said(warm) == ["Be brief.", "say three", "three"]
    assert len(listed(warm)) == before + 3


def listed(home: Home) -> list[dict[str, object]]:
    found: list[dict[str, object]] = home.request(
        "GET", "/localspec/conversations?limit=10000"
    ).json["conversations"]
    return found


def test_what_was_all_taken_back_is_no_conversation(warm: Home) -> None:
    warm.run("ask", "say before")
    with terminal(warm.environment, "chat") as shown:
        line(shown, "/regen")
        shown.expect("There is no question to answer again.")
        line(shown, "say one")
        line(shown, "/undo")
        shown.expect("Removed: say one")
        line(shown, "/regen")
        shown.expect("There is no question to answer again.")
        assert said(warm) == ["say before", "before"]
        line(shown, "say two")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["say two", "two"]
    assert listed(warm)[0]["title"] == "say two"


def test_a_question_that_is_not_answered_again_is_in_the_prompt(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "say one")
        wait_for(lambda: said(warm) == ["say one", "one"], "the turn")
        line(shown, "/pair /nowhere/x.gguf")
        shown.expect("Now using /nowhere/x.gguf")
        line(shown, "/regen")
        shown.expect("localspec: ")
        shown.expect("› say one")
        shown.send("\x03")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_an_interrupt_before_the_first_word_leaves_nothing(warm: Home) -> None:
    with terminal(warm.environment, "chat") as shown:
        line(shown, "late 30")
        wait_for(lambda: warm.status()["running"], "the question at the engine")
        time.sleep(0.5)  # the answer's head is on its way
        shown.interrupt()
        shown.expect("Stopped before the answer began")
        line(shown, "say hello")
        wait_for(lambda: said(warm) == ["say hello", "hello"], "the next turn")
        line(shown, "/exit")
        assert shown.wait() == 0


def test_thoughts_alone_are_a_turn_that_can_be_taken_back(warm: Home) -> None:
    with terminal(warm.environment, "chat", "--hide-reasoning") as shown:
        line(shown, "say one")
        wait_for(lambda: said(warm) == ["say one", "one"], "the turn")
        line(shown, "think")
        wait_for(lambda: warm.status()["running"], "the question at the engine")
        time.sleep(0.5)
        shown.interrupt()
        shown.expect("Stopped; the partial answer is part of the conversation.")
        line(shown, "/undo")
        shown.expect("Removed: think")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["say one", "one"]


OPTIONS = ("--top-k 3 --presence-penalty -1.5 --seed 7 --exact -n 9 --draft 2").split()


def test_sampling_by_option_and_by_command(warm: Home) -> None:
    def sampling(frame: dict[str, Any]) -> dict[str, Any]:
        return {**frame["sampling"], "n": frame.get("max_tokens"), "exact": frame.get("exact")}

    with terminal(warm.environment, "chat", *OPTIONS, columns=200) as shown:
        line(shown, "echo")
        wait_for(lambda: len(said(warm)) == 2, "the turn")
        for command in ("top_p 0.5", "--frequency-penalty -2", "exact off", "tokens default"):
            line(shown, f"/set {command}")
            shown.expect("from the next question.")
        line(shown, "/set parameter seed 8")
        shown.expect("seed is 8 from")
        for wrong, why in (
            ("top_p 1.5", "'top_p' must be a number from 0 to 1, or 'default', not '1.5'."),
            ("seed x", "'seed' must be a whole number from"),
            ("exact 2", "'exact' must be on or off, not '2'."),
            ("temprature 1", "'temprature' cannot be set; did you mean temperature?"),
        ):
            line(shown, f"/set {wrong}")
            shown.expect(why)
        line(shown, "/set seed")
        shown.expect("seed is 8.")
        line(shown, "/set")
        shown.expect("NAME")
        shown.expect("top_p              0.5")
        line(shown, "echo")
        wait_for(lambda: len(said(warm)) == 4, "the turn")
        line(shown, "/exit")
        assert shown.wait() == 0
    first, second = (sampling(json.loads(each)) for each in said(warm)[1::2])
    assert (first["top_k"], first["presence_penalty"], first["seed"]) == (3, -1.5, 7)
    assert (first["n"], first["exact"]) == (9, True)
    changed = {"top_p": 0.5, "frequency_penalty": -2, "seed": 8, "n": None, "exact": None}
    assert second == {**first, **changed}


def test_files_and_a_template_go_with_the_first_question(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("note")
    warm.run("ask", "--save", "tr", "-s", "In $language.", "-n", "9", "say $input", "--force")
    file = str(tmp_path / "a.txt")
    options = ("-t", "tr", "-p", "language=German", "-f", file)
    with terminal(warm.environment, "chat", *options) as shown:
        shown.expect("will be included in your next question.")
        line(shown, "why?")
        shown.expect("say /")  # what is sent is shown
        wait_for(lambda: len(said(warm)) == 3, "the turn")
        line(shown, "say more")
        wait_for(lambda: len(said(warm)) == 5, "the turn")
        line(shown, "/regen")
        wait_for(lambda: len(said(warm)) == 5, "the turn")
        line(shown, "/new")
        line(shown, "hello")
        wait_for(lambda: len(said(warm)) == 3, "the turn")
        line(shown, "/exit")
        assert shown.wait() == 0
    assert said(warm) == ["In German.", "say hello", "hello"]
    asked = warm.request("GET", f"/localspec/conversations/{listed(warm)[1]['id']}").json
    contents = [each["content"] for each in asked["messages"]]
    assert contents[:2] == ["In German.", f"say {file}:\n```\nnote\n```\n\nwhy?"]
    assert contents[3:] == ["say more", "more"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-t", "nope"], "There is no template 'nope'"),
        (["-p", "a=b"], "add -t TEMPLATE"),
        (["-f", "-"], "In a chat standard input is the keyboard"),
        (["-f", "/nowhere"], "cannot be read"),
    ],
)
def test_a_chat_that_cannot_begin_says_why(warm: Home, options: list[str], why: str) -> None:
    with terminal(warm.environment, "chat", *options, columns=200) as shown:
        assert shown.wait() == 2
    assert why in shown.text


@pytest.mark.parametrize(
    ("typed", "effect"),
    [
        ("/hist", "This conversation is empty."),
        ("/set temper", "temperature is default."),
        ("/set exact of", "exact is off from"),
        ("/pai", "builtin"),
    ],
)
def test_tab_completes_commands_and_settings(warm: Home, typed: str, effect: str) -> None:
    with terminal(warm.environment, "chat", columns=120) as shown:
        shown.expect("›")
        shown.send(f"{typed}\t")
        time.sleep(0.5)  # it completes in a thread
        shown.send("\r")
        shown.expect(effect)
        line(shown, "/exit")
        assert shown.wait() == 0


def test_a_pipe_is_no_place_for_a_chat(warm: Home) -> None:
    run = warm.run("chat", stdin="hi")
    assert run.returncode == 2
    assert "in a pipe, use: localspec ask" in run.stderr


@pytest.mark.parametrize(
    ("typed", "whole", "kind", "text"),
    [
        ("one", True, "message", "one"),
        ('"""one', False, "message", "one"),
        ('"""one\ntwo"""', True, "message", "one\ntwo"),
        ('"""', False, "message", ""),
        ('"""a"""', True, "message", "a"),
        ('"""/undo"""', True, "message", "/undo"),
        (' """a', True, "message", '"""a'),
        ("/undo", True, "command", "/undo"),
        ("/set seed 7 ", True, "command", "/set seed 7"),
        ("/system a\nb", True, "command", "/system a\nb"),
        ("/nothing", True, "command", "/nothing"),
        (" /undo", True, "message", "/undo"),
        ("/etc/hosts: why?", True, "message", "/etc/hosts: why?"),
        ("// a comment", True, "message", "// a comment"),
        ("exit", True, "leave", ""),
        ("quit ", True, "leave", ""),
        (" exit", True, "message", "exit"),
        ("exit now", True, "message", "exit now"),
        ("", True, "message", ""),
    ],
)
def test_what_a_line_means(typed: str, whole: bool, kind: str, text: str) -> None:
    assert is_complete(typed) is whole
    assert parse_line(typed) == (kind, text)


@given(
    st.text()
    | st.builds(
        "".join, st.lists(st.sampled_from(["/", "undo", " ", '"""', "exit", "quit", "a", "\n"]))
    )
)
def test_every_message_can_be_typed(text: str) -> None:
    typed = quote_message(text)
    assert parse_line(typed) == ("message", text.strip())
    assert is_complete(typed)


@pytest.mark.parametrize("longer", ["", "real"])
def test_a_conversation_that_is_too_long_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, longer: str
) -> None:
    monkeypatch.setattr(inputs, "find_longer_pair", lambda client, tokens: longer)
    error = ContextExceeded("too long", n_prompt_tokens=9000, n_ctx=1024)
    text = inputs.describe_chat_too_long(error, Client(autostart=False))
    assert "9000 tokens" in text
    assert "1024" in text
    assert "/new" in text
    assert ("/pair real" in text) == bool(longer)
    assert "set a larger" not in text
