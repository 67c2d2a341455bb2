"""What `ask` asks about, and how it prints: in a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localspec.cli.terminal import markdown
from tests.support.daemons import Home


def asked(home: Home, *arguments: str, **options: Any) -> Any:
    """The request as the engine got it: `echo` answers with it."""
    run = home.run("ask", *arguments, **options)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def question(home: Home, *arguments: str, **options: Any) -> str:
    """What the engine was asked; the command `echo` must come first in it."""
    messages = asked(home, *arguments, **options)["prompt"]["messages"]
    content: str = messages[-1]["content"]
    return content


# ------------------------------------------------------------------ files


def test_files_come_with_their_names_before_the_words(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "b.md").write_text("```sh\nls\n```\n")
    text = question(warm, "-f", "-", "-f", "*.py", "-f", "b.md", "why?", stdin="echo", cwd=tmp_path)
    assert text == (
        "echo\n\na.py:\n```\nprint(1)\n```\n\nb.md:\n````\n```sh\nls\n```\n````\n\nwhy?"
    )


def test_a_file_named_twice_is_asked_about_once(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a[1].py").write_text("one")
    text = question(warm, "-f", "a[1].py", "-f", "a*", stdin="echo", cwd=tmp_path)
    assert text.count("one") == 1


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("logo.png", b"\x89PNG\r\n\x1a\n\0", "is not text but a PNG image"),
        ("a.pdf", b"%PDF-1.7\n\xff\0", "is a PDF document"),
        ("x.bin", b"a\0b", "is not text but binary data"),
        ("latin.txt", "Grüße".encode("latin-1"), "is not UTF-8: byte 2 is 0xfc"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(
    warm: Home, tmp_path: Path, name: str, data: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(data)
    run = warm.run("ask", "-f", name, "what is it?", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert f"{name} {why}" in run.stderr


def test_utf16_with_its_mark_is_text(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("Grüße", encoding="utf-16")
    assert "Grüße" in question(warm, "-f", "w.txt", stdin="echo", cwd=tmp_path)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*.nothing", "No file matches '*.nothing'."),
        ("missing.py", "missing.py cannot be read: No such file or directory."),
        (".", ". has no text files."),
    ],
)
def test_a_file_that_is_not_there(warm: Home, tmp_path: Path, pattern: str, why: str) -> None:
    run = warm.run("ask", "-f", pattern, "hi", cwd=tmp_path)
    assert run.returncode == 2
    assert why in run.stderr


def test_binary_data_on_stdin_is_refused(warm: Home) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "localspec", "ask", "what is it?"],
        env=warm.environment,
        input=b"\x1f\x8b\x08\0\0",
        capture_output=True,
    )
    assert run.returncode == 2
    assert b"Standard input is not text but gzip data" in run.stderr


# ------------------------------------------------------------------ options


def test_sampling_options_reach_the_engine(warm: Home) -> None:
    sent = asked(warm, "--top-p", "0.5", "--top-k", "3", "--min-p", "0.1", "--seed", "7", "echo")
    assert sent["sampling"] == {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7}
    sent = asked(
        warm, *"--repeat-penalty 1.1 --presence-penalty=-1 --frequency-penalty 2".split(), "echo"
    )
    penalties = {"repeat_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 2.0}
    assert sent["sampling"] == penalties


def test_drafting_can_be_fixed_or_switched_off_and_exactness_wanted(warm: Home) -> None:
    assert asked(warm, "--draft", "5", "--exact", "echo")["speculative"]["depth"] == 5
    assert asked(warm, "--exact", "echo")["exact"] is True
    assert asked(warm, "--draft", "0", "echo")["speculative"]["enabled"] is False
    assert "(0 to 64)" in warm.run("ask", "--draft", "65", "hi").stderr


def test_a_schema_from_a_file_or_in_place(warm: Home, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    for given in ("s.json", json.dumps(schema)):
        sent = asked(warm, "--schema", given, "echo", cwd=tmp_path)
        assert json.loads(sent["constraint"]["source"]) == schema
    refused = warm.run("ask", "--schema", "{no", "echo")
    assert (refused.returncode, "not valid JSON" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    "options", [["-x", "--xl"], ["-x", "--json"], ["-c", "--cid", "a"], ["-c", "--no-log"]]
)
def test_options_that_exclude_each_other(warm: Home, options: list[str]) -> None:
    run = warm.run("ask", *options, "hi")
    assert run.returncode == 2
    assert "cannot be used" in run.stderr


def test_continuing_sends_what_was_said(warm: Home) -> None:
    warm.run("ask", "say one")
    messages = asked(warm, "-c", "echo")["prompt"]["messages"]
    assert [each["content"] for each in messages] == ["say one", "one", "echo"]
    name = json.loads(warm.run("ask", "--json", "say two").stdout)["localspec"]["conversation"]
    messages = asked(warm, "--cid", name, "echo")["prompt"]["messages"]
    assert [each["content"] for each in messages] == ["say two", "two", "echo"]
    assert "no conversation 'nope'" in warm.run("ask", "--cid", "nope", "hi").stderr


def test_nothing_is_kept_with_no_log(warm: Home) -> None:
    warm.run("ask", "say kept")
    warm.run("ask", "--no-log", "say secret")
    found = warm.request("GET", "/localspec/conversations/last").json
    assert found["title"] == "say kept"


# ------------------------------------------------------------------ code blocks

ANSWER = "Use this:\n```python\nprint('hé')\n```\nor\n~~~\nx = '''\n```\n'''\n~~~\nend"


def test_code_blocks_alone(warm: Home) -> None:
    # `say` would fold the lines; the scripted engine answers other texts with themselves
    assert warm.run("ask", "-x", stdin=ANSWER).stdout == "print('hé')\n"
    last = warm.run("ask", "--xl", stdin=ANSWER).stdout
    assert last == "x = '''\n```\n'''\n"
    compile(last, "answer", "exec")


def test_an_answer_without_code_is_an_error_that_says_where_it_is(warm: Home) -> None:
    run = warm.run("ask", "-x", "say nothing")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.endswith("to read it: localspec history show last\n")
    assert warm.run("ask", "-x", "--no-log", "say nothing").stderr.endswith(
        "the answer was:\nnothing\n"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no code", []),
        ("```\na\n", ["a"]),
        ("````md\n```\na\n```\n````", ["```\na\n```"]),
        ("```a``` inline", []),
        ("  ```\n  a\n    b\n  ```", ["a\n  b"]),
        ("```\n```", [""]),
    ],
)
def test_fences(text: str, found: list[str]) -> None:
    assert markdown.blocks(text) == found


# ------------------------------------------------------------------ a pipe


def test_a_pipe_gets_the_answer_and_no_escape_codes(warm: Home) -> None:
    text = "# Title\n\n**bold** and `code` \x1b[31m"
    run = warm.run("ask", "--show-draft", stdin=text)
    assert (run.stdout, run.stderr) == (f"{text}\n", "")


def test_head_closes_the_pipe_quietly(warm: Home) -> None:
    run = subprocess.run(
        f"{sys.executable} -m localspec ask say one | head -1; "
        f"{sys.executable} -m localspec ask slow 50 | head -c 4",
        shell=True,
        env=warm.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (run.stdout, run.stderr) == ("one\n0 1 ", "")
