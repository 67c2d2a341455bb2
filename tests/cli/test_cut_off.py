"""An answer that was cut off: it is said, and it can go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.daemons import Home
from tests.support.terminal import terminal

LIMIT = (
    "The answer was cut off at its limit of 2 tokens (-n). To continue the answer: localspec ask -c"
)


def answers(home: Home) -> list[str]:
    found = home.request("GET", "/localspec/conversations/last").json
    return [each["content"] for each in found["messages"] if each["role"] == "assistant"]


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--json"], ["--plain"]])
def test_it_is_one_line_on_stderr(warm: Home, options: list[str]) -> None:
    run = warm.run("ask", "-n", "2", *options, "slow 5")
    assert (run.returncode, run.stderr) == (0, f"localspec: {LIMIT}\n")
    assert "0 1 " in run.stdout
    assert (
        "2" not in json.loads(run.stdout)["choices"][0]["message"]["content"]
        if options == ["--json"]
        else True
    )


def test_an_answer_that_is_complete_says_nothing(warm: Home) -> None:
    assert warm.run("ask", "-n", "50", "slow 5").stderr == ""


def test_a_full_context_has_another_cure(warm: Home) -> None:
    said = warm.run("ask", "full").stderr
    assert "because the context is full" in said
    assert "localspec config set context" in said


def test_what_is_kept_nowhere_cannot_go_on(warm: Home) -> None:
    assert "localspec ask -c" not in warm.run("ask", "--no-log", "-n", "2", "slow 5").stderr


def test_with_a_schema_it_is_an_error(warm: Home, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object"}')
    run = warm.run("ask", "--schema", str(schema), "-n", "2", "slow 5")
    assert (run.returncode, LIMIT in run.stderr) == (1, True)
    assert warm.run("ask", "--schema", str(schema), "slow 1").returncode == 0
    assert warm.run("ask", "--json", "--schema", str(schema), "-n", "2", "slow 5").returncode == 1


def test_continue_alone_goes_on_where_it_stopped(warm: Home) -> None:
    warm.run("ask", "-n", "2", "say one two three")
    run = warm.run("ask", "-c")  # the scripted engine repeats what it reads
    assert (run.returncode, run.stdout, run.stderr) == (0, "one two\n", "")
    assert answers(warm) == ["one twoone two"]
    run = warm.run("ask", "-c")
    assert (run.returncode, "is complete" in run.stderr) == (1, True)
    assert answers(warm) == ["one twoone two"]


def test_a_code_block_is_that_of_the_whole_answer(warm: Home) -> None:
    warm.run("ask", "-n", "3", "raw ```\nab\ncd\n```")
    assert answers(warm) == ["```\nab\ncd"]
    assert warm.run("ask", "-c", "-x").stdout == "ab\ncd```\nab\ncd\n"


def test_code_that_is_not_reached_is_told_from_none(warm: Home) -> None:
    run = warm.run("ask", "-x", "-n", "2", "slow 5")
    assert (run.returncode, run.stdout) == (1, "")
    assert LIMIT in run.stderr
    assert "no code block" in run.stderr


def test_a_refusal_to_go_on_leaves_no_empty_line(warm: Home) -> None:
    warm.run("ask", "say all")
    with terminal(warm.environment, "ask", "-c") as shown:
        assert shown.wait() == 1
        assert shown.text.startswith("localspec: The last answer")


def test_a_system_message_needs_a_question(warm: Home) -> None:
    assert warm.run("ask", "-c", "-s", "Be brief.").returncode == 2


def test_a_chat_says_it_and_goes_on(warm: Home) -> None:
    with terminal(warm.environment, "chat", "-n", "2", columns=120) as shown:
        shown.expect("›")
        shown.send("say one two three\r")
        shown.expect("at its limit of 2 tokens (-n). To continue the answer: /continue")
        shown.expect("›")
        shown.send("/continue\r")
        shown.expect("one two")
        shown.expect("›")
        shown.send("/exit\r")
        assert shown.wait() == 0
    assert answers(warm) == ["one twoone two"]


def test_a_chat_that_keeps_nothing_goes_on_too(warm: Home) -> None:
    with terminal(warm.environment, "chat", "--no-log", "-n", "2", columns=120) as shown:
        shown.expect("›")
        shown.send("/continue\r")
        shown.expect("There is no answer to continue.")
        shown.expect("›")
        shown.send("say one two three\r")
        shown.expect("/continue")
        shown.expect("›")
        shown.send("/continue\r")
        shown.expect("one two")
        shown.expect("›")
        shown.send("echo\r")
        shown.expect('"content":"one twoone two"')
        shown.send("/exit\r")
        assert shown.wait() == 0
