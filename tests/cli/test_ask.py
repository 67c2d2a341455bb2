"""Test the input of `localspec ask` (files, options, stdin) and its output in a pipe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localspec.cli.terminal import fences
from tests.support.daemons import Home


def ask_echo(home: Home, *arguments: str, **options: Any) -> Any:
    """Return the request that the engine received; the prompt `echo` is answered with it."""
    output = home.must_run("ask", *arguments, **options)
    return json.loads(output)


def ask_for_content(home: Home, *arguments: str, **options: Any) -> str:
    """Return the last message that the engine received; it must begin with the command `echo`."""
    messages = ask_echo(home, *arguments, **options)["prompt"]["messages"]
    content: str = messages[-1]["content"]
    return content


def test_files_come_with_their_names_before_the_words(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "b.md").write_text("```sh\nls\n```\n")
    text = ask_for_content(
        warm, "-f", "-", "-f", "*.py", "-f", "b.md", "why?", stdin="echo", cwd=tmp_path
    )
    assert text == (
        "echo\n\na.py:\n```\nprint(1)\n```\n\nb.md:\n````\n```sh\nls\n```\n````\n\nwhy?"
    )


def test_a_file_named_twice_is_asked_about_once(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a[1].py").write_text("one")
    text = ask_for_content(warm, "-f", "a[1].py", "-f", "a*", stdin="echo", cwd=tmp_path)
    assert text.count("one") == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.gz", b"\x1f\x8b\0", "is not text but gzip data"),
        ("x.bin", b"a\0b", "is not text but binary data"),
        ("latin.txt", "Grüße".encode("latin-1"), "is not UTF-8: byte 2 is 0xfc"),
        ("Standard input", b"\x1f\x8b\x08\0\0", "is not text but gzip data"),
    ],
)
def test_binary_data_is_refused_with_a_reason(
    warm: Home, tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    if name == "Standard input":
        run = warm.run("ask", "what is it?", stdin=os.fsdecode(data))
    else:
        run = warm.run("ask", "-f", name, "what is it?", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert f"{name} {message}" in run.stderr


@pytest.mark.parametrize("pattern", ["logo.png", "l*.png"])
def test_a_picture_goes_to_the_daemon(warm: Home, tmp_path: Path, pattern: str) -> None:
    (tmp_path / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    run = warm.run("ask", "-f", pattern, "what is it?", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    assert "the picture is damaged: it states no size" in run.stderr
    run = warm.run("ask", "-f", pattern, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert "No question given" in run.stderr


def test_utf16_with_its_mark_is_text(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("Grüße", encoding="utf-16")
    assert "Grüße" in ask_for_content(warm, "-f", "w.txt", stdin="echo", cwd=tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-f *.nothing", "No file matches '*.nothing'."),
        ("-f missing.py", "missing.py cannot be read: No such file or directory."),
        ("-f .", ". has no text files."),
        ("--draft 65", "(0 to 64)"),
        ("--schema {no", "not valid JSON"),
        ("-x --xl", "cannot be used"),
        ("-x --json", "cannot be used"),
        ("-c --cid a", "cannot be used"),
        ("-c --no-log", "cannot be used"),
    ],
)
def test_wrong_options_and_files_are_refused(
    warm: Home, tmp_path: Path, line: str, message: str
) -> None:
    assert message in warm.refused("ask", *line.split(), "hi", cwd=tmp_path, code=2)


def test_sampling_options_reach_the_engine(warm: Home) -> None:
    request = ask_echo(
        warm, "--top-p", "0.5", "--top-k", "3", "--min-p", "0.1", "--seed", "7", "echo"
    )
    assert request["sampling"] == {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7}
    request = ask_echo(
        warm, *"--repeat-penalty 1.1 --presence-penalty=-1 --frequency-penalty 2".split(), "echo"
    )
    penalties = {"repeat_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 2.0}
    assert request["sampling"] == penalties


def test_draft_depth_and_exactness_are_options(warm: Home) -> None:
    assert ask_echo(warm, "--draft", "5", "--exact", "echo")["speculative"]["depth"] == 5
    assert ask_echo(warm, "--exact", "echo")["exact"] is True
    assert ask_echo(warm, "--draft", "0", "echo")["speculative"]["enabled"] is False


def test_a_schema_from_a_file_or_in_place(warm: Home, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    for schema_argument in ("s.json", json.dumps(schema)):
        request = ask_echo(warm, "--schema", schema_argument, "echo", cwd=tmp_path)
        assert json.loads(request["constraint"]["source"]) == schema


def test_continuing_sends_the_earlier_messages(warm: Home) -> None:
    warm.run("ask", "say one")
    messages = ask_echo(warm, "-c", "echo")["prompt"]["messages"]
    assert [item["content"] for item in messages] == ["say one", "one", "echo"]
    name = json.loads(warm.run("ask", "--json", "say two").stdout)["localspec"]["conversation"]
    messages = ask_echo(warm, "--cid", name, "echo")["prompt"]["messages"]
    assert [item["content"] for item in messages] == ["say two", "two", "echo"]
    assert "no conversation 'nope'" in warm.run("ask", "--cid", "nope", "hi").stderr


def test_no_log_stores_nothing(warm: Home) -> None:
    warm.run("ask", "say kept")
    warm.run("ask", "--no-log", "say secret")
    conversation = warm.request("GET", "/localspec/conversations/last").json
    assert conversation["title"] == "say kept"


ANSWER = "Use this:\n```python\nprint('hé')\n```\nor\n~~~\nx = '''\n```\n'''\n~~~\nend"


def test_code_blocks_alone(warm: Home) -> None:
    # `say` would join the lines; the scripted engine repeats every other text.
    assert warm.run("ask", "-x", stdin=ANSWER).stdout == "print('hé')\n"
    code = warm.run("ask", "--xl", stdin=ANSWER).stdout
    assert code == "x = '''\n```\n'''\n"
    compile(code, "answer", "exec")


def test_an_answer_without_code_is_an_error_with_a_hint(warm: Home) -> None:
    run = warm.run("ask", "-x", "say nothing")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.endswith("to read it: localspec history show last\n")
    assert warm.run("ask", "-x", "--no-log", "say nothing").stderr.endswith(
        "the answer was:\nnothing\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no code", []),
        ("```\na\n", ["a"]),
        ("````md\n```\na\n```\n````", ["```\na\n```"]),
        ("```a``` inline", []),
        ("  ```\n  a\n    b\n  ```", ["a\n  b"]),
        ("```\n```", [""]),
    ],
)
def test_fences(text: str, expected: list[str]) -> None:
    assert fences.blocks(text) == expected


def test_a_pipe_gets_the_answer_and_no_escape_codes(warm: Home) -> None:
    text = "# Title\n\n**bold** and `code` \x1b[31m"
    run = warm.run("ask", "--show-draft", stdin=text)
    assert (run.stdout, run.stderr) == (f"{text}\n", "")
