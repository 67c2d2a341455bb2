"""Test `--copy` through the program of a desktop and through the terminal (OSC 52)."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec.cli.terminal.fences import blocks
from tests.support.daemons import Home
from tests.support.terminal import terminal

TEXT = "Do **this**:\n\n```make\nall:\n\tcc  -o 'ä' \n```\n\nor\n\n```\nb = [1]\n\nc\n```\n"
FIRST, LAST = "all:\n\tcc  -o 'ä' ", "b = [1]\n\nc"
PROGRAMS = [
    ("wl-copy", "WAYLAND_DISPLAY"),
    ("xclip", "DISPLAY"),
    ("xsel", "DISPLAY"),
    ("clip.exe", ""),
    ("tmux", "TMUX"),
]
DESKTOP = ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "TMUX")


@pytest.fixture
def desktop(warm: Home, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function that makes the environment of a desktop with the given clipboard programs."""

    def make_environment(*programs: str, **variables: str) -> dict[str, str]:
        for name in programs:
            program = tmp_path / name
            # xclip and wl-copy keep running to serve the clipboard.
            program.write_text(f'#!/bin/sh\n/bin/cat > "{tmp_path}/copied"\n/bin/sleep 20 &\n')
            program.chmod(0o755)
        plain = {key: value for key, value in warm.environment.items() if key not in DESKTOP}
        return {**plain, "PATH": str(tmp_path), **variables}

    return make_environment


def osc52_texts(raw: str) -> list[str]:
    """Return the texts that the output asks the terminal to copy."""
    return [
        base64.b64decode(encoded).decode() for encoded in re.findall(r"\x1b]52;c;(.*?)\x07", raw)
    ]


@pytest.mark.parametrize(("program", "variable"), PROGRAMS)
def test_the_answer_is_copied_as_the_model_wrote_it(
    warm: Home, desktop: Callable[..., dict[str, str]], tmp_path: Path, program: str, variable: str
) -> None:
    environment = desktop(program, **({variable: "x"} if variable else {}))
    with terminal(environment, "ask", "--copy", f"raw {TEXT}") as session:
        assert session.wait() == 0
        assert f"Copied 14 lines ({program})." in session.text
        assert not osc52_texts(session.raw)
    encoding = "utf-16-le" if program == "clip.exe" else "utf-8"
    assert (tmp_path / "copied").read_bytes().decode(encoding) == TEXT


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ([], TEXT),
        (["--plain"], TEXT),
        (["--no-stream"], TEXT),
        (["--json"], TEXT),
        (["-x"], FIRST),
        (["--xl"], LAST),
    ],
)
def test_without_a_program_the_terminal_copies(
    desktop: Callable[..., dict[str, str]], options: list[str], copied: str
) -> None:
    with terminal(desktop(), "ask", "--copy", *options, f"raw {TEXT}") as session:
        assert session.wait() == 0
        assert osc52_texts(session.raw) == [copied]
        assert "OSC 52" in session.text


def test_without_a_question_the_last_answer_is_copied(
    desktop: Callable[..., dict[str, str]],
) -> None:
    environment = desktop()
    with terminal(environment, "ask", "--no-stream", f"raw {TEXT}") as session:
        assert session.wait() == 0
    for options, copied in (([], TEXT), (["-x"], FIRST), (["--xl"], LAST)):
        with terminal(environment, "ask", "--copy", *options) as session:
            assert session.wait() == 0
            assert osc52_texts(session.raw) == [copied]
    with terminal(environment, "ask", "-x", "--no-stream", "say no code") as session:
        assert session.wait() == 1
    with terminal(environment, "ask", "-x") as session:
        assert session.wait() == 1
        assert "The last answer has no code block" in session.text


def test_an_empty_pipe_does_not_stand_for_the_last_answer(warm: Home) -> None:
    warm.run("ask", "raw ```\nold\n```")
    run = warm.run("ask", "-x", stdin="")
    assert (run.returncode, run.stdout) == (2, "")
    assert "No question given" in run.stderr


def test_the_desktop_is_not_used_over_ssh(desktop: Callable[..., dict[str, str]]) -> None:
    environment = desktop("clip.exe", "xclip", SSH_CONNECTION="1 2 3 4")
    with terminal(environment, "ask", "--copy", "say it") as session:
        assert session.wait() == 0
        assert osc52_texts(session.raw) == ["it"]


def test_a_failing_program_is_skipped(
    desktop: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    environment = desktop("xclip", DISPLAY=":9")
    (tmp_path / "xclip").write_text("#!/bin/sh\nexit 1\n")
    with terminal(environment, "ask", "--copy", "say it") as session:
        assert session.wait() == 0
        assert osc52_texts(session.raw) == ["it"]


def test_a_text_that_cannot_be_copied_is_reported(desktop: Callable[..., dict[str, str]]) -> None:
    with terminal({**desktop(), "TERM_": "dumb"}, "ask", "--copy", "say it") as session:
        assert session.wait() == 1
        assert "it" in session.text
        assert "Not copied: there is no terminal and no clipboard program" in session.text
    with terminal(desktop(), "ask", "--copy", "raw " + "x" * 60_000) as session:
        assert session.wait() == 1
        assert "terminals take 56245" in session.text


def test_copying_in_a_chat(desktop: Callable[..., dict[str, str]]) -> None:
    with terminal(desktop(), "chat", columns=120) as session:
        session.expect("›")
        session.send("/copy\r")
        session.expect("There is no answer to copy.")
        session.expect("›")
        session.send("say one\r")
        session.expect("/4096 tokens")
        session.send("/copy 1\r")
        session.expect("No answer has a code block; /copy alone copies the last answer.")
        session.expect("›")
        for number in ("one", "two"):
            session.send(f'"""raw \x1b\r```\x1b\r{number} \x1b\r```"""\r')
            session.expect("/4096 tokens")  # The status line means that the prompt is shown.
        for command in ("/copy", "/copy 1", "/copy 2"):
            session.send(f"{command}\r")
            session.expect("Copied")
            session.expect("/4096 tokens")
        session.send("/copy 3\r")
        session.expect("There are 2 code blocks in this conversation; /copy 1 copies the last one.")
        session.expect("›")
        session.send("/exit\r")
        assert session.wait() == 0
    last_answer, *code_blocks = osc52_texts(session.raw)
    assert blocks(last_answer) == ["two "]
    assert code_blocks == ["two ", "one "]
