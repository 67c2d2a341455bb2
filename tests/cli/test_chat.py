"""Test `localspec chat` in a real terminal."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli import inputs
from localspec.cli.chat import slash
from localspec.cli.chat.slash import is_complete, parse_line, quote_message
from localspec.cli.chat.talk import Conversation
from localspec.cli.options import AskOptions
from localspec.client.api import Client
from localspec.errors import ContextExceeded
from tests.support.daemons import Home, wait_for
from tests.support.terminal import Terminal, terminal


def stored_messages(home: Home) -> list[str]:
    conversation = home.request("GET", "/localspec/conversations/last").json
    return [
        message["content"] for message in conversation.get("messages", [])
    ]  # There are none before anything is stored.


def type_line(session: Terminal, text: str) -> None:
    """Wait for the prompt and type a line."""
    session.expect("›")
    session.send(f"{text}\r")


@contextmanager
def chat(environment: dict[str, str], *options: str, columns: int = 80) -> Iterator[Terminal]:
    """Give a chat at a terminal, which /exit ends at last."""
    with terminal(environment, "chat", *options, columns=columns) as session:
        yield session
        type_line(session, "/exit")
        assert session.wait() == 0


def test_a_chat_is_stored_and_ends_with_ctrl_d(warm: Home) -> None:
    with terminal(warm.environment, "chat") as session:
        type_line(session, "say one")
        type_line(session, "say two")
        session.expect("accepted")  # The status line means that the prompt is shown.
        session.send("\x04")
        assert session.wait() == 0
    assert stored_messages(warm) == ["say one", "one", "say two", "two"]


def test_continue_resumes_the_last_conversation(warm: Home) -> None:
    warm.run("ask", "say before")
    with chat(warm.environment, "-c") as session:
        session.expect("Continuing after 1 question.")
        type_line(session, "say after")
    assert stored_messages(warm) == ["say before", "before", "say after", "after"]


def test_a_window_may_become_narrow_during_an_answer(warm: Home) -> None:
    with chat(warm.environment, columns=100) as session:
        type_line(session, "slow 40")
        session.expect("10 11")
        session.resize(24, 8)
        session.expect("›")
        session.send("say after it\r")
        session.expect("after it")
    assert stored_messages(warm)[1].rstrip().endswith("38 39")


def test_ctrl_c_stops_the_answer_and_not_the_chat(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "forever")
        session.expect("2 3")
        session.interrupt()
        session.expect("Stopped; the partial answer is part of the conversation.")
        # The daemon stores the turn once it notices the disconnect, which may be after the message.
        wait_for(lambda: len(stored_messages(warm)) == 2, "the turn that was stopped")
        type_line(session, "say still here")
        # The screen alone does not tell: the echo of the input looks like the answer.
        wait_for(lambda: len(stored_messages(warm)) == 4, "both turns")
        session.expect("accepted")  # The status line means that the prompt is shown.
        session.send("half a question\x03")  # Ctrl-C empties the line.
    assert "half" not in " ".join(stored_messages(warm))


def test_several_lines_by_quotes_and_by_alt_enter(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, '"""say one')
        session.send('two"""\r')
        wait_for(
            lambda: len(stored_messages(warm)) == 2, "the turn"
        )  # The echo of the input looks like the answer.
        session.expect("accepted")  # The status line means that the prompt is shown.
        session.send("say three\x1b\rfour\r")
        session.expect("three four")
    assert stored_messages(warm)[0] == "say one\ntwo"
    assert stored_messages(warm)[2] == "say three\nfour"


def test_undo_regen_and_system(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "/undo")
        session.expect("There is no question to remove.")
        type_line(session, "say one")
        type_line(session, "say two")
        type_line(session, "/undo")
        session.expect("Removed: say two")
        type_line(session, "/system Be brief.")
        type_line(session, "/system")
        session.expect("Be brief.")
        type_line(session, "/regen")
    assert stored_messages(warm) == ["Be brief.", "say one", "one"]


