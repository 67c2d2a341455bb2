"""Test the commands with the shipped pair and the real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.cli.terminal import fences
from tests.support.daemons import Home, temporary_home
from tests.support.extras import needs
from tests.support.terminal import terminal

# Characters of several bytes, which the vocabulary of the shipped pair splits into one token per byte.
HARD_TEXT = "👩‍👩‍👧 e\u0301 नमस्ते 🇩🇪"
ARGUMENTS = ("--no-log", "--schema", json.dumps({"enum": [HARD_TEXT]}, ensure_ascii=False), "hi")


@pytest.fixture(scope="module")
def warm() -> Iterator[Home]:
    with temporary_home() as home:
        assert home.run("ask", "What does os.walk do?").returncode == 0
        yield home


def test_characters_cut_across_tokens_arrive_whole(warm: Home) -> None:
    tokens = warm.request("POST", "/tokenize", {"content": HARD_TEXT, "with_pieces": True}).json
    assert any(isinstance(token["piece"], list) for token in tokens["tokens"]), (
        "no character is cut"
    )
    for options in ((), ("--no-stream",), ("--draft", "0"), ("--show-draft",)):
        assert warm.run("ask", *options, *ARGUMENTS).stdout == f'"{HARD_TEXT}"\n'


@pytest.mark.parametrize("options", [(), ("--plain",), ("--show-draft",)])
def test_characters_arrive_whole_on_a_terminal(warm: Home, options: tuple[str, ...]) -> None:
    with terminal(warm.environment, "ask", *options, *ARGUMENTS) as session:
        assert session.wait() == 0
        assert f'"{HARD_TEXT}"' in session.text
        assert "\ufffd" not in session.text


def test_a_pipe_gets_the_answer_alone(warm: Home) -> None:
    run = warm.run("ask", "--show-draft", "--temperature", "0", "What does shutil.copytree do?")
    answer = json.loads(warm.run("history", "show", "last", "--json").stdout)["messages"][-1]
    assert (run.stdout, run.stderr) == (f"{answer['content'].rstrip()}\n", "")
    assert "\x1b" not in run.stdout


def test_a_too_long_text_is_refused_with_a_length_that_fits(warm: Home) -> None:
    text = "some words and then some more of them. " * 100_000
    run = warm.run("ask", "--no-log", stdin=text)
    assert (run.returncode, run.stdout) == (1, "")
    assert "too long: 3.7 MiB" in run.stderr
    assert "This pair's context holds 1024" in run.stderr
    fits = int(re.findall(r"head -c (\d+)", run.stderr)[0])
    assert fits > 1000
    assert warm.run("ask", "--no-log", "-n", "5", stdin=text[:fits]).returncode == 0


def test_an_extracted_code_block_compiles(warm: Home) -> None:
    for name in ("itertools.groupby", "functools.reduce", "math.sqrt", "zip"):
        question = f"Show an example of {name}."
        run = warm.run("ask", "-x", "--temperature", "0", question)
        answer = json.loads(warm.run("history", "show", "last", "--json").stdout)["messages"][-1]
        assert run.returncode == 0, run.stderr
        assert run.stdout.rstrip("\n") == fences.blocks(answer["content"])[0].rstrip("\n")
        compile(run.stdout, name, "exec")


def test_an_answer_without_code_is_no_code(warm: Home) -> None:
    run = warm.run("ask", "-x", "--temperature", "0", "What does shutil.copytree do?")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no code block (the built-in demo pair writes" in run.stderr


@needs("editors")
def test_complete_prints_an_infill(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n\ndef names(folder):\n    \n    return found\n")
    run = warm.run("complete", "a.py:4:5", "-n", "12", "-u", cwd=tmp_path)
    assert run.returncode == 0
    assert run.stdout.strip()
    assert "tokens in " in run.stderr
