"""Test answers that are cut off: a message says so, and they can be continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.daemons import Home
from tests.support.terminal import terminal

LIMIT = (
    "The answer was cut off at its limit of 2 tokens (-n). To continue the answer: localspec ask -c"
)


def list_answers(home: Home) -> list[str]:
    conversation = home.request("GET", "/localspec/conversations/last").json
    return [
        message["content"] for message in conversation["messages"] if message["role"] == "assistant"
    ]


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--json"], ["--plain"]])
def test_a_cut_off_answer_is_one_line_on_stderr(warm: Home, options: list[str]) -> None:
    run = warm.run("ask", "-n", "2", *options, "slow 5")
    assert (run.returncode, run.stderr) == (0, f"localspec: {LIMIT}\n")
    assert "0 1 " in run.stdout
    assert (
        "2" not in json.loads(run.stdout)["choices"][0]["message"]["content"]
        if options == ["--json"]
        else True
    )


def test_a_complete_answer_causes_no_message(warm: Home) -> None:
    assert warm.run("ask", "-n", "50", "slow 5").stderr == ""


def test_a_full_context_suggests_a_larger_one(warm: Home) -> None:
    stderr = warm.run("ask", "full").stderr
    assert "because the context is full" in stderr
    assert "localspec config set context" in stderr


def test_without_a_history_no_continuation_is_suggested(warm: Home) -> None:
    assert "localspec ask -c" not in warm.run("ask", "--no-log", "-n", "2", "slow 5").stderr


def test_a_cut_off_answer_with_a_schema_is_an_error(warm: Home, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object"}')
    run = warm.run("ask", "--schema", str(schema), "-n", "2", "slow 5")
    assert (run.returncode, LIMIT in run.stderr) == (1, True)
    assert warm.run("ask", "--schema", str(schema), "slow 1").returncode == 0
    assert warm.run("ask", "--json", "--schema", str(schema), "-n", "2", "slow 5").returncode == 1


def test_continue_without_words_resumes_the_answer(warm: Home) -> None:
    warm.run("ask", "-n", "2", "say one two three")
    run = warm.run("ask", "-c")  # The scripted engine repeats the text that it continues.
    assert (run.returncode, run.stdout, run.stderr) == (0, "one two\n", "")
    assert list_answers(warm) == ["one twoone two"]
    assert "is complete" in warm.refused("ask", "-c")
    assert list_answers(warm) == ["one twoone two"]


def test_a_code_block_is_that_of_the_whole_answer(warm: Home) -> None:
    warm.run("ask", "-n", "3", "raw ```\nab\ncd\n```")
    assert list_answers(warm) == ["```\nab\ncd"]
    assert warm.run("ask", "-c", "-x").stdout == "ab\ncd```\nab\ncd\n"


def test_code_that_was_not_reached_is_reported_as_cut_off(warm: Home) -> None:
    run = warm.run("ask", "-x", "-n", "2", "slow 5")
    assert (run.returncode, run.stdout) == (1, "")
    assert LIMIT in run.stderr
    assert "no code block" in run.stderr


def test_a_refused_continuation_leaves_no_empty_line(warm: Home) -> None:
    warm.run("ask", "say all")
    with terminal(warm.environment, "ask", "-c") as session:
        assert session.wait() == 1
        assert session.text.startswith("localspec: The last answer")


def test_a_system_message_needs_a_question(warm: Home) -> None:
    assert warm.run("ask", "-c", "-s", "Be brief.").returncode == 2


def test_a_chat_continues_a_cut_off_answer(warm: Home) -> None:
    with terminal(warm.environment, "chat", "-n", "2", columns=120) as session:
        session.expect("›")
        session.send("say one two three\r")
        session.expect("at its limit of 2 tokens (-n). To continue the answer: /continue")
        session.expect("›")
        session.send("/continue\r")
        session.expect("one two")
        session.expect("›")
        session.send("/exit\r")
        assert session.wait() == 0
    assert list_answers(warm) == ["one twoone two"]


def test_a_chat_without_history_continues_too(warm: Home) -> None:
    with terminal(warm.environment, "chat", "--no-log", "-n", "2", columns=120) as session:
        session.expect("›")
        session.send("/continue\r")
        session.expect("There is no answer to continue.")
        session.expect("›")
        session.send("say one two three\r")
        session.expect("/continue")
        session.expect("›")
        session.send("/continue\r")
        session.expect("one two")
        session.expect("›")
        session.send("echo\r")
        session.expect('"content":"one twoone two"')
        session.send("/exit\r")
        assert session.wait() == 0