def test_a_conversation_goes_on_from_its_summary_and_back(warm: Home) -> None:
    """The fake model repeats what it is asked, here to summarise."""
    with chat(warm.environment) as session:
        type_line(session, "/compact")
        session.expect("There is no conversation to summarise.")
        type_line(session, "/system Be brief.")
        type_line(session, "say one")
        type_line(session, "/compact")
        session.expect("goes on from this summary")
        type_line(session, "say two")
        wait_for(lambda: stored_messages(warm)[-1:] == ["two"], "the turn")
        system, *turn = stored_messages(warm)
        assert turn == ["say two", "two"]
        assert system.startswith("Be brief.\n\nSummary of the conversation so far:\n\nSummarise")
        type_line(session, "/undo")
        session.expect("Removed: say two")
        type_line(session, "/undo")
        session.expect("Removed: Summary")
        type_line(session, "/system")
        session.expect("Be brief.")
        type_line(session, "say three")
    assert stored_messages(warm) == ["Be brief.", "say one", "one", "say three", "three"]


def test_files_go_with_the_next_question(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("echo\n")
    with chat(warm.environment) as session:
        type_line(session, f"/file {tmp_path}/a b.txt")
        session.expect("will be included in your next question.")
        type_line(session, "say what?")
        type_line(session, f"/file {tmp_path}/missing")
        session.expect("cannot be read")
    assert stored_messages(warm)[0] == f"{tmp_path}/a b.txt:\n```\necho\n```\n\nsay what?"


@pytest.mark.parametrize(
    "argument",
    [
        "~nobody-here/x",
        " ".join(f"file-number-{number}-of-many.py" for number in range(20)),
        "x" * 4000,
        "[",
        "²",
        "-1",
        "a=b=c",
        "'",
        "$HOME ${x}",
    ],
)
def test_no_argument_of_a_command_ends_the_chat(
    warm: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with chat(warm.environment) as session:
        for name, command in slash.COMMANDS.items():
            if command.argument and name != "/edit":
                type_line(session, f"{name} {argument}")
        type_line(session, "/pair builtin")
        type_line(session, "say still here")
        session.expect("still here")


def test_the_system_message_keeps_its_blanks(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "/set system Write:  two   blanks")
        type_line(session, "say one")
    assert stored_messages(warm)[0] == "Write:  two   blanks"


def test_save_stats_help_and_unknown_commands(warm: Home, tmp_path: Path) -> None:
    target = tmp_path / "talk.md"
    with chat(warm.environment) as session:
        type_line(session, "/stats")
        session.expect("There is no complete answer yet.")
        type_line(session, "say hello")
        type_line(session, "/stats")
        session.expect("accepted 3 (75%)")
        type_line(session, f"/save {target}")
        session.expect("Saved to")
        type_line(session, f"/save {target}")
        session.expect("exists; choose another name.")
        type_line(session, "/regn")
        session.expect("did you mean /regen?")
        type_line(session, "/help")
        for name in slash.COMMANDS:
            session.expect(f"  {name} ")
        session.expect("a space first")
    assert target.read_text() == "## You\n\nsay hello\n\n## Answer\n\nhello\n"


def test_edit_puts_the_text_in_the_prompt(warm: Home, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\nsleep 0.01; echo "say edited" > "$1"; touch -d "+2 seconds" "$1"\n'
    )
    editor.chmod(0o755)
    environment = {**warm.environment, "EDITOR": str(editor), "VISUAL": ""}
    with chat(environment) as session:
        type_line(session, "/edit")
        # The text is in the prompt, so that the user sees it before it is sent.
        session.expect("say edited")
        session.expect("› say edited")
        assert stored_messages(warm)[:1] != ["say edited"]
        session.send(" twice\r")
        session.expect("edited twice")
    assert stored_messages(warm) == ["say edited twice", "edited twice"]


@pytest.mark.parametrize("editor", ["false", "/nowhere/vi"])
def test_an_editor_that_fails_does_not_end_the_chat(warm: Home, editor: str) -> None:
    environment = {**warm.environment, "EDITOR": editor, "VISUAL": ""}
    with terminal(environment, "chat") as session:
        type_line(session, "/edit")
        session.expect("$EDITOR names the editor to use")
        type_line(session, "say alive")
        wait_for(lambda: stored_messages(warm) == ["say alive", "alive"], "the turn")
        type_line(session, "exit")
        assert session.wait() == 0


def test_pairs_are_listed_and_changed(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "/pair")
        session.expect("builtin")
        type_line(session, "/pair nope")
        session.expect("No pair 'nope' is installed")
        type_line(session, f"/pair {warm.model}")
        type_line(session, "say hello")


def test_the_status_line_shows_tokens_and_acceptance(warm: Home) -> None:
    with terminal(warm.environment, "chat", columns=120) as session:
        type_line(session, "say hello")
        session.expect("/4096 tokens")
        session.expect("75% accepted")
        session.send("/exit\r")
        assert session.wait() == 0


def test_tab_completes_commands(warm: Home) -> None:
    with terminal(warm.environment, "chat") as session:
        session.expect("›")
        session.send("/ex\t")
        session.expect("/ex")
        session.expect("it")  # The suffix may be drawn separately.
        session.send("\r")
        assert session.wait() == 0


def test_an_error_does_not_end_the_chat(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "refuse context_length_exceeded")
        session.expect("Refused as told.")
        type_line(session, "die SIGKILL")
        session.expect("The engine crashed")
        type_line(session, "say alive")
        session.expect("alive")


def test_a_turn_whose_daemon_was_killed_is_part_of_the_conversation(home: Home) -> None:
    home.use_fake()
    assert home.run("start").returncode == 0
    with chat(home.environment) as session:
        type_line(session, "say one")
        wait_for(lambda: len(stored_messages(home)) == 2, "the first turn")
        type_line(session, "forever")
        session.expect("30 31 32")
        os.kill(home.status()["pid"], signal.SIGKILL)
        session.expect("localspec:")
        assert home.run("start").returncode == 0
        type_line(session, "say two")
        wait_for(lambda: len(stored_messages(home)) == 6, "all turns")
    messages = stored_messages(home)
    assert messages[:3] == ["say one", "one", "forever"]
    assert messages[3].startswith("0 1 2 3")
    assert messages[4:] == ["say two", "two"]


def test_a_first_question_whose_daemon_was_killed_is_part_of_the_conversation(home: Home) -> None:
    """The chat was not told the conversation's id yet."""
    home.use_fake()
    assert home.run("start").returncode == 0
    with chat(home.environment, columns=400) as session:
        type_line(session, "late 60")
        wait_for(lambda: home.status()["running"], "the question at the engine")
        os.kill(home.status()["pid"], signal.SIGKILL)
        session.expect("localspec:")
        home.run("start")
        type_line(session, "echo")
        session.expect('"content":"late 60"')
    assert stored_messages(home)[:3] == ["late 60", "", "echo"]


def test_no_log_stores_nothing_but_keeps_the_context(warm: Home) -> None:
    warm.run("ask", "say kept")
    with chat(warm.environment, "--no-log", columns=400) as session:
        type_line(session, "say secret")
        type_line(session, "echo")
        session.expect('{"role":"assistant","content":"secret"}')
    assert stored_messages(warm) == ["say kept", "kept"]
    history = warm.root / "state" / "chat_history"
    assert not history.exists() or "secret" not in history.read_text()


def test_a_history_file_that_is_a_pipe_is_reported_and_not_opened(warm: Home) -> None:
    history = warm.root / "state" / "chat_history"
    history.unlink(missing_ok=True)
    os.mkfifo(history)
    try:
        with terminal(warm.environment, "chat", columns=400) as session:
            session.expect("Input history is not saved")
            type_line(session, "say hello")
            type_line(session, "/exit")
            assert session.wait() == 0
    finally:
        history.unlink()


@pytest.mark.parametrize("columns", [20, 200])
def test_narrow_and_wide_terminals(warm: Home, columns: int) -> None:
    with chat(warm.environment, columns=columns) as session:
        type_line(session, "say hello world")


def test_a_chat_ends_by_any_of_several_words(warm: Home) -> None:
    for typed in ("exit", "quit", "/bye", "/quit", "/q", "/exit"):
        with terminal(warm.environment, "chat") as session:
            type_line(session, typed)
            assert session.wait() == 0, typed


def test_messages_that_look_like_commands_can_be_sent(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "/nothing")
        session.expect("Unknown command /nothing; /help lists the commands.")
        session.expect("begin with a space.")
        type_line(session, "/hist")
        session.expect("did you mean /history?")
        type_line(session, " /undo that?")
        wait_for(lambda: len(stored_messages(warm)) == 2, "the turn")
        type_line(session, "/etc/hosts: what is it?")
        wait_for(lambda: len(stored_messages(warm)) == 4, "the turn")
        type_line(session, '"""quit"""')
        wait_for(lambda: len(stored_messages(warm)) == 6, "the turn")
    assert stored_messages(warm)[::2] == ["/undo that?", "/etc/hosts: what is it?", "quit"]


def test_new_conversations(warm: Home) -> None:
    count = len(list_conversations(warm))
    with terminal(warm.environment, "chat", "-s", "Be brief.") as session:
        type_line(session, "say one")
        wait_for(lambda: "one" in stored_messages(warm), "the turn")
        type_line(session, "/new")
        session.expect("Started a new conversation.")
        type_line(session, "say two")
        wait_for(lambda: "two" in stored_messages(warm), "the turn")
        type_line(session, "/clear")
        session.expect("Started a new conversation.")
        assert "\x1b[2J" in session.raw
        type_line(session, "say three")
        type_line(session, "/history")
        session.expect("You\n")
        session.expect("say three")
        type_line(session, "/bye")
        assert session.wait() == 0
    assert stored_messages(warm) == ["Be brief.", "say three", "three"]
    assert len(list_conversations(warm)) == count + 3


def list_conversations(home: Home) -> list[dict[str, object]]:
    conversations: list[dict[str, object]] = home.request(
        "GET", "/localspec/conversations?limit=10000"
    ).json["conversations"]
    return conversations


def test_a_conversation_whose_turns_are_all_undone_is_gone(warm: Home) -> None:
    warm.run("ask", "say before")
    with chat(warm.environment) as session:
        type_line(session, "/regen")
        session.expect("There is no question to answer again.")
        type_line(session, "say one")
        type_line(session, "/undo")
        session.expect("Removed: say one")
        type_line(session, "/regen")
        session.expect("There is no question to answer again.")
        assert stored_messages(warm) == ["say before", "before"]
        type_line(session, "say two")
    assert stored_messages(warm) == ["say two", "two"]
    assert list_conversations(warm)[0]["title"] == "say two"


def test_a_question_whose_regeneration_fails_is_in_the_prompt(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "say one")
        wait_for(lambda: stored_messages(warm) == ["say one", "one"], "the turn")
        type_line(session, "/pair /nowhere/x.gguf")
        session.expect("Now using /nowhere/x.gguf")
        type_line(session, "/regen")
        session.expect("localspec: ")
        session.expect("› say one")
        session.send("\x03")


def test_an_interrupt_before_the_first_word_leaves_nothing(warm: Home) -> None:
    with chat(warm.environment) as session:
        type_line(session, "late 30")
        wait_for(lambda: warm.status()["running"], "the question at the engine")
        time.sleep(0.5)  # The head of the response is on its way.
        session.interrupt()
        session.expect("Stopped before the answer began")
        type_line(session, "say hello")
        wait_for(lambda: stored_messages(warm) == ["say hello", "hello"], "the next turn")


def test_an_answer_of_thoughts_alone_can_be_undone(warm: Home) -> None:
    with chat(warm.environment, "--hide-reasoning") as session:
        type_line(session, "say one")
        wait_for(lambda: stored_messages(warm) == ["say one", "one"], "the turn")
        type_line(session, "think")
        wait_for(lambda: warm.status()["running"], "the question at the engine")
        time.sleep(0.5)
        session.interrupt()
        session.expect("Stopped; the partial answer is part of the conversation.")
        type_line(session, "/undo")
        session.expect("Removed: think")
    assert stored_messages(warm) == ["say one", "one"]


def test_undo_takes_the_tokens_from_the_line_below() -> None:
    conversation = Conversation(AskOptions(no_log=True, model="mine"))
    conversation.messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    conversation.last = {"model": "mine", "usage": {"total_tokens": 64}}
    assert conversation.state() == "mine · 64 tokens"
    assert conversation.undo() == "q"
    assert conversation.state() == "mine"


OPTIONS = ("--top-k 3 --presence-penalty -1.5 --seed 7 --exact -n 9 --draft 2").split()


def test_sampling_by_option_and_by_command(warm: Home) -> None:
    def sampling(frame: dict[str, Any]) -> dict[str, Any]:
        return {**frame["sampling"], "n": frame.get("max_tokens"), "exact": frame.get("exact")}

    with chat(warm.environment, *OPTIONS, columns=200) as session:
        type_line(session, "echo")
        wait_for(lambda: len(stored_messages(warm)) == 2, "the turn")
        for command in ("top_p 0.5", "--frequency-penalty -2", "exact off", "tokens default"):
            type_line(session, f"/set {command}")
            session.expect("from the next question.")
        type_line(session, "/set parameter seed 8")
        session.expect("seed is 8 from")
        for setting, message in (
            ("top_p 1.5", "'top_p' must be a number from 0 to 1, or 'default', not '1.5'."),
            ("seed x", "'seed' must be a whole number from"),
            ("exact 2", "'exact' must be on or off, not '2'."),
            ("temprature 1", "'temprature' cannot be set; did you mean temperature?"),
        ):
            type_line(session, f"/set {setting}")
            session.expect(message)
        type_line(session, "/set seed")
        session.expect("seed is 8.")
        type_line(session, "/set temp")
        session.expect("temperature is default.")
        type_line(session, "/set")
        session.expect("NAME")
        session.expect("top_p              0.5")
        type_line(session, "echo")
        wait_for(lambda: len(stored_messages(warm)) == 4, "the turn")
    first_sampling, second_sampling = (
        sampling(json.loads(text)) for text in stored_messages(warm)[1::2]
    )
    assert (
        first_sampling["top_k"],
        first_sampling["presence_penalty"],
        first_sampling["seed"],
    ) == (3, -1.5, 7)
    assert (first_sampling["n"], first_sampling["exact"]) == (9, True)
    changed = {"top_p": 0.5, "frequency_penalty": -2, "seed": 8, "n": None, "exact": None}
    assert second_sampling == {**first_sampling, **changed}


def test_files_and_a_template_go_with_the_first_question(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("note")
    warm.run("ask", "--save", "tr", "-s", "In $language.", "-n", "9", "say $input", "--force")
    file = str(tmp_path / "a.txt")
    options = ("-t", "tr", "-p", "language=German", "-f", file)
    with chat(warm.environment, *options) as session:
        session.expect("will be included in your next question.")
        type_line(session, "why?")
        session.expect("say /")  # The text that is sent is shown.
        wait_for(lambda: len(stored_messages(warm)) == 3, "the turn")
        type_line(session, "say more")
        wait_for(lambda: len(stored_messages(warm)) == 5, "the turn")
        type_line(session, "/regen")
        wait_for(lambda: len(stored_messages(warm)) == 5, "the turn")
        type_line(session, "/new")
        type_line(session, "hello")
        wait_for(lambda: len(stored_messages(warm)) == 3, "the turn")
    assert stored_messages(warm) == ["In German.", "say hello", "hello"]
    conversation = warm.request(
        "GET", f"/localspec/conversations/{list_conversations(warm)[1]['id']}"
    ).json
    contents = [message["content"] for message in conversation["messages"]]
    assert contents[:2] == ["In German.", f"say {file}:\n```\nnote\n```\n\nwhy?"]
    assert contents[3:] == ["say more", "more"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-t", "nope"], "There is no template 'nope'"),
        (["-p", "a=b"], "add -t TEMPLATE"),
        (["-f", "-"], "In a chat standard input is the keyboard"),
        (["-f", "/nowhere"], "cannot be read"),
    ],
)
def test_a_chat_that_cannot_begin_says_why(warm: Home, options: list[str], message: str) -> None:
    with terminal(warm.environment, "chat", *options, columns=200) as session:
        assert session.wait() == 2
    assert message in session.text


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
    with chat(warm.environment, columns=120) as session:
        session.expect("›")
        session.send(f"{typed}\t")
        time.sleep(0.5)  # Completion runs in a thread.
        session.send("\r")
        session.expect(effect)


def test_a_chat_needs_a_terminal(warm: Home) -> None:
    assert "in a pipe, use: localspec ask" in warm.refused("chat", stdin="hi", code=2)


@pytest.mark.parametrize(
    ("typed", "complete", "kind", "text"),
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
def test_lines_are_parsed_as_messages_or_commands(
    typed: str, complete: bool, kind: str, text: str
) -> None:
    assert is_complete(typed) is complete
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


def test_a_message_is_read_while_it_is_typed(warm: Home) -> None:
    """The scripted engine counts a request for it, and no turn is stored."""

    def count_requests() -> int:
        count: int = warm.status()["counts"]["requests"]
        return count

    words = "say " + "word " * 12
    with chat(warm.environment) as session:
        session.expect("›")
        before = count_requests()
        session.send(words)
        time.sleep(1.0)
        assert count_requests() == before  # the conversation does not exist yet
        session.send("\r")
        session.expect("accepted")
        before, stored = count_requests(), stored_messages(warm)
        session.send(words)
        wait_for(lambda: count_requests() > before, "a request for what is typed")
        assert stored_messages(warm) == stored
        session.send("end\r")
        wait_for(lambda: len(stored_messages(warm)) == len(stored) + 2, "the answer")
