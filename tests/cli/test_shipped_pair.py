"""The commands with the pair that ships and the engine that decodes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.cli.terminal import markdown
from tests.support.daemons import Home, temporary_home
from tests.support.terminal import terminal

# A family joined by three invisible characters, a combining accent, Devanagari, a flag: several bytes
# each, which this vocabulary has as tokens of their own.
HARD = "👩‍👩‍👧 e\u0301 नमस्ते 🇩🇪"
SAYING_IT = ("--no-log", "--schema", json.dumps({"enum": [HARD]}, ensure_ascii=False), "hi")


@pytest.fixture(scope="module")
def warm() -> Iterator[Home]:
    with temporary_home() as home:
        assert home.run("ask", "What does os.walk do?").returncode == 0
        yield home


def test_characters_cut_across_tokens_arrive_whole(warm: Home) -> None:
    tokens = warm.request("POST", "/tokenize", {"content": HARD, "with_pieces": True}).json
    assert any(isinstance(each["piece"], list) for each in tokens["tokens"]), "no character is cut"
    for options in ((), ("--no-stream",), ("--draft", "0"), ("--show-draft",)):
        assert warm.run("ask", *options, *SAYING_IT).stdout == f'"{HARD}"\n'


@pytest.mark.parametrize("options", [(), ("--plain",), ("--show-draft",)])
def test_on_a_terminal_too(warm: Home, options: tuple[str, ...]) -> None:
    with terminal(warm.environment, "ask", *options, *SAYING_IT) as shown:
        assert shown.wait() == 0
        assert f'"{HARD}"' in shown.text
        assert "\ufffd" not in shown.text


def test_a_pipe_gets_the_answer_alone(warm: Home) -> None:
    run = warm.run("ask", "--show-draft", "--temperature", "0", "What does shutil.copytree do?")
    answer = json.loads(warm.run("history", "show", "last", "--json").stdout)["messages"][-1]
    assert (run.stdout, run.stderr) == (f"{answer['content'].rstrip()}\n", "")
    assert "\x1b" not in run.stdout


def test_nearly_four_megabytes_are_refused_with_what_fits_and_it_does(warm: Home) -> None:
    text = "some words and then some more of them. " * 100_000
    run = warm.run("ask", "--no-log", stdin=text)
    assert (run.returncode, run.stdout) == (1, "")
    assert "too long: 3.7 MiB" in run.stderr
    assert "This pair's context holds 1024" in run.stderr
    fits = int(re.findall(r"head -c (\d+)", run.stderr)[0])
    assert fits > 1000
    assert warm.run("ask", "--no-log", "-n", "5", stdin=text[:fits]).returncode == 0


def test_the_code_block_alone_is_the_blocks_text_and_python_compiles(warm: Home) -> None:
    for name in ("itertools.groupby", "functools.reduce", "math.sqrt", "zip"):
        question = f"Show an example of {name}."
        run = warm.run("ask", "-x", "--temperature", "0", question)
        answer = json.loads(warm.run("history", "show", "last", "--json").stdout)["messages"][-1]
        assert run.returncode == 0, run.stderr
        assert run.stdout.rstrip("\n") == markdown.blocks(answer["content"])[0].rstrip("\n")
        compile(run.stdout, name, "exec")


def test_an_answer_without_code_is_no_code(warm: Home) -> None:
    run = warm.run("ask", "-x", "--temperature", "0", "What does shutil.copytree do?")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no code block (the built-in demo pair writes" in run.stderr


def test_complete_fills_in(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n\ndef names(folder):\n    \n    return found\n")
    run = warm.run("complete", "a.py:4:5", "-n", "12", "-u", cwd=tmp_path)
    assert run.returncode == 0
    assert run.stdout.strip()
    assert "tokens in " in run.stderr
